"""Models that more than one party writes: two operators, and people's own tools that insist.

On a real API server with the real controllers, without nodes (`e2e.realapi`).
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from kubernetes import client

from e2e.realapi import ControlPlane
from e2e.suite.bare import MERGE, Space, make, serve, stays
from e2e.suite.fleet import Object, until

OTHER = ("--lease-name=other", "--worker-image=worker:9", "--follow-images=true")
_COUNTED = re.compile(r"^apiserver_request_total\{(?P<labels>[^}]*)\} (?P<count>[0-9.e+]+)$", re.MULTILINE)

_OTHERS = ("GET", "LIST", "WATCH", "DELETECOLLECTION")
"""Verbs of no write of an operator: the last is how what was in an earlier test's namespace goes."""


def count_writes(plane: ControlPlane) -> int:
    """Writes of anything that the operator writes, since the API server began."""
    kinds = {
        "inferencemodels", "statefulsets", "deployments", "services", "configmaps", "secrets", "serviceaccounts",
        "poddisruptionbudgets", "rolebindings", "controllerrevisions",
    }  # fmt: skip
    found = 0.0
    for match in _COUNTED.finditer(plane.kubernetes.request("GET", "/metrics")):
        labels = dict(part.split("=", 1) for part in match["labels"].split(",") if "=" in part)
        own = labels["subresource"] == '""' or labels["resource"] == '"inferencemodels"'
        if labels["verb"].strip('"') not in _OTHERS and labels["resource"].strip('"') in kinds and own:
            found += float(match["count"])
    return round(found)


def events(space: Space, reason: str) -> list[Object]:
    found = [e for e in space.find("events") if e["reason"] == reason]
    assert found, f"no event {reason}"
    return found


def ends(process: Any) -> None:
    process.terminate()
    process.wait(timeout=120)


def test_of_two_operators_one_serves_a_model_and_the_other_takes_over_when_it_has_gone(
    plane: ControlPlane, space: Space
) -> None:
    before = serve(space, 2, image=None)
    holder = space.model["status"]["operator"]["lease"]
    other = plane.start_operator(*OTHER)
    try:
        (told, *_) = until("the other one to say so", lambda: events(space, "ServedByAnother"), within=120)
        assert holder in told["message"]
        counted = count_writes(plane)
        stays(space, before, seconds=5)
        assert count_writes(plane) - counted <= 2
        space.patch("m", {"decode": {"replicas": 3}})
        space.wait_settled(3)
        stays(space, before, seconds=1)
        assert space.model["status"]["operator"]["lease"] == holder
        plane.kubernetes.request("DELETE", "/apis/coordination.k8s.io/v1/namespaces/tandem-system/leases/tandem")
        plane.stop_operators(but=other)
        until(
            "the other one to take over",
            lambda: space.model["status"]["operator"]["lease"] == "tandem-system/other",
            within=180,
        )
    finally:
        ends(other)
        plane.stop_operators()
        plane.start_operator()


def test_a_model_is_served_by_the_operator_that_it_names(plane: ControlPlane, space: Space) -> None:
    make(space, {"engine": {"image": "worker:1"}, "managedBy": "blue"})
    time.sleep(2.0)
    assert "operator" not in space.model.get("status", {})
    blue = plane.start_operator("--lease-name=blue", "--managed-by=blue")
    try:
        space.wait_settled(1)
        before, blues = space.workers, space.model["status"]["operator"]
        assert blues == {"lease": "tandem-system/blue", "managedBy": "blue"}
        space.patch("m", {"managedBy": None})
        until("it to be handed over", lambda: space.model["status"]["operator"] != blues, within=120)
        stays(space, before, seconds=1)
    finally:
        ends(blue)


def insisting(write: Callable[[], object]) -> Callable[[], int]:
    """Somebody who writes again and again. Returns the end, which tells how often it was written."""
    stop, times = threading.Event(), [0]

    def run() -> None:
        while not stop.wait(0.05):
            with suppress(client.ApiException):  # of two who write at once one may be refused
                write()
            times[0] += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def end() -> int:
        stop.set()
        thread.join()
        return times[0]

    return end


CONTESTED: dict[str, tuple[str, Object]] = {
    "services": ("m", {"spec": {"selector": {"app.kubernetes.io/component": "mine"}}}),
    "statefulsets": ("m-decode", {"spec": {"replicas": 1}}),
}


@pytest.mark.parametrize("kind", CONTESTED)
def test_a_tool_that_insists_is_named_and_not_fought_for_ever(plane: ControlPlane, space: Space, kind: str) -> None:
    name, body = CONTESTED[kind]
    serve(space, 2)
    path = space.path(kind, name) + "?fieldManager=insistent-tool"
    end = insisting(lambda: plane.kubernetes.request("PATCH", path, body, MERGE))
    began, counted = time.monotonic(), count_writes(plane)
    try:
        found = until("the condition", lambda: space.told("Contested"), within=120)
        assert f"{name} (the manager insistent-tool)" in found["message"]
        time.sleep(max(0.0, began + 15.0 - time.monotonic()))
    finally:
        theirs = end()
    ours = count_writes(plane) - counted - theirs
    assert ours <= 25, (ours, theirs)


def test_an_autoscaler_of_gateways_is_left_alone(plane: ControlPlane, space: Space) -> None:
    serve(space, 1)
    path = space.path("deployments", "m")

    def scale(count: int) -> None:
        plane.kubernetes.request("PATCH", f"{path}/scale?fieldManager=hpa", {"spec": {"replicas": count}}, MERGE)

    def count() -> int:
        return plane.kubernetes.request("GET", path)["spec"]["replicas"]

    space.patch("m", {"gateway": {"replicas": 2, "scaling": {"mode": "External"}}})
    time.sleep(2.0)
    assert count() == 1, "a change of the mode moves nothing"
    for wanted in (4, 3):
        scale(wanted)
        until("the status", lambda wanted=wanted: space.model["status"]["gateway"]["replicas"] == wanted, within=120)
        space.patch("m", {"gateway": {"queue": {"max": wanted}}})  # a look that applies
        until("it to be settled", lambda: space.settled(1), within=120)
        assert count() == wanted
    space.patch("m", {"suspend": True})
    until("it to be suspended", lambda: count() == 0, within=120)
    space.patch("m", {"suspend": False})
    until("as many as the spec says", lambda: count() == 2, within=120)
    space.patch("m", {"gateway": {"replicas": 1, "scaling": {"mode": "Static"}}})
    until("the spec to be followed", lambda: count() == 1, within=120)


def test_a_child_whose_label_is_changed_is_made_again(plane: ControlPlane, space: Space) -> None:
    """What was there belongs to nobody then, and has the name: it is told until it is gone."""
    serve(space, 1)
    path = space.path("services", "m-decode")
    for label in ("stranger", None):
        plane.kubernetes.request("PATCH", path, {"metadata": {"labels": {"tandem.dev/model": label}}}, MERGE)

        def is_back() -> bool:
            return space.get("services", "m-decode")["metadata"]["labels"].get("tandem.dev/model") == "m"

        until("the label to be put right", is_back, within=120)


def test_labels_of_a_role_and_shares_of_a_rollout_reach_the_cluster(space: Space) -> None:
    serve(space, 4, maxSurge="50%", maxUnavailable="25%")
    assert space.get("poddisruptionbudgets", "m-decode")["spec"]["maxUnavailable"] == 1
    queue = {"kueue.x-k8s.io/queue-name": "gpus"}
    before = space.workers
    space.patch("m", {"decode": {"metadata": {"labels": queue}}})
    until("all of them to have it", lambda: space.settled(4) and not set(before.values()) & set(space.workers.values()),
          within=180)  # fmt: skip
    for kind, name in (("statefulsets", "m-decode"), ("services", "m-decode"), ("pods", "m-decode-3")):
        assert space.get(kind, name)["metadata"]["labels"].items() >= queue.items()
    assert "kueue.x-k8s.io/queue-name" not in space.get("deployments", "m")["metadata"]["labels"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"drain": {"timeout": "61m"}}, "must be at most 1h"),
        ({"rollout": {"maxSurge": "101%"}}, "must be a number of replicas up to 1000"),
        ({"rollout": {"maxSurge": "0%", "maxUnavailable": 0}}, "and maxUnavailable are both 0"),
        ({"metadata": {"labels": {"tandem.dev/model": "x"}}}, "must not hold names of tandem.dev/"),
        (
            {"gateway": {"scaling": {"mode": "External"}, "responseStore": {"maxBytes": "1Mi"}}},
            "must not be more than 1",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_the_api_server(space: Space, spec: Object, said: str) -> None:
    with pytest.raises(client.ApiException) as refused:
        make(space, spec)
    assert said in str(refused.value.body)
