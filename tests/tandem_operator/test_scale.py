"""How long one look at a large model holds the event loop: probes, the lease and other models wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from operator_objects import UID, blueprint, settled
from tandem_api.names import Role
from tandem_operator.autoscale.observed import observe_model
from tandem_operator.children.inherit import keep_what_runs
from tandem_operator.children.plan import plan_children
from tandem_operator.gateways.admission import admission_condition, is_admission_open, plan_admissions
from tandem_operator.gateways.fleet import FleetView, Standing
from tandem_operator.kube.store import ChildStore
from tandem_operator.objects.manifests import KIND_BY_NAME, ChildKey, Manifest, ModelKey, own_workloads
from tandem_operator.observe.replica import ObservedReplica, ReplicaState
from tandem_operator.reconcile.status import build_status
from tandem_operator.rollout.plan import plan_rollout, view_rollout
from tandem_operator.rollout.replacement import RoleView, plan_replacement
from tandem_operator.rollout.statefulsets import plan_drain_limits, plan_stateful_sets
from tandem_operator.workloads import build_children

from tests.effort import count_instructions

KEY = ModelKey("n", "m")
HELD_INSTRUCTIONS = 2_000_000
"""What 20 ms of an idle core are enough for; `make bench-operator` measures the time itself."""


def thousand_pods() -> tuple[Any, dict[ChildKey, Manifest]]:
    plan = blueprint(prefill={"replicas": 200}, decode={"replicas": 800})
    live = settled(plan)
    for key, child in live.items():
        if key.kind == "Pod":
            kinds = ("PodReadyToStartContainers", "Initialized", "ContainersReady", "PodScheduled", "Ready")
            child["spec"] = live[ChildKey("StatefulSet", "m-decode")]["spec"]["template"]["spec"]
            child["metadata"]["managedFields"] = [{"fieldsV1": {"f:spec": {"f:containers": {}}}}] * 4
            child["status"]["conditions"] = [
                {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"} for kind in kinds
            ]
    return plan, live


def test_each_part_of_a_look_at_a_thousand_pods_is_short() -> None:
    plan, live = thousand_pods()
    slo = {"ttft": {"seconds": 1}, "tpot": {"seconds": 0.05}}
    mode = {"scaling": {"mode": "SLO", "max": 1000}}
    targeted = blueprint(prefill={"replicas": 200} | mode, decode={"replicas": 800} | mode, slo=slo)
    ours = own_workloads(live, owner_uid=UID)
    desired = keep_what_runs(plan, build_children(plan), ours)
    now = datetime.now(UTC)
    standings = {key.name: Standing(host="", admitted=True) for key in ours if key.kind == "Pod"}
    fleet = FleetView(standings=standings, reporting=frozenset({"g"}), asked=True)
    parts: dict[str, Callable[[], object]] = {
        "course": lambda: plan_rollout(
            view_rollout(plan, {}, ours, retry=None, taken=0, now=now),
            ours,
            may_roll=True,
            added={},
            fresh=False,
            now=now,
        ),
        "rolling": lambda: plan_stateful_sets(plan, desired, ours, now=now),
        "children": lambda: (plan_children(desired, live, owner_uid=UID), plan_drain_limits(plan, ours)),
        "admission": lambda: plan_admissions(plan, ours, fleet),
        "gates": lambda: (admission_condition(plan, ours, fleet, []), is_admission_open(plan, ours)),
        "scene": lambda: observe_model(targeted, ours, None),
        "status": lambda: build_status(plan, ours, problems=[], failures={}, waiting=[], now="2026-01-01T00:00:00Z"),
    }
    held = {name: count_instructions(part) for name, part in parts.items()}
    assert max(held.values()) < HELD_INSTRUCTIONS, held


def test_a_plan_that_takes_all_replicas_costs_as_many_times_as_there_are() -> None:
    def view(wanted: int) -> RoleView:
        replicas = [
            ObservedReplica(index=i, build="old", state=ReplicaState.READY, is_outdated=True) for i in range(wanted)
        ]
        return RoleView(wanted=wanted, total=wanted, partition=wanted, replicas=replicas, surge=0, unavailable=wanted)

    def roles(size: int) -> dict[Role, RoleView]:
        return {Role.PREFILL: view(size), Role.DECODE: view(4 * size)}

    few, many = roles(25), roles(200)
    assert len(plan_replacement(many)[Role.DECODE].replace) == 800
    cost = count_instructions(lambda: plan_replacement(many)) / count_instructions(lambda: plan_replacement(few))
    assert cost < 1.25 * 8, "eight times as many replicas"


async def test_reading_a_thousand_pods_gives_others_their_turn() -> None:
    _, live = thousand_pods()
    store = ChildStore()
    for key, child in live.items():
        store.put(KIND_BY_NAME[key.kind], child)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    found = await store.read(KEY)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert found.keys() == live.keys()
    assert turns >= 10


def test_of_pods_only_what_is_read_is_kept() -> None:
    _, live = thousand_pods()
    store = ChildStore()
    key = ChildKey("Pod", "m-decode-0")
    store.put(KIND_BY_NAME["Pod"], live[key])
    kept = store.children(KEY)[key]
    assert kept.keys() == {"kind", "apiVersion", "metadata", "spec", "status"}
    assert kept["status"]["conditions"] == live[key]["status"]["conditions"]
