"""Workers on standby under the real StatefulSet controller, and what the real API server says of their field.

Without nodes (`e2e.realapi`): pods are played. What a worker on standby holds and how soon it serves is in
`test_scale_to_zero`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiException

from e2e.realapi import ControlPlane, Nodes, start
from e2e.suite.bare import Space, made_space
from e2e.suite.fleet import Object, until

KIND = {"apiVersion": "tandem.dev/v1alpha1", "kind": "InferenceModel"}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with start(Path(tmp_path_factory.mktemp("plane"))) as made:
        made.start_operator()
        yield made


@pytest.fixture(scope="module")
def nodes(plane: ControlPlane) -> Iterator[Nodes]:
    with Nodes(plane.kubernetes, load_seconds=0.3) as made:
        yield made


@pytest.fixture
def space(plane: ControlPlane, nodes: Nodes) -> Iterator[Space]:
    with made_space(plane, nodes) as made:
        yield made


def role(least: int, **more: Any) -> Object:
    return {"scaling": {"mode": "SLO", "min": least, "max": 4}} | more


def model(space: Space, standby: Object | None, **spec: Any) -> Object:
    rest = {"idleAfter": "10s"} | ({} if standby is None else {"standby": standby})
    whole = {
        "model": {"uri": "hf://org/repo"}, "prefill": role(1), "decode": role(2),
        "slo": {"ttft": {"seconds": 60.0}, "tpot": {"seconds": 60.0}}, "autoscaling": {"scaleToZero": rest},
    }  # fmt: skip
    return KIND | {"metadata": {"name": "m", "namespace": space.namespace}, "spec": whole | spec}


def pods(space: Space) -> dict[str, str]:
    """Uids of the workers that stay."""
    found = [pod for name in ("m-prefill", "m-decode") for pod in space.nodes.of(space.namespace, name)]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in found if "deletionTimestamp" not in p["metadata"]}


def told(space: Space) -> dict[str, str]:
    return {c["type"]: f"{c['status']} {c['reason']}" for c in space.model["status"]["conditions"]}


def rests(space: Space) -> bool:
    status = space.model["status"]
    assert {role: status[role].get("standby") for role in ("prefill", "decode")} == {"prefill": 1, "decode": 1}
    found = told(space)
    assert (found["Ready"], found["Available"]) == ("True ScaledToZero", "True ScaledToZero")
    assert not {"Reconciling", "Stalled"} & found.keys(), found
    assert status["observedGeneration"] == space.model["metadata"]["generation"]
    assert set(pods(space)) == {"m-prefill-0", "m-decode-0"}
    return True


def serves(space: Space) -> bool:
    assert told(space)["Ready"] == "True AllReplicasReady", told(space)
    assert set(pods(space)) == {"m-prefill-0", "m-decode-0", "m-decode-1"}
    return True


@pytest.mark.timeout(1800)
def test_they_stay_are_replaced_and_wake(space: Space, plane: ControlPlane) -> None:
    space.apply(model(space, {"replicas": 1}))
    until("the workers", lambda: serves(space), within=180)
    first = pods(space)
    until("it to sleep", lambda: rests(space), within=240)
    assert not set(pods(space).values()) & set(first.values()), "they began anew"
    before = pods(space)
    space.patch("m", {"engine": {"maxBatchTokens": 64}})
    until("others to be on standby", lambda: not set(pods(space).values()) & set(before.values()), within=180)
    space.patch("m", idle_after("1h"))  # an operator may take longer to come back than a model may be idle
    until("it to rest", lambda: rests(space), within=180)
    plane.stop_operators()
    resting = pods(space)
    space.nodes.ask(space.namespace)
    until("it to be woken without an operator", lambda: len(space.ready) == 0 and is_up(space), within=180)
    plane.start_operator()
    until("the operator to follow", lambda: asked(space) and serves(space), within=240)
    assert {name: pods(space)[name] for name in resting} == resting, "those on standby are the ones that serve"
    assert "asleepSince" not in space.model["status"]["scaling"]
    space.patch("m", idle_after("10s"))
    until("it to sleep again", lambda: rests(space), within=240)
    space.patch("m", {"autoscaling": {"scaleToZero": {"standby": None}}})
    until("none to be left", lambda: not pods(space), within=180)


def idle_after(time: str) -> Object:
    return {"autoscaling": {"scaleToZero": {"idleAfter": time}}}


def asked(space: Space) -> bool:
    """One more request, as clients send them."""
    space.nodes.ask(space.namespace)
    return True


def is_up(space: Space) -> bool:
    found = space.nodes.of(space.namespace, "m-decode")
    return any(
        condition["type"] == "ContainersReady" and condition["status"] == "True"
        for pod in found
        for condition in pod["status"]["conditions"]
    )


@pytest.mark.parametrize(
    ("standby", "spec", "words"),
    [
        ({"replicas": 2}, {}, "standby.replicas: Invalid value.*must be at most scaling.min of every worker role"),
        ({"replicas": 0}, {}, "should be greater than or equal to 1"),
        ({}, {"decode": role(2, parallelism={"tensor": 2})}, "needs workers of one rank"),
    ],
)
def test_what_the_api_server_refuses(
    plane: ControlPlane, nodes: Nodes, standby: Object, spec: Object, words: str
) -> None:
    space = Space(plane, plane.kubernetes, "default", nodes)
    with pytest.raises(ApiException) as refused:
        space.apply(model(space, standby, **spec))
    assert refused.value.status == 422
    assert re.search(words, str(refused.value.body)), refused.value.body
