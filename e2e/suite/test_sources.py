"""Model sources beyond the plain download: a shared cache under a lock, and a claim that already has the files."""

from __future__ import annotations

from typing import Any

from e2e.suite.fleet import Fleet, smollm2, until

CLAIM: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
}


def test_shared_cache_is_downloaded_once(fleet: Fleet) -> None:
    fleet.apply(CLAIM)
    manifest = smollm2("cached", prefill=None, decode=2)
    manifest["spec"]["model"]["cache"] = {"persistentVolumeClaim": "models"}
    fleet.apply(manifest)
    fleet.wait_ready("cached", within=400)
    fleet.wait_role("cached", "unified", 2)
    logs = [
        fleet.cluster.kubectl("-n", fleet.namespace, "logs", p["metadata"]["name"], "-c", "worker")
        for p in fleet.pods("cached", "unified")
    ]
    downloads = [log for log in logs if '"message":"downloading ' in log]
    assert len(downloads) == 1, f"{len(downloads)} of 2 workers downloaded"


def test_a_claim_is_filled_before_workers_start(fleet: Fleet) -> None:
    """Nobody downloads but the Job, and the worker that comes after it finds its weights prepared."""
    fleet.apply(CLAIM)
    manifest = smollm2("warmed", prefill=None, decode=1)
    manifest["spec"]["engine"]["dtype"] = "BFloat16"
    manifest["spec"]["model"]["cache"] = {"persistentVolumeClaim": "models", "prewarm": True}
    fleet.apply(manifest)
    fleet.wait_ready("warmed", within=400)
    told = {c["type"]: c for c in fleet.get("inferencemodels", "warmed")["status"]["conditions"]}["CachePrewarmed"]
    assert (told["status"], told["reason"]) == ("True", "Prewarmed"), told
    (pod,) = fleet.pods("warmed", "unified")
    log = fleet.cluster.kubectl("-n", fleet.namespace, "logs", pod["metadata"]["name"], "-c", "worker")
    assert '"message":"downloading ' not in log
    assert "prepared weights are kept" not in log, "the Job has kept them"
    fleet.patch("warmed", {"model": {"cache": {"prewarm": None}}})
    until("the Job to go", lambda: not fleet.find("jobs"), within=120)
