"""Canaries: one that is promoted, ones that go back by themselves, and undo by number; nobody is failed on the way."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from e2e.suite.conftest import make_namespace
from e2e.suite.fleet import Fleet, Kubernetes, Object, Say, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

MODEL = "tried"
STEPS = {"steps": [{"weight": 25, "duration": "5s"}, {"weight": 60, "duration": "5s"}]}


@pytest.fixture(scope="module")
def untouched(tandem: Any, kubernetes: Kubernetes) -> Iterator[Fleet]:
    """A model that tests share whose canaries leave its workers as they are."""
    made = make_namespace(tandem, kubernetes, f"e2e-untouched-{uuid.uuid4().hex[:5]}")
    serve(made, STEPS, progressDeadline="10m")
    yield made
    kubernetes.request("DELETE", f"/api/v1/namespaces/{made.namespace}")


def rollout(fleet: Fleet) -> Object:
    return fleet.get("inferencemodels", MODEL).get("status", {}).get("rollout", {})


def uids(fleet: Fleet) -> set[str]:
    return {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in fleet.pods(MODEL, role)}


def revisions(fleet: Fleet) -> dict[int, str]:
    """Number of each revision that is kept, and its element type."""
    path = f"/apis/apps/v1/namespaces/{fleet.namespace}/controllerrevisions"
    selector = f"tandem.dev/model={MODEL},app.kubernetes.io/component=history"
    found = fleet.kubernetes.request("GET", f"{path}?labelSelector={selector}")["items"]
    return {item["revision"]: item["data"]["spec"]["engine"]["dtype"] for item in found}


def serve(fleet: Fleet, canary: dict[str, Any], **more: Any) -> None:
    fleet.apply(smollm2(MODEL, rollout={"canary": canary} | more))
    fleet.wait_ready(MODEL)
    assert rollout(fleet)["completeRevision"] == 1


def under_load(fleet: Fleet, say: Say, what: Callable[[], Any]) -> None:
    """Do `what` while clients ask; none of them may be failed."""
    outcomes: list[LoadOutcome] = []
    with fleet.url(MODEL) as url, ThreadPoolExecutor(1) as beside:
        started = time.monotonic()
        done = beside.submit(what)
        while not done.done():
            outcomes += asyncio.run(run_load(url, MODEL, varied_prompts(12), concurrency=4, max_tokens=16))
        done.result()
    say(f"canary: {len(outcomes)} requests in {time.monotonic() - started:.0f} s")
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"


@pytest.mark.timeout(900)
def test_a_canary_is_promoted_and_undone_by_number_under_load(fleet: Fleet, say: Say) -> None:
    serve(fleet, STEPS)
    before = uids(fleet)
    seen: list[tuple[int, float]] = []

    def change() -> None:
        fleet.patch(MODEL, {"engine": {"dtype": "BFloat16"}})

        def probe() -> bool:
            status = fleet.get("inferencemodels", MODEL)["status"]
            trial, told = status["rollout"].get("canary"), status.get("routing", {}).get("canary")
            if trial and trial["ready"] and told:
                seen.append((trial["step"], told["percent"]))
            assert status["rollout"]["phase"] != "RolledBack", status["rollout"]
            return status["rollout"].get("completeRevision") == 2

        until("the canary to be promoted", probe, within=600, every=0.5)

    under_load(fleet, say, change)
    assert list(dict.fromkeys(seen)) == [(1, 25.0), (2, 60.0)]
    assert revisions(fleet) == {1: "Float32", 2: "BFloat16"}
    fleet.wait_ready(MODEL)
    assert not before & uids(fleet)
    assert fleet.get("inferencemodels", MODEL)["status"]["routing"].get("canary") is None

    before = uids(fleet)
    under_load(fleet, say, lambda: go_back(fleet))
    assert rollout(fleet)["revision"] == 1
    assert not before & uids(fleet)
    assert revisions(fleet) == {1: "Float32", 2: "BFloat16"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("change", "undo", "reason"),
    [
        (
            {"engine": {"image": "registry.invalid/no-such-image:1"}},
            {"engine": {"image": None}},
            "ImagePullFailed",
        ),
        pytest.param(
            {"engine": {"device": "CUDA"}}, {"engine": {"device": "CPU"}}, "DeviceUnavailable", marks=pytest.mark.full
        ),
    ],
    ids=["image", "device"],
)
def test_a_canary_that_cannot_start_goes_back_by_itself(
    untouched: Fleet, change: Object, undo: Object, reason: str, say: Say
) -> None:
    fleet = untouched
    fleet.wait_ready(MODEL)
    before = uids(fleet)

    def fail() -> None:
        fleet.patch(MODEL, change)

        def probe() -> Object | None:
            stalled = fleet.condition(MODEL, "Stalled")
            return stalled if stalled and stalled["reason"] == "CanaryFailed" else None

        stalled = until("the canary to go back", probe, within=300)
        say(f"failed canary: {stalled['message']}")
        assert reason in stalled["message"]
        fleet.wait_role(MODEL, "decode", 1)
        fleet.wait_role(MODEL, "prefill", 1)

    under_load(fleet, say, fail)
    assert uids(fleet) == before, "what served was never touched"
    ready = fleet.condition(MODEL, "Ready")
    assert ready is not None
    assert ready["status"] == "True"
    fleet.annotate(MODEL, {"tandem.dev/retry-canary": f"once more {reason}"})
    until("it to be tried again", lambda: rollout(fleet)["phase"] == "Canary", within=60)
    fleet.patch(MODEL, undo)
    fleet.wait_ready(MODEL)
    assert rollout(fleet)["revision"] == 1


def test_a_model_that_is_not_there_is_told_before_anything_is_tried(untouched: Fleet) -> None:
    fleet = untouched
    fleet.wait_ready(MODEL)
    before, kept = uids(fleet), revisions(fleet)
    fleet.patch(MODEL, {"model": {"uri": "hf://HuggingFaceTB/no-such-model"}})

    def told() -> Object | None:
        stalled = fleet.condition(MODEL, "Stalled")
        return stalled if stalled and stalled["reason"] == "ModelNotFound" else None

    until("the hub's answer", told, within=120)
    assert (rollout(fleet)["phase"], rollout(fleet)["revision"]) == ("Complete", 1)
    available = fleet.condition(MODEL, "Available")
    assert available is not None
    assert available["status"] == "True"
    fleet.patch(MODEL, {"model": {"uri": "hf://HuggingFaceTB/SmolLM2-135M-Instruct"}})
    fleet.wait_ready(MODEL)
    assert (uids(fleet), revisions(fleet)) == (before, kept)


@pytest.mark.timeout(600)
def test_undo_by_number_in_the_middle_of_a_canary(untouched: Fleet) -> None:
    fleet = untouched
    fleet.wait_ready(MODEL)
    before = uids(fleet)
    endless = {"steps": [{"weight": 50, "duration": "1h"}]}
    fleet.patch(MODEL, {"engine": {"dtype": "BFloat16"}, "rollout": {"canary": endless}})
    until("the canary", lambda: (rollout(fleet).get("canary") or {}).get("ready"), within=400)
    fleet.patch(MODEL, {"rollout": {"revision": 1}})
    fleet.wait_ready(MODEL)
    assert uids(fleet) == before
    fleet.patch(MODEL, {"engine": {"dtype": "Float32"}, "rollout": {"revision": None, "canary": STEPS}})
    fleet.wait_ready(MODEL)
    assert uids(fleet) == before, "the spec says by itself what the undo said"


def go_back(fleet: Fleet) -> None:
    fleet.patch(MODEL, {"rollout": {"revision": 1, "canary": None}})
    until("the undo", lambda: rollout(fleet).get("completeRevision") == 1, within=300)
    fleet.wait_ready(MODEL)
