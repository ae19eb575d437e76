"""Canaries, promotions, rollbacks and undo from manifests to pods: controllers act late, the cache lags behind."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from operator_objects import UID, blueprint, container, copied
from tandem_api.crd.status import CanaryFigures, InferenceModelStatus, RolloutStatus
from tandem_api.launch import CanaryTraffic
from tandem_api.names import Role
from tandem_operator.children.plan import ChildStep, plan_step
from tandem_operator.gateways.routing import plan_routing
from tandem_operator.objects.manifests import Manifest, child_key, labels_of, own_workloads
from tandem_operator.observe.roles import pods_of, workload_key
from tandem_operator.rollout.plan import RolloutPlan, missing_revisions, plan_rollout, view_rollout, with_traffic
from tandem_operator.rollout.revisions import build_revision, highest_number, read_history
from tandem_operator.rollout.statefulsets import plan_stateful_sets
from tandem_operator.workloads import Blueprint
from test_statefulset_histories import BUDGETS, SHAPES, Cluster

HISTORIES = int(os.environ.get("TANDEM_HISTORIES", "36"))
STEPS = {"steps": [{"weight": 20, "duration": "1m"}, {"weight": 60, "duration": "1m"}]}
LOOPING = container(
    restartCount=5, state={"waiting": {"reason": "CrashLoopBackOff"}}, lastState={"terminated": {"exitCode": 1}}
)


class Tried(Cluster):
    """A cluster whose operator remembers what it does in status, and keeps revisions."""

    def __init__(self, spec: dict[str, Any], rng: random.Random | None = None) -> None:
        super().__init__(blueprint(**spec), rng or random.Random(1))
        self.spec = spec
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.status = InferenceModelStatus()
        self.rollout_plan: RolloutPlan | None = None
        self.added: Mapping[str, CanaryFigures] = {}
        self.may_roll = True
        self.request: str | None = None
        self.bad_images: set[str] = set()

    @property
    def rollout(self) -> RolloutStatus:
        assert self.status.rollout is not None
        return self.status.rollout

    @property
    def traffic(self) -> CanaryTraffic | None:
        return None if self.status.routing is None else self.status.routing.canary

    def change(self, **spec: Any) -> None:
        self.spec = self.spec | spec
        self.plan = blueprint(**self.spec)

    def look(self, *, stale: bool = False) -> None:
        plan = Blueprint(model=self.plan.model.model_copy(update={"status": self.status}), release=self.plan.release)
        before, self.cached = self.cached, copied(self.live)
        cached = self.cached
        if stale:
            cached = {k: v for k, v in cached.items() if k.kind not in ("Pod", "ControllerRevision")}
            cached |= {k: v for k, v in before.items() if k.kind in ("Pod", "ControllerRevision")}
        ours = own_workloads(cached, owner_uid=UID)
        history = read_history(cached, owner_uid=UID)
        known = read_history(self.live, owner_uid=UID)
        history |= {n: known[n] for n in missing_revisions(plan, history) if n in known}
        seen = view_rollout(plan, history, ours, retry=self.request, taken=highest_number(cached), now=self.now)
        rollout_plan = plan_rollout(seen, ours, may_roll=self.may_roll, added=self.added, fresh=True, now=self.now)
        self.added, self.rollout_plan = {}, rollout_plan
        if seen.record is not None:
            self.live.setdefault(child_key(seen.record), seen.record)
        for key in [k for k in self.live if k.kind == "ControllerRevision" and k not in rollout_plan.keep]:
            if seen.record is None or key != child_key(seen.record):
                del self.live[key]
        routing = plan_routing(rollout_plan.target.blueprint, now=self.now)
        self.status = self.status.model_copy(update={"rollout": rollout_plan.state, "routing": routing})
        rolling = plan_stateful_sets(
            rollout_plan.target.blueprint, rollout_plan.target.desired, ours, now=self.now, limits=rollout_plan.limits,
            waiting=rollout_plan.waiting,
        )  # fmt: skip
        if not rollout_plan.hold:
            for child in rolling.desired:
                if plan_step(child, self.live.get(child_key(child)), owner_uid=UID) is ChildStep.APPLY:
                    self.apply(copied(child))
            for key in rolling.replace:
                found = self.live.get(key)
                if found is not None and found["metadata"]["uid"] == cached[key]["metadata"]["uid"]:
                    del self.live[key]
        self.status = with_traffic(self.status, rollout_plan, own_workloads(self.live, owner_uid=UID), now=self.now)

    def _make(self, *args: Any) -> Manifest:
        made = super()._make(*args)
        made["metadata"]["creationTimestamp"] = self.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        return made

    def start(self, found: Manifest) -> None:
        super().start(found)
        if labels_of(found)["tandem.dev/revision"] in self.bad_images:
            found["status"] = copied(LOOPING)

    def run(self, *, seconds: float = 10, times: int = 12) -> None:
        """Looks, controllers and pods by turns."""
        for _ in range(times):
            self.look()
            self.control()
            for found in self.pods():
                self.start(found)
            self.now += timedelta(seconds=seconds)
        self.look()

    def new(self, role: Role) -> list[str]:
        """Leaders of the newest template."""
        key = workload_key(self.plan, role)
        newest = self.live[key]["status"]["updateRevision"]
        return [g.pods[0]["metadata"]["name"] for g in self.groups(role) if g.is_of(newest)]

    def builds(self) -> set[str]:
        return {labels_of(found)["tandem.dev/revision"] for found in self.pods()}


def served(canary: dict[str, Any] | None = None, **spec: Any) -> Tried:
    """A fleet that runs revision 1."""
    rollout = {} if canary is None else {"canary": canary}
    made = Tried({"engine": {"image": "w:1"}, "rollout": rollout} | spec)
    made.run()
    assert (made.rollout.phase, made.rollout.complete_revision) == ("Complete", 1)
    return made


PAIR: dict[str, Any] = {"prefill": {}, "decode": {}}


def test_a_canary_is_promoted_step_by_step() -> None:
    made = served(STEPS, prefill={"replicas": 2}, decode={"replicas": 4})
    made.change(engine={"image": "w:2"})
    weights: list[tuple[int, float]] = []
    for _ in range(80):
        made.run(seconds=5, times=1)
        trial = made.rollout.canary
        if trial is not None and trial.ready and made.traffic is not None:
            weights.append((trial.step, made.traffic.percent))
            assert made.traffic.workers == sorted(made.new(Role.PREFILL) + made.new(Role.DECODE))
        if made.rollout.complete_revision == 2:
            break
    made.run(seconds=5, times=1)  # the surge goes
    assert list(dict.fromkeys(weights)) == [(1, 20.0), (2, 60.0)]
    assert made.rollout.phase == "Complete"
    assert made.traffic is None
    assert made.builds() == {made.plan.revision}
    assert sorted(read_history(made.live, owner_uid=UID)) == [1, 2]


def test_a_single_pair_is_tried_beside_itself_and_gets_requests_once_it_is_ready() -> None:
    made = served(STEPS, **PAIR)
    made.change(engine={"image": "w:2"})
    for _ in range(3):
        made.look()
        made.control()
    assert len(made.groups(Role.DECODE)) == 2
    assert made.traffic is not None
    assert (made.traffic.percent, made.traffic.workers) == (0.0, ["m-decode-1", "m-prefill-1"])
    made.run(times=1)
    assert made.traffic.percent == 20.0


def test_a_canary_that_crashes_goes_back_by_itself_and_is_tried_again_when_asked() -> None:
    made = served(STEPS, **PAIR)
    stable = made.plan.revision
    made.change(engine={"image": "w:2"})
    made.bad_images = {made.plan.revision}
    made.run()
    assert made.rollout.phase == "RolledBack"
    assert made.rollout.canary is not None
    assert made.rollout.canary.reason == "CrashLoopBackOff"
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is not None
    assert made.rollout_plan.problem.stalled
    assert "revision 2 failed its canary at step 1: CrashLoopBackOff" in made.rollout_plan.problem.message
    assert made.builds() == {stable}
    assert len(made.groups(Role.DECODE)) == 1
    assert made.traffic is None
    before = made.rollout
    made.run()
    assert made.rollout == before, "nothing is tried again by itself"
    made.bad_images = set()
    made.request = "now"
    made.run(times=40)
    assert (made.rollout.phase, made.rollout.complete_revision) == ("Complete", 2)


def test_a_spec_that_goes_back_ends_a_failed_canary() -> None:
    made = served(STEPS, **PAIR)
    made.change(engine={"image": "w:2"})
    made.bad_images = {made.plan.revision}
    made.run()
    made.change(engine={"image": "w:1"})
    made.run()
    assert (made.rollout.phase, made.rollout.revision, made.rollout.canary) == ("Complete", 1, None)
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is None


def test_failed_requests_end_a_canary_and_its_workers_get_no_more_at_once() -> None:
    made = served(STEPS | {"maxErrorRate": 5, "minRequests": 10}, **PAIR)
    made.change(engine={"image": "w:2"})
    made.run(times=4)
    assert made.traffic is not None
    assert made.traffic.percent == 20.0
    made.added = {"m-decode-1": CanaryFigures(requests=40, failures=30), "m-decode-0": CanaryFigures(requests=200)}
    made.look()
    assert made.rollout.canary is not None
    assert (made.rollout.phase, made.rollout.canary.reason) == ("RolledBack", "ErrorRateExceeded")
    assert made.traffic is not None
    assert made.traffic.percent == 0.0
    made.run()
    assert made.traffic is None


def test_a_change_in_the_middle_of_a_canary_goes_back_first() -> None:
    made = served(STEPS, decode={"replicas": 4})
    stable = made.plan.revision
    made.change(engine={"image": "w:2"})
    made.run(times=4)
    assert made.rollout.phase == "Canary"
    made.change(engine={"image": "w:3"})
    made.look()
    assert (made.rollout.phase, made.rollout.stable_revision, made.rollout.revision) == ("Preparing", 1, 3)
    while made.rollout.phase == "Preparing":
        made.run(times=1)
    assert made.builds() == {stable}
    made.run(times=40)
    assert (made.rollout.phase, made.rollout.complete_revision) == ("Complete", 3)


def test_undo_by_number_has_no_canary_and_works_midway() -> None:
    made = served(decode={"replicas": 4})
    first = made.plan.revision
    made.change(engine={"image": "w:2"})
    made.run(times=4, seconds=1)
    assert made.rollout.phase == "Progressing"
    made.change(rollout={"revision": 1, "canary": STEPS})
    made.run()
    assert (made.rollout.phase, made.rollout.revision, made.builds()) == ("Complete", 1, {first})
    made.change(rollout={})
    made.run()
    assert (made.rollout.complete_revision, made.rollout.phase) == (2, "Complete"), "it keeps its number"


def test_a_revision_that_is_not_kept_changes_nothing() -> None:
    made = served(decode={"replicas": 2})
    made.change(rollout={"revision": 7}, engine={"image": "w:2"})
    before = copied(made.live)
    made.run()
    assert made.live == before
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is not None
    assert made.rollout_plan.problem.reason == "RevisionNotFound"
    assert "kept: 1" in made.rollout_plan.problem.message


def test_only_so_many_revisions_are_kept() -> None:
    made = served(decode={"replicas": 1})
    made.change(rollout={"revisionHistoryLimit": 2})
    for number in range(2, 7):
        made.change(engine={"image": f"w:{number}"})
        made.run()
    assert sorted(read_history(made.live, owner_uid=UID)) == [4, 5, 6]


def test_how_many_replicas_and_which_names_are_no_part_of_a_revision() -> None:
    made = served(STEPS, decode={"replicas": 2})
    made.change(decode={"replicas": 3}, gateway={"replicas": 2}, drain={"timeout": "90s"})
    made.run()
    made.change(model={"uri": "hf://org/repo", "servedName": "other"})
    made.run()
    assert sorted(read_history(made.live, owner_uid=UID)) == [1]


def test_suspension_ends_a_canary_without_promoting_it() -> None:
    made = served(STEPS, decode={"replicas": 3})
    stable = made.plan.revision
    made.change(engine={"image": "w:2"})
    made.run(times=4)
    assert made.rollout.phase == "Canary"
    made.change(suspend=True)
    made.run()
    assert (made.rollout.phase, made.pods()) == ("Preparing", [])
    made.change(suspend=False)
    made.look()
    made.control()
    assert made.builds() == {stable}
    made.run(times=40)
    assert made.rollout.complete_revision == 2


def test_a_pause_holds_the_step_and_all_that_is_there() -> None:
    made = served(STEPS, **PAIR)
    made.change(engine={"image": "w:2"})
    made.run(times=4)
    made.change(rollout={"canary": STEPS, "paused": True})
    made.run(times=2)
    before = {found["metadata"]["uid"] for found in made.pods()}
    made.run(times=30)
    assert made.rollout.canary is not None
    assert (made.rollout.canary.step, made.rollout.canary.weight) == (1, 20)
    assert {found["metadata"]["uid"] for found in made.pods()} == before
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is not None
    assert (made.rollout_plan.problem.reason, made.rollout_plan.problem.stalled) == ("RolloutPaused", True)
    made.change(rollout={"canary": STEPS})
    made.run(times=40)
    assert made.rollout.complete_revision == 2


def test_what_has_no_turn_replaces_nothing_that_serves() -> None:
    made = served(decode={"replicas": 2})
    made.may_roll = False
    before = {found["metadata"]["uid"] for found in made.pods()}
    made.change(engine={"image": "w:2"})
    made.run(times=30)
    assert {found["metadata"]["uid"] for found in made.pods()} == before
    assert made.rollout.waiting
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is not None
    assert made.rollout_plan.problem.reason == "WaitingForTurn"
    made.may_roll = True
    made.run()
    assert (made.rollout.complete_revision, made.rollout.waiting) == (2, False)


def test_a_change_that_makes_the_same_pods_is_adopted_at_once() -> None:
    made = served(STEPS, decode={"replicas": 2})
    before = {found["metadata"]["uid"] for found in made.pods()}
    made.change(kv={"transport": "TCP"})
    made.run()
    assert (made.rollout.phase, made.rollout.complete_revision) == ("Complete", 2)
    assert {found["metadata"]["uid"] for found in made.pods()} == before


def test_a_role_that_does_not_change_lends_a_share_of_its_workers() -> None:
    made = served(STEPS, prefill={"replicas": 3}, decode={"replicas": 4})
    made.change(decode={"replicas": 4, "resources": {"requests": {"cpu": "1"}}})
    made.run(times=5)
    assert made.traffic is not None
    assert made.traffic.workers == ["m-decode-4", "m-prefill-2"]
    assert made.new(Role.PREFILL) == ["m-prefill-0", "m-prefill-1", "m-prefill-2"]


def test_the_other_workers_keep_what_they_start_from_and_may_connect_as_before() -> None:
    made = served(STEPS, prefill={"replicas": 2, "parallelism": {"tensor": 4}}, decode={"replicas": 2})
    configs = {key for key in made.live if key.kind == "ConfigMap" and key.name.startswith("m-prefill")}
    before = {
        port["port"]
        for key, child in made.live.items()
        if key.kind == "NetworkPolicy" and key.name == "m-prefill"
        for rule in child["spec"]["ingress"]
        for port in rule["ports"]
    }
    made.change(prefill={"replicas": 2})
    made.run(times=4)
    assert made.rollout.phase == "Canary"
    assert made.rollout_plan is not None
    assert configs <= made.rollout_plan.keep
    (policy,) = [
        c for c in made.rollout_plan.target.desired if child_key(c).name == "m-prefill" and c["kind"] == "NetworkPolicy"
    ]
    assert {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]} == before


@pytest.mark.parametrize("change", [{"kv": {}}, {"engine": {"image": "other:2"}}])
def test_a_canary_takes_the_master_of_their_store_from_nobody(change: dict[str, Any]) -> None:
    def stores() -> list[Manifest]:
        assert made.rollout_plan is not None
        return [c for c in made.rollout_plan.target.desired if c["metadata"]["name"] == "m-store"]

    made = served(STEPS, prefill={"replicas": 2}, decode={"replicas": 2}, kv={"store": {"memory": "1Gi"}})
    made.look()
    before = stores()
    assert [child["kind"] for child in before] == ["NetworkPolicy", "Service", "Deployment"]
    made.change(**change)
    made.run(times=4)
    assert made.rollout.phase == "Canary"
    key = lambda child: child["kind"]  # noqa: E731
    assert sorted(stores(), key=key) == sorted(before, key=key), "it would forget all that the others have there"
    made.run(times=60)
    assert made.rollout.phase == "Complete"
    assert (stores() == []) is ("kv" in change)


def test_another_shape_has_no_canary() -> None:
    made = served(STEPS, decode={"replicas": 2})
    made.change(prefill={"replicas": 1})
    made.run(times=30)
    assert (made.rollout.phase, made.rollout.complete_revision) == ("Complete", 2)


def test_a_model_of_an_earlier_release_is_taken_over_as_it_is() -> None:
    made = served(STEPS, **PAIR)
    made.status = InferenceModelStatus()
    made.live = {k: v for k, v in made.live.items() if k.kind != "ControllerRevision"}
    before = {found["metadata"]["uid"] for found in made.pods()}
    made.run()
    assert (made.rollout.complete_revision, sorted(read_history(made.live, owner_uid=UID))) == (1, [1])
    assert {found["metadata"]["uid"] for found in made.pods()} == before


def test_a_deleted_revision_stops_what_needs_it_and_is_named() -> None:
    made = served(STEPS, decode={"replicas": 2})
    made.change(engine={"image": "w:2"})
    made.run(times=4)
    for key in [k for k in made.live if k.kind == "ControllerRevision" and k.name == "m-1"]:
        del made.live[key]
    made.run(times=40)
    assert made.rollout.phase == "Canary", "never promoted: it could not go back"
    assert made.rollout_plan is not None
    assert made.rollout_plan.problem is not None
    assert made.rollout_plan.problem.reason == "RevisionNotFound"
    made.change(rollout={})
    made.run()
    assert made.rollout.complete_revision == 2


EVENTS = [
    "look", "look", "look", "stale", "control", "control", "start", "start", "change", "evict", "crash", "clock",
    "clock", "undo", "scale", "pause", "suspend", "canary", "retry", "turn", "fail",
]  # fmt: skip


@pytest.mark.timeout(max(600, HISTORIES))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_random_histories(shape: int) -> None:
    """Whatever happens: no more is tried than may be, no step costs more than the promise, and in the end all workers
    have what is wanted, or what served before where that failed."""
    for seed in range(HISTORIES // len(SHAPES)):
        rng = random.Random(seed * 100 + shape)
        budget = rng.choice(BUDGETS)
        made = Tried(SHAPES[shape] | {"engine": {"image": "w:1"}, "rollout": budget | {"canary": STEPS}}, rng)
        made.run()
        where = f"shape {shape}, seed {seed}"
        for _ in range(rng.randint(10, 60)):
            happen(made, rng, where=where)
        made.may_roll = True
        made.change(suspend=False, rollout={k: v for k, v in made.spec["rollout"].items() if k != "paused"})
        for _ in range(200):
            made.run(times=1)
            if made.rollout.phase == "Complete" and made.is_done and made.traffic is None:
                break
        assert made.rollout.phase == "Complete", f"{where}: {made.rollout}"
        assert made.rollout.complete_revision == made.rollout.revision, where
        assert made.is_done, where
        assert made.traffic is None, where
        made.run(times=2)
        assert made.builds() == ({made.rollout_plan.target.blueprint.revision} if made.rollout_plan else set()), where


def happen(made: Tried, rng: random.Random, *, where: str) -> None:
    event = rng.choice(EVENTS)
    suspended = made.spec.get("suspend", False)
    before, builds, overtaken = 0 if suspended else made.capacity(), made.num_builds, made.is_overtaken
    tried = num_new(made)
    if event in WISHES:
        WISHES[event](made, rng)
    elif event in ("look", "stale"):
        made.look(stale=event == "stale")
    elif event == "control":
        made.control()
    elif made.pods():
        happen_to(made, rng.choice(made.pods()), event)
    happened = event in ("evict", "crash", "start", "stale", "fail", "scale", "suspend")
    made.is_overtaken = (made.has_released or has_surplus(made)) and (made.is_overtaken or happened)
    if event in ("look", "control") and builds <= 2 and not overtaken and not suspended:
        assert made.capacity() >= min(made.floor, before), f"{event}: {where}"
    if (
        event == "look"
        and made.rollout_plan is not None
        and made.rollout.phase == "Canary"
        and not made.rollout_plan.hold
    ):
        for role, count in num_new(made).items():
            limit = made.rollout_plan.limits.get(role)
            assert limit is None or count <= max(limit, tried.get(role, 0)), f"{role}: {where}"


def happen_to(made: Tried, found: Manifest, event: str) -> None:
    if event == "evict":
        del made.live[child_key(found)]
    elif event == "crash":
        found["status"] = container()
    elif event == "start":
        made.start(found)


def without(rollout: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in rollout.items() if name != key}


def another(made: Tried, rng: random.Random) -> None:
    more = {"maxBatchTokens": 64} if rng.random() < 0.3 else {}
    made.change(engine={"image": f"w:{rng.randint(1, 3)}"} | more)


def undo(made: Tried, rng: random.Random) -> None:
    kept = sorted(read_history(made.live, owner_uid=UID))
    pin = {"revision": rng.choice(kept)} if rng.random() < 0.5 and kept else {}
    made.change(rollout=without(made.spec["rollout"], "revision") | pin)


def canary(made: Tried, rng: random.Random) -> None:
    more = {"canary": STEPS} if rng.random() < 0.8 else {}
    made.change(rollout=without(made.spec["rollout"], "canary") | more)


def scale(made: Tried, rng: random.Random) -> None:
    made.change(decode=made.spec["decode"] | {"replicas": rng.randint(1, 4)})


def clock(made: Tried, rng: random.Random) -> None:
    made.now += timedelta(seconds=rng.choice([5, 40, 90]))


def retry(made: Tried, rng: random.Random) -> None:
    made.request = str(rng.random())


def turn(made: Tried, rng: random.Random) -> None:
    made.may_roll = rng.random() < 0.6


def fail(made: Tried, rng: random.Random) -> None:
    """All requests of a canary fail, and somebody asks to try again."""
    rollout = made.spec["rollout"]
    if made.traffic is not None and "canary" in rollout:
        made.change(rollout=rollout | {"canary": STEPS | {"maxErrorRate": 5, "minRequests": 10}})
        made.added = {worker: CanaryFigures(requests=20, failures=20) for worker in made.traffic.workers}
        made.look()
        made.change(rollout=rollout)
        retry(made, rng)


WISHES: dict[str, Callable[[Tried, random.Random], None]] = {
    "change": another,
    "undo": undo,
    "canary": canary,
    "scale": scale,
    "clock": clock,
    "retry": retry,
    "turn": turn,
    "fail": fail,
    "pause": lambda made, rng: made.change(rollout=made.spec["rollout"] | {"paused": rng.random() < 0.3}),
    "suspend": lambda made, rng: made.change(suspend=rng.random() < 0.3),
}


def has_surplus(made: Tried) -> bool:
    """Pods that a count which was right when it was decided takes away."""
    return any(
        int(found["metadata"]["name"].rsplit("-", 1)[1]) >= workload["spec"]["replicas"]
        for key, workload in made.live.items()
        if key.kind == "StatefulSet"
        for found in pods_of(key, made.live)
    )


def num_new(made: Tried) -> dict[Role, int]:
    """Replicas of the template that a StatefulSet would make new pods from."""
    counts: dict[Role, int] = {}
    for role in made.plan.worker_roles:
        workload = made.live.get(workload_key(made.plan, role))
        if workload is not None:
            newest = workload["status"].get("updateRevision")
            found = pods_of(workload_key(made.plan, role), made.live)
            size = made.plan.worker_spec(role).nodes_per_replica
            counts[role] = sum(labels_of(p)["controller-revision-hash"] == newest for p in found) // size
    return counts


def test_a_revision_says_what_it_is_made_from() -> None:
    plan = blueprint(prefill={}, decode={"replicas": 3}, engine={"image": "w:1"})
    made = build_revision(plan, 4, {"model": {"uri": "hf://org/repo"}})
    assert (made["metadata"]["name"], made["revision"]) == ("m-4", 4)
    assert labels_of(made)["app.kubernetes.io/component"] == "history"
