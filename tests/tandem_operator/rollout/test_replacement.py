"""Rollouts over random histories: a cluster that starts slowly, crashes and changes its mind, against the planner."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_objects import blueprint
from tandem_api.names import Role
from tandem_operator.observe.replica import ObservedReplica, ReplicaState
from tandem_operator.rollout.replacement import RolePlan, RoleView, capacity_of, plan_replacement
from tandem_operator.rollout.trial import RoleFleet, replicas_for

HISTORIES = int(os.environ.get("TANDEM_HISTORIES", "100"))


@dataclass
class Pod:
    template: int
    state: ReplicaState = ReplicaState.DOWN
    broken: bool = False
    """It has ended, and does not come up by itself."""


@dataclass
class Set:
    """A StatefulSet with replicas of one pod, as its controller runs it."""

    wanted: int
    surge: int
    unavailable: int
    total: int = 0
    partition: int | None = 0
    released: int | None = 0
    """The template that the partition came down for."""
    current: int = 0
    newest: int = 0
    made: int = 0
    """Templates that there have been."""
    weight: int | None = None
    """Percent of a revision on trial."""
    pods: dict[int, Pod] = field(default_factory=dict[int, Pod])

    @property
    def limit(self) -> int | None:
        if self.weight is None:
            return None
        return replicas_for(RoleFleet(wanted=self.wanted, surge=self.surge), self.weight)

    @property
    def num_new(self) -> int:
        return sum(p.template == self.newest for p in self.pods.values())

    @property
    def is_even(self) -> bool:
        return self.current == self.newest == self.made and all(p.template == self.newest for p in self.pods.values())

    def view(self) -> RoleView:
        replicas = [
            ObservedReplica(
                index=i, build=str(p.template), state=p.state, is_outdated=p.template != self.newest,
                is_starting=p.state is ReplicaState.DOWN and not p.broken,
            )
            for i, p in sorted(self.pods.items())
        ]  # fmt: skip
        partition = self.total if self.partition is not None and self.released != self.newest else self.partition
        return RoleView(
            wanted=self.wanted, total=self.total, partition=partition, replicas=replicas, surge=self.surge,
            unavailable=self.unavailable, limit=self.limit, is_even=self.current == self.newest,
        )  # fmt: skip

    def control(self) -> None:
        """One turn of the StatefulSet controller."""
        for index in [index for index in self.pods if index >= self.total]:
            del self.pods[index]
        for index in range(self.total):
            at_newest = self.partition is None or index >= self.partition
            self.pods.setdefault(index, Pod(self.newest if at_newest else self.current))
        if self.partition is not None:
            for index in sorted(self.pods, reverse=True):
                if index >= self.partition and self.pods[index].template != self.newest:
                    del self.pods[index]
                    return
                if self.pods[index].state is not ReplicaState.READY:
                    break
            if all(p.template == self.newest and p.state is ReplicaState.READY for p in self.pods.values()):
                self.current = self.newest


@dataclass
class Cluster:
    sets: dict[Role, Set]

    def capacity(self) -> Fraction:
        ready = {
            role: Counter(str(p.template) for p in entry.pods.values() if p.state is ReplicaState.READY)
            for role, entry in self.sets.items()
        }
        return capacity_of(ready, {role: entry.wanted for role, entry in self.sets.items()})

    @property
    def floor(self) -> Fraction:
        return min(Fraction(max(0, s.wanted - s.unavailable), max(1, s.wanted)) for s in self.sets.values())

    def plan(self, **more: bool) -> dict[Role, RolePlan]:
        views = {role: entry.view() for role, entry in self.sets.items()}
        plan = plan_replacement(views, **more)
        assert plan == plan_replacement(views, **more), "the same state has the same plan"
        return plan

    def execute(self, plan: dict[Role, RolePlan]) -> None:
        """Write what is planned, and let what was released be replaced at once: the worst that can happen."""
        for role, entry in self.sets.items():
            entry.total, entry.partition = plan[role].total, plan[role].partition
            entry.released = entry.newest
            for index in plan[role].replace:
                entry.pods.pop(index, None)
            for index in [index for index in entry.pods if index >= entry.total]:
                del entry.pods[index]

    def new_template(self) -> None:
        """As it is applied: together with a partition that holds everything."""
        for entry in self.sets.values():
            entry.made += 1
            entry.newest, entry.weight = entry.made, None
            entry.partition = max(entry.total, entry.wanted)

    @property
    def can_try(self) -> bool:
        """A canary begins from one template, and where two revisions have room side by side."""
        return all(
            entry.is_even and entry.wanted and entry.wanted + entry.surge > 1 and len(entry.pods) >= entry.wanted
            for entry in self.sets.values()
        )

    def write_by_others(self) -> None:
        """Somebody restarts the workers. A partition that is low then is raised before anything else."""
        for entry in self.sets.values():
            entry.made += 1
            entry.newest = entry.made
            if entry.partition is not None and any(i >= entry.partition for i in entry.pods):
                entry.partition = max(entry.total, entry.wanted)

    def new_trial(self, weight: int) -> None:
        self.new_template()
        self.weigh(weight)

    def weigh(self, weight: int | None) -> None:
        """Another step, or all of it: promotion."""
        for entry in self.sets.values():
            entry.weight = weight

    def roll_back(self) -> None:
        """The template of before, as it is applied."""
        for entry in self.sets.values():
            entry.newest, entry.weight = entry.current, None
            entry.partition = max(entry.total, entry.wanted)

    @property
    def is_trying(self) -> bool:
        return any(entry.weight is not None for entry in self.sets.values())

    def start_all(self) -> None:
        for entry in self.sets.values():
            for pod in entry.pods.values():
                pod.state = ReplicaState.READY

    @property
    def is_done(self) -> bool:
        return all(
            len(entry.pods) == entry.wanted == entry.total
            and all(p.template == entry.newest and p.state is ReplicaState.READY for p in entry.pods.values())
            for entry in self.sets.values()
        )


def cluster(*shapes: tuple[int, int, int]) -> Cluster:
    """Sets of (wanted, surge, unavailable): prefill and decode, or decode alone; all of it serves."""
    roles = (Role.PREFILL, Role.DECODE) if len(shapes) == 2 else (Role.UNIFIED,)
    sets = {
        role: Set(
            wanted=n, surge=surge, unavailable=gone, total=n, pods={i: Pod(0, ReplicaState.READY) for i in range(n)}
        )
        for role, (n, surge, gone) in zip(roles, shapes, strict=True)
    }
    return Cluster(sets)


def roll(made: Cluster, *, steps: int = 400) -> Fraction:
    """Run until done, everything starting in a turn. Returns the lowest capacity on the way."""
    lowest = made.capacity()
    for _ in range(steps):
        made.execute(made.plan())
        lowest = min(lowest, made.capacity())
        for entry in made.sets.values():
            entry.control()
        lowest = min(lowest, made.capacity())
        made.start_all()
        if made.is_done:
            return lowest
    raise AssertionError(f"it does not end: {made}")


@pytest.mark.parametrize(
    ("shapes", "floor"),
    [
        ([(1, 1, 0), (1, 1, 0)], Fraction(1)),
        ([(1, 1, 0), (8, 0, 1)], Fraction(7, 8)),
        ([(2, 0, 1), (4, 0, 1)], Fraction(1, 2)),
        ([(2, 1, 0), (8, 1, 0)], Fraction(1)),
        ([(3, 0, 1)], Fraction(2, 3)),
        ([(1, 0, 1), (1, 0, 1)], Fraction(0)),
    ],
)
def test_pairs_never_fall_below_the_promise(shapes: list[tuple[int, int, int]], floor: Fraction) -> None:
    """One prefill and eight decode: not 1 of 7 that takes everything, but 7 of 8 at least."""
    made = cluster(*shapes)
    made.new_template()
    assert roll(made) >= floor


def load_times(made: Cluster) -> tuple[int, Fraction]:
    """How often all that starts has to load, one after another, and the lowest capacity on the way. What the operator
    and the controllers do takes no time beside it."""
    made.new_template()
    lowest = made.capacity()
    for loads in range(100):
        for _ in range(100):
            before = repr(made)
            made.execute(made.plan())
            lowest = min(lowest, made.capacity())
            for entry in made.sets.values():
                entry.control()
            lowest = min(lowest, made.capacity())
            if repr(made) == before:
                break
        if made.is_done:
            return loads, lowest
        made.start_all()
    raise AssertionError(f"it does not end: {made}")


@pytest.mark.parametrize(
    ("said", "most", "floor"),
    [
        ({}, 8, Fraction(7, 8)),
        ({"maxUnavailable": 0}, 8, Fraction(1)),
        ({"maxUnavailable": "25%"}, 8, Fraction(3, 4)),
        ({"maxSurge": "50%", "maxUnavailable": 0}, 4, Fraction(1)),
        ({"maxSurge": "100%", "maxUnavailable": 0}, 2, Fraction(1)),
    ],
)
@pytest.mark.parametrize("shape", [(8, 32), (2, 4), (1, 1)])
def test_a_rollout_takes_few_load_times(
    said: dict[str, Any], most: int, floor: Fraction, shape: tuple[int, int]
) -> None:
    """Without shares, one replica at a time, 8 prefill and 32 decode workers took 38."""
    rollout = blueprint(rollout=said).model.spec.rollout
    made = cluster(*((count, rollout.surge_of(count), rollout.unavailable_of(count)) for count in shape))
    floor = min(floor, *(Fraction(n - rollout.unavailable_of(n), n) for n in shape))
    loads, lowest = load_times(made)
    assert lowest >= floor
    assert loads <= most


def test_a_mending_template_reaches_workers_that_run_but_are_not_ready() -> None:
    made = cluster((3, 0, 1))
    for index in (0, 1):
        made.sets[Role.UNIFIED].pods[index] = Pod(0, ReplicaState.DOWN, broken=True)
    made.new_template()
    plan = made.plan()[Role.UNIFIED]
    assert plan.replace == (0, 1)
    assert plan.partition is None, "the one above them stays, and no controller takes it"
    roll(made)


def test_what_may_be_serving_is_kept_in_either_case() -> None:
    """A node that is out of reach: its replicas look unready and may all be serving."""
    made = cluster((4, 0, 1))
    for index in range(3):
        made.sets[Role.UNIFIED].pods[index].state = ReplicaState.UNSURE
    made.new_template()
    assert made.plan()[Role.UNIFIED].replace == (2,), "one, as if all four served; never the one that surely does"
    made.sets[Role.UNIFIED].pods.pop(2)
    assert made.plan()[Role.UNIFIED].replace == ()


def test_a_paused_rollout_stays_where_it_is_and_scales() -> None:
    made = cluster((4, 0, 1))
    made.new_template()
    made.sets[Role.UNIFIED].pods[3] = Pod(1, ReplicaState.READY)
    made.sets[Role.UNIFIED].partition, made.sets[Role.UNIFIED].released = 3, 1
    assert made.plan(paused=True)[Role.UNIFIED] == RolePlan(total=4, partition=3)
    made.sets[Role.UNIFIED].wanted = 6
    assert made.plan(paused=True)[Role.UNIFIED].total == 6


def test_a_pause_takes_no_replica_that_is_needed() -> None:
    made = cluster((2, 1, 0))
    entry = made.sets[Role.UNIFIED]
    entry.wanted, entry.pods[0].state = 1, ReplicaState.DOWN
    assert made.plan(paused=True)[Role.UNIFIED].total == 2
    entry.pods[0].state = ReplicaState.READY
    assert made.plan(paused=True)[Role.UNIFIED].total == 1


def test_workers_that_serve_wait_for_the_gateways() -> None:
    made = cluster((2, 1, 0))
    made.new_template()
    made.sets[Role.UNIFIED].pods[0] = Pod(0, ReplicaState.DOWN, broken=True)
    plan = made.plan(only_down=True)[Role.UNIFIED]
    assert (plan.total, plan.replace) == (2, (0,))


def test_what_somebody_else_writes_at_rest_replaces_nobody_by_itself() -> None:
    """Eight of eight, none may be missing: a restart of the StatefulSet by hand."""
    made = cluster((8, 1, 0))
    made.execute(made.plan())
    made.write_by_others()
    for _ in range(8):
        made.sets[Role.UNIFIED].control()
    assert made.capacity() == 1
    assert made.plan(paused=True)[Role.UNIFIED] == RolePlan(total=8, partition=8)
    assert roll(made) >= 1


def test_what_is_added_while_a_rollout_is_held_is_of_the_template_before() -> None:
    for held in ({"paused": True}, {"only_down": True}):
        made = cluster((4, 1, 0))
        made.new_template()
        made.sets[Role.UNIFIED].wanted = 8
        for _ in range(3):
            made.execute(made.plan(**held))
            made.sets[Role.UNIFIED].control()
            made.start_all()
        assert {p.template for p in made.sets[Role.UNIFIED].pods.values()} == {0}, held


@pytest.mark.parametrize("shape", [(4, 1, 0), (4, 0, 1), (4, 2, 1)])
def test_what_is_added_to_a_template_that_does_not_come_up_is_of_the_one_before(shape: tuple[int, int, int]) -> None:
    made = cluster(shape)
    entry, most = made.sets[Role.UNIFIED], shape[1] + shape[2]
    made.new_template()
    for wanted in (4, 4, 4, 9, 9, 9, 12, 12, 12):
        entry.wanted = wanted
        made.execute(made.plan())
        entry.control()
        for pod in entry.pods.values():
            pod.state = ReplicaState.READY if pod.template == 0 else ReplicaState.DOWN
    assert entry.num_new <= most
    assert sum(p.state is ReplicaState.READY for p in entry.pods.values()) >= 12 - shape[2]
    roll(made)


def test_what_is_added_to_a_template_that_serves_is_of_it() -> None:
    made = cluster((4, 1, 0))
    entry = made.sets[Role.UNIFIED]
    made.new_template()
    for _ in range(2):
        made.execute(made.plan())
        entry.control()
        made.start_all()
    entry.wanted = 8
    made.execute(made.plan())
    entry.control()
    assert {entry.pods[index].template for index in range(5, 8)} == {1}


def test_a_template_that_cannot_be_made_any_more_does_not_hold_the_next_one() -> None:
    """A quota refuses the replica of before, which is smaller now: the one that is missing is of the newest."""
    made = cluster((4, 0, 1))
    made.new_template()
    del made.sets[Role.UNIFIED].pods[3]
    assert made.plan()[Role.UNIFIED].partition == 3


def test_a_surge_comes_only_while_something_that_serves_is_replaced() -> None:
    made = cluster((1, 1, 0))
    assert made.plan()[Role.UNIFIED] == RolePlan(total=1, partition=1)
    made.new_template()
    assert made.plan()[Role.UNIFIED] == RolePlan(total=2, partition=1)
    made.sets[Role.UNIFIED].pods[0].state = ReplicaState.DOWN
    assert made.plan()[Role.UNIFIED] == RolePlan(total=1, partition=0, replace=(0,))


def test_suspension_takes_everything_at_once() -> None:
    made = cluster((2, 1, 0), (4, 0, 1))
    made.new_template()
    for entry in made.sets.values():
        entry.wanted = 0
    assert [plan.total for plan in made.plan().values()] == [0, 0]


def test_three_builds_whose_shares_do_not_add_up_come_to_an_end() -> None:
    made = cluster((4, 1, 0), (5, 1, 0))
    for role, templates in ((Role.PREFILL, [0, 2, 1, 2, 2]), (Role.DECODE, [0, 2, 1, 2, 2, 2])):
        entry = made.sets[role]
        entry.pods = {index: Pod(template, ReplicaState.READY) for index, template in enumerate(templates)}
        entry.total = entry.partition = len(templates)
        entry.newest = 2
    assert roll(made) > Fraction(3, 4)


def try_out(made: Cluster, *, steps: int = 400) -> Fraction:
    """Run until as many new replicas as the step needs are ready. Returns the lowest capacity on the way."""
    lowest = made.capacity()
    for _ in range(steps):
        made.execute(made.plan())
        lowest = min(lowest, made.capacity())
        for entry in made.sets.values():
            entry.control()
        lowest = min(lowest, made.capacity())
        made.start_all()
        if all(entry.num_new == entry.limit and len(entry.pods) >= entry.wanted for entry in made.sets.values()):
            return lowest
    raise AssertionError(f"the step is never reached: {made}")


@pytest.mark.parametrize(
    ("shapes", "floor"),
    [
        ([(1, 1, 0), (1, 1, 0)], Fraction(1)),
        ([(1, 1, 0), (8, 0, 1)], Fraction(7, 8)),
        ([(2, 0, 1), (4, 0, 1)], Fraction(1, 2)),
        ([(2, 1, 0), (8, 1, 0)], Fraction(1)),
        ([(4, 1, 0), (5, 1, 0)], Fraction(1)),
        ([(3, 0, 1)], Fraction(2, 3)),
    ],
)
def test_a_canary_goes_up_step_by_step_and_back_at_any_of_them(
    shapes: list[tuple[int, int, int]], floor: Fraction
) -> None:
    made = cluster(*shapes)
    for weights in itertools.accumulate([[10], [40], [75], [99]]):
        made.new_trial(weights[0])
        for weight in weights:
            made.weigh(weight)
            assert try_out(made) >= floor
        made.roll_back()
        assert roll(made) >= floor
        assert {p.template for entry in made.sets.values() for p in entry.pods.values()} == {0}
    made.new_trial(50)
    assert try_out(made) >= floor
    made.weigh(None)
    assert roll(made) >= floor


def test_a_single_replica_is_tried_beside_itself() -> None:
    made = cluster((1, 1, 0))
    made.new_trial(10)
    assert made.plan()[Role.UNIFIED] == RolePlan(total=2, partition=1)
    try_out(made)
    assert {i: p.template for i, p in made.sets[Role.UNIFIED].pods.items()} == {0: 0, 1: 1}
    assert made.plan(paused=True)[Role.UNIFIED] == RolePlan(total=2, partition=1), "a pause keeps both"


@pytest.mark.parametrize(("shape", "lost"), [((2, 1, 0), ()), ((2, 1, 1), (0,)), ((1, 1, 0), ())])
def test_one_of_the_revision_before_stays_though_none_serves(shape: tuple[int, int, int], lost: tuple[int]) -> None:
    made = cluster(shape)
    entry = made.sets[Role.UNIFIED]
    made.new_trial(60)
    if lost:
        try_out(made)
    for index, pod in list(entry.pods.items()):
        pod.state = ReplicaState.DOWN if not lost else pod.state
        if index in lost:
            del entry.pods[index]
    try_out(made)
    assert 0 in {pod.template for pod in entry.pods.values()}
    assert entry.current == 0


def test_what_is_added_during_a_canary_is_of_the_revision_before() -> None:
    made = cluster((4, 0, 1))
    made.new_trial(10)
    try_out(made)
    made.sets[Role.UNIFIED].wanted = 8
    assert made.plan()[Role.UNIFIED] == RolePlan(total=8, partition=8)
    roll_on = try_out(made)
    assert roll_on > 0
    assert made.sets[Role.UNIFIED].num_new == 1


def test_what_is_lost_during_a_canary_comes_back_as_it_was() -> None:
    made = cluster((4, 0, 1))
    made.new_trial(10)
    try_out(made)
    entry = made.sets[Role.UNIFIED]
    for index in (1, 3):
        del entry.pods[index]
        made.execute(made.plan())
        entry.control()
    assert [entry.pods[index].template for index in range(4)] == [0, 0, 0, 1]


budgets = st.sampled_from([(0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (2, 1)])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    num_roles = draw(st.sampled_from([1, 2, 2]))
    return cluster(*[(draw(st.integers(1, 6)), *draw(budgets)) for _ in range(num_roles)])


EVENTS = (
    "start", "start", "start", "template", "crash", "evict", "blink", "scale", "nothing", "nothing", "trial", "weigh",
    "promote", "roll back", "pause", "suspend", "others",
)  # fmt: skip


def happen(made: Cluster, event: str, data: st.DataObject) -> None:
    """One thing that no plan asked for."""
    entry = made.sets[data.draw(st.sampled_from(sorted(made.sets)))]
    if event == "scale":
        entry.wanted = data.draw(st.integers(1, 6))
        if made.is_trying and entry.wanted + entry.surge < 2:
            made.roll_back()
    elif event in _WISHES:
        _WISHES[event](made, data)
    elif entry.pods:
        index = data.draw(st.sampled_from(sorted(entry.pods)))
        states = {"start": ReplicaState.READY, "crash": ReplicaState.DOWN, "blink": ReplicaState.UNSURE}
        entry.pods[index].broken = event == "crash"
        if event == "evict":
            del entry.pods[index]
        elif event in states:
            entry.pods[index].state = states[event]


def ask_for_another(made: Cluster, data: st.DataObject) -> None:
    """What is tried goes back before something else is."""
    made.roll_back() if made.is_trying else made.new_template()


def ask_for_trial(made: Cluster, data: st.DataObject) -> None:
    if made.can_try:
        made.new_trial(data.draw(st.sampled_from([1, 10, 30, 60])))


def ask_for_step(made: Cluster, data: st.DataObject) -> None:
    if made.is_trying:
        made.weigh(data.draw(st.sampled_from([30, 60, 99])))


def go_back(made: Cluster, data: st.DataObject) -> None:
    if made.is_trying:
        made.roll_back()


def suspend(made: Cluster, data: st.DataObject) -> None:
    go_back(made, data)
    for entry in made.sets.values():
        entry.wanted = 0
    made.execute(made.plan())
    for entry in made.sets.values():
        entry.control()
        entry.wanted = data.draw(st.integers(1, 6))


_WISHES: dict[str, Callable[[Cluster, st.DataObject], None]] = {
    "template": ask_for_another,
    "trial": ask_for_trial,
    "weigh": ask_for_step,
    "promote": lambda made, _: made.weigh(None),
    "roll back": go_back,
    "others": lambda made, _: None if made.is_trying else made.write_by_others(),
    "suspend": suspend,
}


@pytest.mark.timeout(max(600, HISTORIES))
@settings(max_examples=HISTORIES)
@given(made=clusters(), data=st.data())
def test_random_histories(made: Cluster, data: st.DataObject) -> None:
    """What a plan does itself never costs more than the promise, whatever happened; in the end everything is new."""
    paused = False
    for _ in range(data.draw(st.integers(1, 12))):
        before, counts, builds = made.capacity(), ready_counts(made), builds_of(made)
        tried = {role: entry.num_new for role, entry in made.sets.items()}
        made.execute(made.plan(paused=paused))
        if len(builds) <= 2 or paused:  # the shares of more builds need not add up
            assert made.capacity() >= min(made.floor, before)
        for role, entry in made.sets.items():
            assert ready_counts(made)[role] >= min(entry.wanted - entry.unavailable, counts[role])
        for entry in made.sets.values():
            before = made.capacity()
            entry.control()
            assert made.capacity() >= min(made.floor, before), "nor does what a controller makes of it"
        for role, entry in made.sets.items():
            if entry.limit is not None:
                assert entry.num_new <= max(entry.limit, tried[role]), "no more are tried than may be"
                assert entry.current != entry.newest, "there is a way back"
        for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=4)):
            paused = not paused if event == "pause" else paused
            happen(made, event, data)
    if made.is_trying:
        stays = all(entry.num_new <= (entry.limit or 0) for entry in made.sets.values())
        if stays and data.draw(st.booleans()):
            try_out(made)
        if data.draw(st.booleans()):
            made.roll_back()
        made.weigh(None)
    roll(made)


def builds_of(made: Cluster) -> set[int]:
    return {p.template for entry in made.sets.values() for p in entry.pods.values()}


def ready_counts(made: Cluster) -> dict[Role, int]:
    return {role: sum(p.state is ReplicaState.READY for p in s.pods.values()) for role, s in made.sets.items()}
