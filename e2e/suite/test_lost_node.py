"""A node whose kubelet says nothing any more: the status names it, nothing is moved, and it recovers by itself."""

from __future__ import annotations

import time

import pytest

from e2e.cluster.binaries.backend import BinariesBackend
from e2e.suite.fleet import Fleet, Object, Say, until

NODE = "node-0"
GRACE = 180.0
"""Seconds until Kubernetes itself calls the node unreachable: 25 in this cluster, and what a busy machine adds."""
SOON = 15.0
"""From then until the model's status says so."""
MODEL = "main"


def node_is_ready(fleet: Fleet) -> bool:
    node = fleet.kubernetes.request("GET", f"/api/v1/nodes/{NODE}")
    return any(each["type"] == "Ready" and each["status"] == "True" for each in node["status"]["conditions"])


def identities(fleet: Fleet) -> dict[str, tuple[str, int]]:
    """What would be another if a pod had been replaced or restarted."""
    return {
        pod["metadata"]["name"]: (pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"])
        for pod in fleet.pods(MODEL)
    }


def told(fleet: Fleet) -> Object | None:
    found = fleet.condition(MODEL, "Reconciling") or fleet.condition(MODEL, "Stalled")
    return found if found is not None and found["reason"] == "NodeUnreachable" else None


@pytest.mark.alone
def test_a_lost_node_is_named_and_comes_back(main: Fleet, say: Say) -> None:
    fleet, backend = main, main.cluster.backend
    if not isinstance(backend, BinariesBackend):
        pytest.skip("the kubelet of this cluster is somebody else's")
    fleet.wait_ready(MODEL)
    before = identities(fleet)
    with backend.processes.frozen("kubelet"):
        until("Kubernetes calls the node unreachable", lambda: not node_is_ready(fleet), within=GRACE)
        lost = time.monotonic()
        cause = until("the status names the node", lambda: told(fleet), within=SOON)
        say(f"lost node: {cause['type']} {cause['reason']} after {time.monotonic() - lost:.1f} s: {cause['message']}")
        assert NODE in cause["message"]
        ready = fleet.condition(MODEL, "Ready")
        assert ready is not None
        assert ready["status"] == "False", "no Service leads to pods of such a node"
    fleet.wait_ready(MODEL)
    assert identities(fleet) == before, "nothing was replaced or restarted"
    with fleet.openai(MODEL) as api:
        answer = api.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Are you there?"}], max_tokens=4
        )
    assert answer.choices[0].finish_reason in ("stop", "length")
