"""What waits, and is there still when a replica comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_operator.autoscale.plan.backlog import DRAIN_SECONDS, DRAIN_SHARE, count_clearing, foresee_backlog
from tandem_operator.autoscale.plan.contract import RoleSpec, RoleState, ScalingSpec, Target
from tandem_operator.autoscale.plan.load import Load, learn_start
from tandem_operator.autoscale.plan.rates import Rate
from tandem_operator.autoscale.plan.sizing import Answers, Prompts

SPEC = ScalingSpec(
    roles={Role.PREFILL: RoleSpec(max=64), Role.DECODE: RoleSpec(max=64)}, ttft=Target(seconds=2.0),
    tpot=Target(seconds=0.03), queue_seconds=30.0, first_token_seconds=300.0,
)  # fmt: skip
VELOCITY = 1e4


def make_load(rate: float) -> Load:
    return Load(
        requests=Rate(now=rate / 1000, ahead=rate / 1000, deviation=0.0, jumped=False),
        tokens=Rate(now=rate, ahead=rate, deviation=0.0, jumped=False),
        prompts=Prompts(tokens=1000.0, uncached=1000.0, squares=1e6),
        answers=Answers(context=1100.0, output=200.0, variation=0.0),
    )


def make_state(start: float, *, queued: int = 0, held: int | None = None, ready: int = 4) -> RoleState:
    waiting = queued if held is None else held
    return RoleState(
        replicas=ready, ready=ready, queued_tokens=queued, waiting_tokens=waiting, starts=(start,),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("start", "queued", "held", "rate", "expected"),
    [
        (15.0, 500_000, None, 4e4, 500_000 - 0.95 * 4e4),  # they wait still, when the replicas are there
        (45.0, 500_000, None, 4e4, 0),  # turned away by then
        (45.0, 500_000, 0, 4e4, 500_000 - 0.95 * 4e4),  # at workers they wait for `timeouts.firstToken`
        (600.0, 500_000, 0, 4e4, 0),
        (60.0, 0, None, 1e5, 30 * 6e4),  # what comes in the last 30 s, less what is computed
        (60.0, 9_000_000, None, 1e5, 30 * 6e4),
        (180.0, 9_000_000, None, 1e5, 0),  # working it off in 72 s serves nobody who waits for 30
        (180.0, 9_000_000, 0, 1e5, 9_000_000 - 0.95 * 4e4 + 180 * 6e4),
        (180.0, 9_000_000, None, 3e4, 0),
    ],
)
def test_those_are_left_who_wait_still(
    start: float, queued: int, held: int | None, rate: float, expected: float
) -> None:
    state = make_state(start, queued=queued, held=held)
    assert foresee_backlog(SPEC, state, make_load(rate), VELOCITY, 0.0) == pytest.approx(expected, abs=2000)


@settings(max_examples=100, deadline=None)
@given(st.floats(1, 1000), st.integers(0, 10**8), st.floats(0, 1e6), st.floats(1, 1000), st.integers(1, 40))
def test_shorter_patience_never_leaves_more(
    start: float, queued: int, rate: float, patience: float, ready: int
) -> None:
    state, load = make_state(start, queued=queued, ready=ready), make_load(rate)
    less = foresee_backlog(replace(SPEC, queue_seconds=patience), state, load, VELOCITY, 0.0)
    more = foresee_backlog(replace(SPEC, queue_seconds=2 * patience), state, load, VELOCITY, 0.0)
    assert 0 <= less <= more * (1 + 1e-9) + 1


@settings(max_examples=100, deadline=None)
@given(st.floats(1, 2000), st.integers(0, 10**9), st.floats(1e3, 1e6), st.integers(1, 200))
def test_orders_are_bounded_and_the_drain_is_priced_by_the_start(
    start: float, backlog: int, rate: float, enough: int
) -> None:
    load, state = make_load(rate), make_state(start)
    count = count_clearing(SPEC, state, load, VELOCITY, backlog, 0.0, enough=enough)
    assert 0 <= count <= 2 * enough
    longer = count_clearing(SPEC, make_state(2 * start), load, VELOCITY, backlog, 0.0, enough=enough)
    assert longer <= count


def test_a_drain_takes_a_part_of_the_start() -> None:
    def extra(start: float) -> float:
        counted = count_clearing(SPEC, make_state(start), make_load(1e4), VELOCITY, 1e7, 0.0, enough=10_000)
        return (counted - 1) * VELOCITY

    assert extra(15.0) == extra(45.0) == 1e7 / DRAIN_SECONDS
    assert extra(300.0) == pytest.approx(1e7 / (DRAIN_SHARE * 300), abs=VELOCITY)


def test_a_start_that_nobody_has_seen_is_at_least_as_long_as_others_have_waited() -> None:
    unseen = RoleState(replicas=2, ready=1, warming=1)
    assert learn_start(unseen, SPEC, 10.0) == 60.0
    assert learn_start(unseen, SPEC, 400.0) == 400.0
    assert learn_start(replace(unseen, starts=(50.0, 70.0)), SPEC, 400.0) == 60.0
