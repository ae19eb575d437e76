"""`spec.prefill` comes and goes while the model serves: pairs, and decode workers that need none, keep the promise."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from operator_objects import UID, blueprint, settled
from tandem_api.crd.status import InferenceModelStatus, RoleStatus
from tandem_api.names import LABEL_ROLE, Role
from tandem_operator.children.plan import plan_children
from tandem_operator.objects.manifests import ChildKey, child_key, labels_of, own_workloads
from tandem_operator.objects.pods import is_ready
from tandem_operator.observe.roles import pods_of
from tandem_operator.reconcile.status import build_status
from tandem_operator.rollout.partners import needed_partners, with_ways
from tandem_operator.workloads import Blueprint, build_children
from test_rollout_plan import Tried

PREFILL, DECODE = ChildKey("StatefulSet", "m-prefill"), ChildKey("StatefulSet", "m-decode")
POLICY = ChildKey("NetworkPolicy", "m-decode")
SERVICE = ChildKey("Service", "m-prefill")


class Shaped(Tried):
    """A cluster whose operator also deletes what is no longer desired."""

    def __init__(self, spec: dict[str, Any], rng: random.Random | None = None) -> None:
        super().__init__(spec, rng)
        self.lame: set[str] = set()
        """Components whose pods do not become ready."""

    def look(self, *, stale: bool = False) -> None:
        super().look(stale=stale)
        assert self.rollout_plan is not None
        ours = own_workloads(self.live, owner_uid=UID)
        plan = plan_children(self.rollout_plan.target.desired, ours, owner_uid=UID, keep=self.rollout_plan.keep)
        for key in plan.delete:
            for found in pods_of(key, self.live) if key.kind == "StatefulSet" else []:
                del self.live[child_key(found)]
            del self.live[key]

    def start(self, found: dict[str, Any]) -> None:
        if labels_of(found)["app.kubernetes.io/component"] not in self.lame:
            super().start(found)

    def ready_of(self, role: Role) -> int:
        return sum(is_ready(found) and labels_of(found)[LABEL_ROLE] == role.value for found in self.pods())

    def serving(self, prefill: int, decode: int) -> Fraction:
        """Share of the model that is served where decode workers that were started as one of a pair compute no prompts:
        those of engines of other kinds do not."""
        pairs = min(Fraction(self.ready_of(Role.PREFILL), prefill), Fraction(self.ready_of(Role.DECODE), decode))
        return pairs + Fraction(self.ready_of(Role.UNIFIED), decode)

    def walk(self, prefill: int, decode: int, rng: random.Random, *, times: int = 120) -> Fraction:
        """Until nothing is left to do, in any order. Returns the least that was served."""
        least = self.serving(prefill, decode)
        for _ in range(times):
            turn = rng.choice(["look", "look", "stale", "control", "control", "start"])
            if turn in ("look", "stale"):
                self.look(stale=turn == "stale")
            elif turn == "control":
                self.control()
            elif waiting := [found for found in self.pods() if not is_ready(found)]:
                self.start(rng.choice(waiting))
            least = min(least, self.serving(prefill, decode))
        return least


def served(**spec: Any) -> Shaped:
    made = Shaped({"engine": {"image": "w:1"}, **spec})
    made.run()
    assert made.is_done
    return made


SHAPES = [(1, 1), (1, 3), (2, 4), (3, 2)]
BUDGETS: list[dict[str, Any]] = [{}, {"maxSurge": 1, "maxUnavailable": 0}, {"maxUnavailable": 1}, {"maxSurge": 2}]


def floor(plan: Blueprint) -> Fraction:
    rollout = plan.model.spec.rollout
    counts = [role.replicas for role in plan.model.spec.workers]
    return min(Fraction(max(0, count - rollout.unavailable_of(count)), count) for count in counts)


@pytest.mark.parametrize(("prefill", "decode"), SHAPES)
@pytest.mark.parametrize(("budget", "kind"), [(0, "VLLM"), (1, "Tandem"), (2, "VLLM"), (3, "Tandem")])
def test_a_role_that_is_added_or_removed_costs_no_more_than_the_promise(
    prefill: int, decode: int, budget: int, kind: str
) -> None:
    rng = random.Random(f"{prefill} {decode} {budget} {kind}")
    made = served(
        decode={"replicas": decode}, rollout=BUDGETS[budget], engine={"image": "w:1", "kind": kind, "device": "CUDA"}
    )
    made.change(prefill={"replicas": prefill})
    promised = floor(made.plan)
    assert made.walk(prefill, decode, rng) >= promised
    made.settle()
    assert (made.ready_of(Role.PREFILL), made.ready_of(Role.DECODE), made.ready_of(Role.UNIFIED)) == (
        prefill, decode, 0,
    )  # fmt: skip
    made.change(prefill=None)
    assert made.walk(prefill, decode, rng) >= min(promised, floor(made.plan))
    made.settle()
    made.look()
    assert (made.ready_of(Role.UNIFIED), len(made.pods())) == (decode, decode)
    assert not {PREFILL, SERVICE} & made.live.keys(), "and then it goes"


@pytest.mark.parametrize("prefill", [1, 2])
def test_decode_workers_stay_until_there_is_a_partner(prefill: int) -> None:
    made = served(decode={"replicas": 2})
    made.lame.add("prefill")
    made.change(prefill={"replicas": prefill})
    made.run(times=30)
    assert made.ready_of(Role.UNIFIED) >= 1
    assert made.serving(prefill, 2) >= Fraction(1, 2)
    made.lame.clear()
    made.run(times=30)
    assert (made.ready_of(Role.UNIFIED), made.ready_of(Role.DECODE)) == (0, 2)


def test_a_change_back_in_the_middle_keeps_what_serves() -> None:
    made = served(decode={"replicas": 2}, rollout={"maxSurge": 1, "maxUnavailable": 0})
    made.change(prefill={"replicas": 1})
    for _ in range(100):
        made.run(times=1)
        if made.ready_of(Role.DECODE) and made.ready_of(Role.UNIFIED):
            break
    made.change(prefill=None)
    assert made.walk(1, 2, random.Random(1), times=200) >= 1
    made.settle()
    made.look()
    assert (made.ready_of(Role.UNIFIED), PREFILL in made.live) == (2, False)


def test_what_may_connect_stays_so_until_the_last_pair_is_gone() -> None:
    pair = blueprint(prefill={}, decode={"replicas": 2})
    live = settled(pair)
    alone = blueprint(decode={"replicas": 2})
    kept = needed_partners(alone, live)
    assert {PREFILL, SERVICE, ChildKey("NetworkPolicy", "m-prefill")} <= kept
    assert not {DECODE, POLICY} & kept
    assert not any(key.kind == "Pod" for key in kept)
    desired = build_children(alone)
    assert plan_children(desired, live, owner_uid=UID, keep=kept).delete == ()
    policies = [
        next(child for child in found if child_key(child) == POLICY)
        for found in (desired, with_ways(desired, kept, live))
    ]
    ports = [{port["port"] for rule in p["spec"]["egress"] for port in rule.get("ports", [])} for p in policies]
    assert 7000 in ports[1] - ports[0], "decode workers of before reach prefill workers"
    for key in [key for key in live if key.kind == "Pod" and key.name.startswith("m-decode")]:
        live[key]["metadata"]["labels"] |= {LABEL_ROLE: "unified"}
    assert needed_partners(alone, live) == frozenset()
    assert with_ways(desired, frozenset(), live) == desired


@pytest.mark.parametrize("spec", [{"suspend": True}, {"rollout": {"type": "Recreate"}}, {"prefill": {}}])
def test_who_wants_all_pods_gone_gets_it(spec: dict[str, Any]) -> None:
    assert needed_partners(blueprint(**spec), settled(blueprint(prefill={}))) == frozenset()


def test_a_model_that_serves_is_ready_while_a_role_is_added() -> None:
    """As a role that grows: what was promised before is served."""
    status = InferenceModelStatus(decode=RoleStatus(replicas=1, ready=1, updated=1, promised=1))
    live = settled(blueprint())
    plan = blueprint(prefill={})
    for _ in range(2):
        model = plan.model.model_copy(update={"status": status})
        status = build_status(
            Blueprint(model=model, release=plan.release), live, problems=(), failures={}, waiting=(),
            now="2026-01-01T00:00:00Z",
        )  # fmt: skip
        conditions = {c.type: c.status for c in status.conditions}
        assert (conditions["Ready"], conditions["Reconciling"]) == ("True", "True")
        assert status.prefill is not None
        assert status.prefill.promised == 0
    fresh = build_status(
        plan, live, problems=(), failures={}, waiting=(), now="2026-01-01T00:00:00Z"
    )  # nothing was promised before
    assert next(c.status for c in fresh.conditions if c.type == "Ready") == "False"


@pytest.mark.parametrize(
    ("kind", "prefill", "expected"),
    [("VLLM", None, "False"), ("VLLM", {"replicas": 2}, "False"), ("Tandem", None, "True")],
)
def test_a_decode_worker_without_the_partner_it_needs_is_not_told_as_served(
    kind: str, prefill: dict[str, Any] | None, expected: str
) -> None:
    """Where the role has just come, or goes, and its workers are down; Tandem's compute prompts themselves. Nobody is
    told that something is available then either."""
    engine = {"image": "w:1", "kind": kind, "device": "CUDA"}
    pair = blueprint(engine=engine, prefill={})
    plan = blueprint(engine=engine) if prefill is None else blueprint(engine=engine, prefill=prefill)
    model = plan.model.model_copy(
        update={"status": InferenceModelStatus(decode=RoleStatus(replicas=1, ready=1, updated=1, promised=1))}
    )
    live = settled(pair)

    def told() -> dict[str, str]:
        status = build_status(
            Blueprint(model=model, release=plan.release), live, problems=(), failures={}, waiting=(),
            now="2026-01-01T00:00:00Z",
        )  # fmt: skip
        return {c.type: c.status for c in status.conditions if c.type in ("Ready", "Available")}

    assert told() == {"Ready": "True", "Available": "True"}
    live[ChildKey("Pod", "m-prefill-0")]["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    assert told() == {"Ready": expected, "Available": expected}
