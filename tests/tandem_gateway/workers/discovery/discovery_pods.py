"""Pods as the API server sends them."""

from __future__ import annotations

from typing import Any

from tandem_api.names import ANNOTATION_CONFIG_HASH, LABEL_MODEL, LABEL_NODES_PER_REPLICA, LABEL_REVISION, LABEL_ROLE


def make_pod(
    name: str,
    *,
    role: str = "decode",
    ip: str = "10.0.0.1",
    version: str = "1",
    nodes: int = 1,
    config: str = "c1",
    **changes: Any,
) -> dict[str, Any]:
    """A ready pod; `changes` replace fields, for example `status_podIP`."""
    pod: dict[str, Any] = {
        "metadata": {
            "name": name,
            "resourceVersion": version,
            "labels": {LABEL_MODEL: "toy", LABEL_ROLE: role, LABEL_REVISION: "r1", LABEL_NODES_PER_REPLICA: str(nodes)},
            "annotations": {ANNOTATION_CONFIG_HASH: config},
        },
        "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
        "spec": {"containers": [{"name": "worker"}]},
    }
    for path, value in changes.items():
        part, _, key = path.partition("_")
        pod[part][key] = value
    return pod
