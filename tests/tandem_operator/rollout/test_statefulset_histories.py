"""Manifests, partitions and deletions over random histories: controllers act late, the cache lags behind."""

from __future__ import annotations

import os
import random
from collections import Counter
from datetime import UTC, datetime
from fractions import Fraction
from typing import Any

import pytest
from operator_objects import READY, UID, blueprint, container, copied, pod
from tandem_api.names import Role
from tandem_operator.children.inherit import keep_what_runs
from tandem_operator.children.plan import ChildStep, plan_step
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key, labels_of, own_workloads
from tandem_operator.objects.pods import is_ready
from tandem_operator.observe.groups import group_pods
from tandem_operator.observe.roles import pods_of, workload_key
from tandem_operator.rollout.replacement import capacity_of
from tandem_operator.rollout.statefulsets import plan_stateful_sets
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.blueprint import digest

HISTORIES = int(os.environ.get("TANDEM_HISTORIES", "36"))
NOW = datetime(2026, 1, 1, tzinfo=UTC)
Live = dict[ChildKey, Manifest]


class Cluster:
    """Objects, and controllers that act when they are asked to."""

    def __init__(self, plan: Blueprint, rng: random.Random) -> None:
        self.plan, self.rng = plan, rng
        self.live: Live = {}
        self.cached: Live = {}
        self.templates: dict[str, Manifest] = {}
        self.current: dict[ChildKey, str] = {}
        self.is_overtaken = False

    def look(self, *, stale: bool = False) -> None:
        """The operator's turn. A stale cache has the pods of the last look."""
        before, self.cached = self.cached, copied(self.live)
        cached = self.cached
        if stale:
            cached = {k: v for k, v in cached.items() if k.kind != "Pod"}
            cached |= {k: v for k, v in before.items() if k.kind == "Pod"}
        ours = own_workloads(cached, owner_uid=UID)
        desired = keep_what_runs(self.plan, build_children(self.plan), ours)
        rolling = plan_stateful_sets(self.plan, desired, ours, now=NOW)
        for child in rolling.desired:
            if plan_step(child, self.live.get(child_key(child)), owner_uid=UID) is ChildStep.APPLY:
                self.apply(copied(child))
        for key in rolling.replace:
            found = self.live.get(key)
            if found is not None and found["metadata"]["uid"] == cached[key]["metadata"]["uid"]:
                del self.live[key]

    def apply(self, child: Manifest) -> None:
        key = child_key(child)
        before = self.live.get(key, {"metadata": {"generation": 0, "uid": f"uid-{key.name}"}, "status": {}})
        child["metadata"] |= {
            "uid": before["metadata"]["uid"],
            "generation": before["metadata"].get("generation", 0) + 1,
        }
        child["status"] = before.get("status", {})
        self.live[key] = child
        if key.kind == "Deployment":
            count = child["spec"]["replicas"]
            child["status"] = {"observedGeneration": child["metadata"]["generation"], "replicas": count}
            child["status"] |= {"updatedReplicas": count, "readyReplicas": count}

    def control(self) -> None:
        for key in [key for key in self.live if key.kind == "StatefulSet"]:
            self._control(key, self.live[key])

    def _control(self, key: ChildKey, workload: Manifest) -> None:
        spec = workload["spec"]
        newest = digest(spec["template"])[:8]
        self.templates[newest] = copied(spec["template"])
        current = self.current.setdefault(key, newest)
        workload["status"] = {
            "observedGeneration": workload["metadata"]["generation"],
            "updateRevision": newest,
            "currentRevision": current,
        }
        rolls = spec["updateStrategy"]["type"] == "RollingUpdate"
        partition = spec["updateStrategy"]["rollingUpdate"]["partition"] if rolls else 0
        mine = {int(p["metadata"]["name"].rsplit("-", 1)[1]): p for p in pods_of(key, self.live)}
        for number in [number for number in mine if number >= spec["replicas"]]:
            del self.live[child_key(mine.pop(number))]
        for number in range(spec["replicas"]):
            if number not in mine:
                mine[number] = self._make(key, number, newest if number >= partition else current)
        if rolls:
            for number in sorted((n for n in mine if n >= partition), reverse=True):
                if labels_of(mine[number])["controller-revision-hash"] != newest:
                    del self.live[child_key(mine[number])]
                    return
                if not is_ready(mine[number]):
                    break
            if all(labels_of(p)["controller-revision-hash"] == newest and is_ready(p) for p in mine.values()):
                self.current[key] = workload["status"]["currentRevision"] = newest

    def _make(self, key: ChildKey, number: int, revision: str) -> Manifest:
        name = f"{key.name}-{number}"
        labels = self.templates[revision]["metadata"]["labels"] | {"controller-revision-hash": revision}
        uid = f"{self.rng.random()}"
        made = pod(name, owner=f"uid-{key.name}", labels=labels, metadata={"uid": uid}, **container())
        self.live[ChildKey("Pod", name)] = made
        return made

    def pods(self) -> list[Manifest]:
        return [found for key, found in self.live.items() if key.kind == "Pod"]

    def start(self, found: Manifest) -> None:
        found["status"] = copied(READY)

    def groups(self, role: Role) -> list[Any]:
        return group_pods(
            pods_of(workload_key(self.plan, role), self.live), self.plan.worker_spec(role).nodes_per_replica
        )

    def ready(self) -> dict[Role, Counter[str]]:
        return {
            role: Counter(
                labels_of(group.pods[0])["tandem.dev/revision"]
                for group in self.groups(role)
                if group.is_ready and len({labels_of(p)["controller-revision-hash"] for p in group.pods}) == 1
            )
            for role in self.plan.worker_roles
        }

    def capacity(self) -> Fraction:
        return capacity_of(self.ready(), {r: self.plan.worker_spec(r).replicas for r in self.plan.worker_roles})

    @property
    def floor(self) -> Fraction:
        rollout = self.plan.model.spec.rollout
        counts = [self.plan.worker_spec(role).replicas for role in self.plan.worker_roles]
        return min(Fraction(max(0, n - rollout.unavailable_of(n)), n) for n in counts)

    @property
    def num_builds(self) -> int:
        return len({labels_of(found)["tandem.dev/revision"] for found in self.pods()})

    @property
    def is_done(self) -> bool:
        return all(
            len(groups := self.groups(role)) == self.plan.worker_spec(role).replicas
            and self.live[workload_key(self.plan, role)]["spec"]["replicas"] == self.plan.num_pods(role)
            and all(group.is_ready for group in groups)
            and all(
                group.is_of(self.live[workload_key(self.plan, role)]["status"]["updateRevision"]) for group in groups
            )
            for role in self.plan.worker_roles
        )

    @property
    def has_released(self) -> bool:
        """Something may be replaced and has not been yet."""
        for key, workload in self.live.items():
            if key.kind == "StatefulSet":
                newest = digest(workload["spec"]["template"])[:8]
                partition = (workload["spec"]["updateStrategy"].get("rollingUpdate") or {}).get("partition", 0)
                for found in pods_of(key, self.live):
                    number = int(found["metadata"]["name"].rsplit("-", 1)[1])
                    if number >= partition and labels_of(found)["controller-revision-hash"] != newest:
                        return True
        return False

    def settle(self) -> None:
        for _ in range(400):
            self.look()
            self.control()
            for found in self.pods():
                self.start(found)
            if self.is_done:
                self.look()
                self.control()
                return
        raise AssertionError("it does not end")


SHAPES: list[dict[str, Any]] = [
    {"prefill": {}, "decode": {}},
    {"prefill": {"replicas": 1}, "decode": {"replicas": 8}},
    {"prefill": {"replicas": 2}, "decode": {"replicas": 4}},
    {"decode": {"replicas": 3}},
    {"prefill": {}, "decode": {"replicas": 2, "nodesPerReplica": 2, "parallelism": {"tensor": 2}}},
    {"decode": {"replicas": 2, "nodesPerReplica": 2, "parallelism": {"tensor": 2}}},
]
BUDGETS: list[dict[str, Any]] = [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxUnavailable": 1}, {"maxSurge": 2}]


@pytest.mark.timeout(max(600, HISTORIES))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_random_histories(shape: int) -> None:
    """What the operator does, and what controllers make of it, never costs more than the promise; and it ends."""
    for seed in range(HISTORIES // len(SHAPES)):
        rng = random.Random(seed * 100 + shape)
        spec = SHAPES[shape] | {"rollout": rng.choice(BUDGETS)}
        made = Cluster(blueprint(**spec), rng)
        made.settle()
        for _ in range(rng.randint(5, 25)):
            act(made, spec, rng, where=f"shape {shape}, seed {seed}")
        made.settle()
        assert made.current == {
            key: w["status"]["updateRevision"] for key, w in made.live.items() if key in made.current
        }


def act(made: Cluster, spec: dict[str, Any], rng: random.Random, *, where: str) -> None:
    event = rng.choice(
        ["look", "look", "look", "stale", "control", "control", "start", "start", "change", "evict", "crash"]
    )
    found = rng.choice(made.pods()) if made.pods() else None
    before, builds, overtaken = made.capacity(), made.num_builds, made.is_overtaken
    if event == "change":
        engine = (
            {"image": f"w:{rng.randint(1, 3)}"} if rng.random() < 0.7 else {"maxBatchTokens": rng.choice([64, 128])}
        )
        made.plan = blueprint(**spec | {"engine": engine})
    elif event == "evict" and found is not None:
        del made.live[child_key(found)]
    elif event == "crash" and found is not None:
        found["status"] = container()
    elif event == "start" and found is not None:
        made.start(found)
    elif event in ("look", "stale"):
        made.look(stale=event == "stale")
    elif event == "control":
        made.control()
    # A release that was right when it was decided is carried out, whatever crashes or comes up in that moment.
    made.is_overtaken = made.has_released and (made.is_overtaken or event in ("evict", "crash", "start", "stale"))
    if event in ("look", "control") and builds <= 2 and not overtaken:
        assert made.capacity() >= min(made.floor, before), f"{event}: {where}"
