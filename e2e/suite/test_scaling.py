"""Scaling up and down under load loses nothing: by hand, by targets, and by something else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from e2e.suite.fleet import Fleet, Object, Say, smollm2, until
from e2e.suite.load import LoadOutcome, run_load, varied_prompts

LONGEST_SECONDS = 400
"""What anything takes beside other tests: a request among many, a worker's start, twenty requests."""


@pytest.mark.timeout(1800)
def test_scaling_under_load(main: Fleet) -> None:
    """32 streams at once, at least 200 requests, decode 1 → 3 → 1 and prefill 1 → 2 → 1 meanwhile."""
    outcomes = []
    with main.url("main") as url, ThreadPoolExecutor(1) as walk:
        scaled = walk.submit(scale_up_and_down, main)
        while not (scaled.done() and len(outcomes) >= 200):
            prompts = varied_prompts(64 if outcomes else 200)
            outcomes += asyncio.run(
                run_load(url, "main", prompts, concurrency=32, max_tokens=24, limit=LONGEST_SECONDS)
            )
        scaled.result()
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
    main.wait_blocks_free("main", within=60)
    assert len(main.pods("main", "decode")) == 1
    assert len(main.pods("main", "prefill")) == 1


def scale_up_and_down(main: Fleet) -> None:
    for decode, prefill in ((3, 2), (1, 1)):
        main.patch("main", {"decode": {"replicas": decode}, "prefill": {"replicas": prefill}})
        main.wait_role("main", "decode", decode, LONGEST_SECONDS)
        main.wait_role("main", "prefill", prefill, LONGEST_SECONDS)


MODEL = "scaled"
GPU = "nvidia.com/gpu"
TIGHT, LOOSE = 0.002, 60.0
"""Seconds: below what the machine can do, and far above it."""


def targets(ttft: float, tpot: float) -> Object:
    return {"slo": {"ttft": {"percentile": 90, "seconds": ttft}, "tpot": {"seconds": tpot}}}


def scaling(fleet: Fleet) -> Object:
    return fleet.get("inferencemodels", MODEL).get("status", {}).get("scaling", {})


def count(fleet: Fleet, component: str) -> int:
    return fleet.get("statefulsets", f"{MODEL}-{component}")["spec"]["replicas"]


def long_prompts(number: int) -> list[str]:
    """Of some 250 tokens, none like another from its beginning on: prefill workers compute each of them."""
    words = "The keeper of the lighthouse notes wind, visitors and repairs every evening before the lamp is lit. " * 12
    return [f"Entry {index}. {words} Sum this up." for index in range(number)]


@contextmanager
def load(fleet: Fleet, say: Say, *, concurrency: int, pause: float = 0.0) -> Iterator[None]:
    """Clients that ask as long as the block takes, with a pause of so many seconds after two requests of each; none of
    them may be failed."""
    outcomes: list[LoadOutcome] = []
    ended = Event()

    def ask(url: str) -> None:
        while not ended.wait(pause):
            prompts = [f"{len(outcomes)} {text}" for text in long_prompts(2 * concurrency)]
            outcomes.extend(
                asyncio.run(
                    run_load(url, MODEL, prompts, concurrency=concurrency, max_tokens=16, limit=LONGEST_SECONDS)
                )
            )

    with fleet.url(MODEL) as url, ThreadPoolExecutor(1) as beside:
        asking = beside.submit(ask, url)
        try:
            yield
        finally:
            ended.set()
        asking.result()
    broken = [outcome for outcome in outcomes if not outcome.complete]
    assert not broken, f"{len(broken)} of {len(outcomes)} requests failed; the first: {broken[0]}"
    say(f"scaling: {len(outcomes)} requests by {concurrency} clients")


def wait_counts(fleet: Fleet, holds: Callable[[int, int], bool]) -> Object:
    """What status says, once prefill and decode have such numbers of replicas."""

    def probe() -> Object:
        told = scaling(fleet)
        found = count(fleet, "prefill"), count(fleet, "decode")
        assert holds(*found), (found, told)
        return told

    return until("replicas to follow", probe, within=LONGEST_SECONDS, every=1.0)


@pytest.mark.timeout(2400)
def test_roles_follow_their_targets_apart(fleet: Fleet, say: Say) -> None:
    """Prefill grows for its target, then decode for its own; then load and targets ease, and both come down."""
    automatic = {"scaling": {"mode": "SLO", "min": 1, "max": 2}}
    manifest = smollm2(MODEL, autoscaling={"behavior": {"scaleDownStabilization": "10s"}}, **targets(TIGHT, LOOSE))
    manifest["spec"]["prefill"] |= automatic
    fleet.apply(manifest)
    fleet.wait_ready(MODEL)
    with load(fleet, say, concurrency=6):
        # Nothing is decided before twenty requests have come; on a busy machine these take minutes.
        told = wait_counts(fleet, lambda prefill, decode: (prefill, decode) == (2, 1))
        say(f"scaling up: {told['message']}")
        assert told["prefill"]["desired"] == 2
        assert "decode" not in told
        until("the target to be missed", lambda: is_missed(fleet), within=LONGEST_SECONDS)
        fleet.patch(MODEL, targets(LOOSE, TIGHT) | {"decode": automatic})
        told = wait_counts(fleet, lambda _, decode: decode == 2)
        say(f"scaling up: {told['message']}")
        fleet.wait_role(MODEL, "decode", 2, LONGEST_SECONDS)
    fleet.patch(MODEL, targets(LOOSE, LOOSE))
    with load(fleet, say, concurrency=1, pause=8.0):  # one that never pauses is all that one of these workers can do
        told = wait_counts(fleet, lambda prefill, decode: (prefill, decode) == (1, 1))
        until("scaling to be active", lambda: is_active(fleet), within=LONGEST_SECONDS)
        fleet.wait_role(MODEL, "prefill", 1, LONGEST_SECONDS)
        fleet.wait_role(MODEL, "decode", 1, LONGEST_SECONDS)
    say(f"scaling down: {told['message']}")
    reasons = [e["reason"] for e in fleet.find("events") if e["involvedObject"]["name"] == MODEL]
    assert "Autoscaled" in reasons


@contextmanager
def gpus_on_paper(fleet: Fleet, number: int) -> Iterator[None]:
    """A node that says it has GPUs: the scheduler and quotas count them, and nobody asks where they are."""
    name = fleet.kubernetes.request("GET", "/api/v1/nodes")["items"][0]["metadata"]["name"]

    def set_capacity(value: str | None) -> None:
        capacity = {"status": {"capacity": {GPU: value}, "allocatable": {GPU: value}}}
        fleet.kubernetes.request("PATCH", f"/api/v1/nodes/{name}/status", capacity, "application/merge-patch+json")

    set_capacity(str(number))
    try:
        yield
    finally:
        set_capacity(None)


def set_quota(fleet: Fleet, gpus: int) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus"},
        "spec": {"hard": {f"requests.{GPU}": str(gpus)}},
    }
    path = fleet.path("resourcequotas", "gpus") + "?fieldManager=e2e&force=true"
    fleet.kubernetes.request("PATCH", path, quota, "application/apply-patch+yaml")


@pytest.mark.timeout(1800)
def test_workers_that_do_both_follow_demand_as_far_as_the_quota_goes(fleet: Fleet, say: Say) -> None:
    automatic = {"scaling": {"mode": "SLO", "min": 1, "max": 2}}
    behaviour = {"behavior": {"scaleDownStabilization": "10s"}}
    manifest = smollm2(MODEL, prefill=None, autoscaling=behaviour, **targets(TIGHT, LOOSE))
    manifest["spec"]["decode"] |= automatic
    manifest["spec"]["decode"]["resources"] |= {"limits": {GPU: "1"}}
    with gpus_on_paper(fleet, 4):
        set_quota(fleet, 1)
        fleet.apply(manifest)
        fleet.wait_ready(MODEL)
        with load(fleet, say, concurrency=6):

            def is_limited() -> str:
                told = scaling(fleet)["message"]
                assert "Limited by the namespace's GPU quota: 1 of 2" in told, told
                return told

            limited = until("the quota to limit it", is_limited, within=LONGEST_SECONDS, every=1.0)
            say(f"scaling within a quota: {limited}")
            assert count(fleet, "decode") == 1
            set_quota(fleet, 2)
            fleet.wait_role(MODEL, "unified", 2, LONGEST_SECONDS)
        fleet.patch(MODEL, targets(LOOSE, LOOSE))
        with load(fleet, say, concurrency=1, pause=8.0):
            fleet.wait_role(MODEL, "unified", 1, LONGEST_SECONDS)
        say(f"scaling down: {scaling(fleet)['message']}")


def is_active(fleet: Fleet) -> bool:
    """While there is something to go by: without telemetry, or too few requests, it is not."""
    found = fleet.condition(MODEL, "ScalingActive")
    assert found is not None
    assert found["status"] == "True", found
    return True


def is_missed(fleet: Fleet) -> bool:
    found = fleet.condition(MODEL, "SLOMet")
    return found is not None and (found["status"], found["reason"]) == ("False", "TTFTMissed")


def test_modes_follow_one_another_and_move_nothing_by_themselves(fleet: Fleet, say: Say) -> None:
    fleet.apply(smollm2(MODEL, decode=2, **targets(LOOSE, LOOSE)))
    fleet.wait_ready(MODEL)
    before = {pod["metadata"]["uid"] for pod in fleet.pods(MODEL, "decode")}

    def change(mode: str, **more: Any) -> None:
        fleet.patch(MODEL, {"decode": {"scaling": {"mode": mode} | more}})
        live = fleet.wait_ready(MODEL)
        assert live["spec"]["decode"]["scaling"]["mode"] == mode
        assert count(fleet, "decode") == 2
        assert {pod["metadata"]["uid"] for pod in fleet.pods(MODEL, "decode")} == before

    with load(fleet, say, concurrency=3):
        for mode, more in (("SLO", {"min": 2, "max": 2}), ("External", {}), ("SLO", {}), ("External", {})):
            change(mode, **more)
        fleet.cluster.kubectl("-n", fleet.namespace, "scale", f"statefulset/{MODEL}-decode", "--replicas=3")
        fleet.wait_role(MODEL, "decode", 3)
        until("the number to be followed", lambda: scaling(fleet)["decode"]["desired"] == 3, within=120)
        fleet.patch(MODEL, {"gateway": {"replicas": 2}})
        fleet.wait_ready(MODEL)
        assert count(fleet, "decode") == 3, "another look keeps it"
        fleet.patch(MODEL, {"decode": {"scaling": {"mode": "Static"}}})
        fleet.wait_role(MODEL, "decode", 2)
    assert {pod["metadata"]["uid"] for pod in fleet.pods(MODEL, "decode")} == before
