"""Model sources beyond the plain download: a shared cache under a lock, and a claim that already has the files."""

from __future__ import annotations

from typing import Any

import pytest

from e2e.suite.fleet import Fleet, smollm2

CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


@pytest.mark.timeout(300)
def test_shared_cache_is_downloaded_once(fleet: Fleet) -> None:
    fleet.apply(CLAIM)
    manifest = smollm2("cached", prefill=None, decode=2)
    manifest["spec"]["model"]["cache"] = {"persistentVolumeClaim": "models"}
    fleet.apply(manifest)
    fleet.wait_ready("cached")
    fleet.wait_role("cached", "unified", 2)
    logs = [
        fleet.cluster.kubectl("-n", fleet.namespace, "logs", p["metadata"]["name"], "-c", "worker")
        for p in fleet.pods("cached", "unified")
    ]
    downloads = [log for log in logs if '"message":"downloading ' in log]
    assert len(downloads) == 1, f"{len(downloads)} of 2 workers downloaded"
