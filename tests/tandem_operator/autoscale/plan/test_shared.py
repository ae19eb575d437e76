"""Replicas that compute prompts beside answers: the arithmetic against steps played one by one, and decisions."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_operator.autoscale.plan.adapter import Autoscaler
from tandem_operator.autoscale.plan.contract import (
    Counters,
    Decision,
    RoleSpec,
    RoleState,
    ScalingSpec,
    Snapshot,
    Target,
    Tuning,
)
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.planner import plan
from tandem_operator.autoscale.plan.shared import SharedDemand, SharedReplica, find_missed, size_shared
from tandem_operator.autoscale.plan.sizing import Answers, Prompts, StepModel

D = Role.DECODE
TTFT, TPOT = Target(percentile=0.95, seconds=2.0, seconds_per_token=1e-4), Target(seconds=0.03)
REPLICA = SharedReplica(steps=StepModel(base=0.006, slope=8e-8), extra=0.1, velocity=2e4, kv_tokens=400_000)
DEMAND = SharedDemand(
    tokens=30_000.0, requests=8.0, prompts=Prompts(tokens=4000, uncached=3000, squares=2 * 3000.0**2),
    answers=Answers(context=4150, output=300, variation=1.0), deviations=1.0,
)  # fmt: skip
SPEC = ScalingSpec(roles={D: RoleSpec(max=64)}, ttft=TTFT, tpot=TPOT)


def play_steps(share: float, sequences: int, chunk: int, replica: SharedReplica) -> tuple[float, float]:
    """Prompts that come so that they take this share of the time, in chunks: seconds of a token, tokens per second."""
    chance, step = random.Random(1), replica.steps.base
    now = waiting = computed = mixed = 0.0
    count = 0
    for _ in range(100_000):
        busy = waiting > 0
        now_step = step + (replica.extra if busy else 0.0)
        now, count = now + now_step, count + 1
        if busy:
            waiting, computed, mixed = waiting - chunk, computed + chunk, mixed + now_step
        if chance.random() < share * now_step / (step + replica.extra):
            waiting += chunk
    assert abs(mixed / now - share) < 0.02
    return now / count, computed / mixed


@pytest.mark.parametrize("share", [0.1, 0.5, 0.8])
def test_tokens_and_prompts_are_as_fast_as_in_steps_played_one_by_one(share: float) -> None:
    chunk, sequences = 1900, 100
    replica = replace(REPLICA, velocity=(chunk + sequences) / (REPLICA.steps.base + REPLICA.extra))
    token, speed = play_steps(share, sequences, chunk, replica)
    assert replica.mix(REPLICA.steps.base, share) == pytest.approx(token, rel=0.05)
    assert replica.prompt_speed(sequences, REPLICA.steps.base) == pytest.approx(speed, rel=1e-6)
    assert replica.mix(0.006, replica.largest_share(0.006, 0.03)) == pytest.approx(0.03)


demands = st.builds(
    lambda tokens, requests, output, deviations: replace(
        DEMAND, tokens=tokens, requests=requests, answers=replace(DEMAND.answers, output=output), deviations=deviations
    ),
    st.floats(0, 2e6), st.floats(0, 200), st.floats(1, 2000), st.floats(0, 3),
)  # fmt: skip
replicas = st.builds(
    lambda extra, velocity, kv: replace(REPLICA, extra=extra, velocity=velocity, kv_tokens=kv),
    st.floats(0, 1) | st.just(inf), st.floats(5e3, 1e5), st.floats(5e4, 1e6),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(demands, replicas, st.floats(1, 4), st.floats(1, 4))
def test_more_demand_never_takes_fewer_and_one_fewer_misses_what_is_said(
    demand: SharedDemand, replica: SharedReplica, more: float, further: float
) -> None:
    count, missed = size_shared(demand, replica, TTFT, TPOT)
    larger = replace(demand, tokens=demand.tokens * more, requests=demand.requests * further)
    assert size_shared(larger, replica, TTFT, TPOT)[0] >= count
    if 1 < count < 4096:
        assert not find_missed(count, demand, replica, TTFT, TPOT)
        assert find_missed(count - 1, demand, replica, TTFT, TPOT) == missed


@settings(max_examples=100, deadline=None)
@given(demands, replicas)
def test_a_looser_target_and_a_better_replica_never_take_more(demand: SharedDemand, replica: SharedReplica) -> None:
    count, _ = size_shared(demand, replica, TTFT, TPOT)
    assert size_shared(demand, replica, replace(TTFT, seconds=4.0), TPOT)[0] <= count
    assert size_shared(demand, replica, TTFT, replace(TPOT, percentile=0.8))[0] <= count
    assert size_shared(demand, replace(replica, velocity=2 * replica.velocity), TTFT, TPOT)[0] <= count


def test_each_bound_is_named() -> None:
    patient, small = Target(seconds=0.5), replace(REPLICA, extra=0.005)
    assert size_shared(DEMAND, REPLICA, TTFT, TPOT)[1] == "TPOT target"
    assert size_shared(DEMAND, small, TTFT, TPOT)[1] == "TTFT target", "a step with a chunk is within the target"
    assert size_shared(DEMAND, REPLICA, TTFT, TPOT)[0] > size_shared(DEMAND, small, TTFT, TPOT)[0]
    tight = replace(REPLICA, kv_tokens=12_000)
    assert size_shared(DEMAND, tight, replace(TTFT, seconds=60.0), patient)[1] == "KV blocks"
    held = replace(DEMAND, held=20 * 0.85 * REPLICA.kv_tokens)
    assert size_shared(held, REPLICA, TTFT, patient) == (20, "KV blocks")


def test_mixed_steps_that_are_not_measured_count_as_time_in_which_answers_stand_still() -> None:
    assert (
        size_shared(DEMAND, replace(REPLICA, extra=inf), TTFT, TPOT)[0] >= size_shared(DEMAND, REPLICA, TTFT, TPOT)[0]
    )
    assert replace(REPLICA, extra=inf).mix(0.01, 0.5) == 0.02


def make_history(
    load: float = 1.0, *, count: int = 4, queued: int = 0, until: float = 300.0, mixed: float | None = 0.1,
    held: float | None = None,
) -> History:  # fmt: skip
    """`load` times 4 requests per second of 4000 prompt and 300 output tokens, `count` replicas that do both."""
    history, requests = History(), 0.0
    for step in range(int(until / 5) + 1):
        requests += 20.0 * load
        context = 40_000.0 * (load if held is None else held) * (0.9 + 0.2 * (step % 3))
        each = context / count
        history = history.observe(
            Snapshot(
                at=step * 5.0,
                roles={
                    D: RoleState(
                        replicas=count, ready=count, queued_tokens=queued, busy=0.7,
                        tokens_per_second=2e4, kv_tokens_used=int(context), kv_tokens_total=count * 400_000,
                        step_seconds=0.006 + 8e-8 * each, mixed_step_seconds=mixed,
                    ),
                },
                counters=Counters(
                    requests=int(requests), prompt_tokens=int(requests * 4000), prompt_squares=requests * 2 * 4000**2,
                    computed_prompt_tokens=int(requests * 4000), computed_tokens=int(requests * 3000),
                    finished=int(requests), output_tokens=int(requests * 300),
                ),
            )
        )  # fmt: skip
    return history


def decide(history: History, spec: ScalingSpec = SPEC) -> Decision:
    return plan(spec, history.snapshots[-1], history, history.snapshots[-1].at)


bounds = st.builds(
    lambda low, more, gpus, spare: replace(
        SPEC,
        roles={D: RoleSpec(min=low, max=low + more, gpus=gpus)},
        gpu_budget=None if spare is None else low * gpus + spare,
    ),
    st.integers(1, 6), st.integers(0, 40), st.integers(1, 8), st.none() | st.integers(0, 60),
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.floats(0.05, 40), bounds, st.integers(1, 20), st.integers(0, 10_000_000))
def test_never_below_min_above_max_or_over_budget(load: float, spec: ScalingSpec, count: int, queued: int) -> None:
    decision = decide(make_history(load, count=count, queued=queued), spec)
    assert not decision.held
    own = spec.roles[D]
    assert own.min <= decision.replicas[D] <= own.max
    assert spec.gpu_budget is None or decision.replicas[D] * own.gpus <= spec.gpu_budget


@settings(max_examples=60, deadline=None)
@given(st.floats(0.05, 40), st.floats(1, 4), st.integers(0, 1_000_000), st.integers(0, 1_000_000))
def test_more_load_never_takes_fewer_replicas(load: float, more: float, queued: int, further: int) -> None:
    spec = replace(SPEC, roles={D: RoleSpec(max=4000)})
    less = decide(make_history(load, queued=queued, held=1.0), spec)
    greater = decide(make_history(load * more, queued=queued + further, held=1.0), spec)
    assert greater.roles[D].required >= less.roles[D].required
    assert greater.replicas[D] >= less.replicas[D]


def test_a_decision_says_what_it_saw_and_what_limits_it() -> None:
    decision = decide(make_history(4.0))
    assert decision.roles[D].limit == "TPOT target"
    assert f"decode 4 → {decision.replicas[D]} (TPOT target; demand asks for" in decision.sentence
    assert "in steps of 100 ms instead of" in decision.sentence
    assert "prefill" not in decision.sentence
    assert "steps of unmeasured length" in decide(make_history(4.0, mixed=None)).sentence


def test_a_backlog_takes_more_and_replicas_on_their_way_are_coming() -> None:
    history = make_history(1.0, queued=8_000_000)
    late, fleet = decide(history), history.snapshots[-1]
    assert late.roles[D].limit == "backlog"
    assert late.replicas[D] > decide(make_history(1.0)).replicas[D]
    state = replace(fleet.roles[D], replicas=late.replicas[D], warming=late.replicas[D] - 4)
    newest = replace(fleet, roles={D: state})
    again = plan(SPEC, newest, replace(history, snapshots=(*history.snapshots[:-1], newest)), fleet.at)
    assert again.replicas == late.replicas, "neither ordered twice nor taken for capacity"
    calm = replace(SPEC, tuning=Tuning(backlog=False))
    assert decide(make_history(1.0, queued=8_000_000), calm).roles[D].limit != "backlog"


def test_replicas_go_only_after_the_window_and_only_with_one_to_spare() -> None:
    history = make_history(1.0, count=12)
    fleet, after = history.snapshots[-1], decide(history).replicas[D]
    assert after < 12
    least = next(count for count in range(after, 0, -1) if decide(make_history(1.0, count=count)).replicas[D] >= count)
    assert decide(make_history(1.0, count=least)).needs[D] >= least, "one fewer would miss a target"
    lately = history.record(Decision(at=fleet.at - 200, roles={}, needs={D: 11}))
    assert plan(SPEC, fleet, lately, fleet.at).replicas == {D: 11}
    before = history.record(Decision(at=fleet.at - 610, roles={}, needs={D: 11}))
    assert plan(SPEC, fleet, before, fleet.at).replicas == {D: after}


def test_nothing_moves_where_something_is_missing() -> None:
    history = make_history(3.0)
    fleet = history.snapshots[-1]
    state = fleet.roles[D]
    silent = replace(history, snapshots=tuple(
        replace(one, roles={D: replace(one.roles[D], step_seconds=None)}) for one in history.snapshots
    ))  # fmt: skip
    for one, seen, reason in (
        (replace(fleet, roles={}), history, "decode replicas"),
        (replace(fleet, roles={D: replace(state, ready=0)}), history, "ready"),
        (replace(fleet, roles={D: replace(state, tokens_per_second=None)}), history, "a decode replica's velocity"),
        (silent.snapshots[-1], silent, "step time"),
    ):
        assert reason in plan(SPEC, one, seen, fleet.at).held


def test_a_fleet_that_nobody_asks_shrinks_by_halves_to_its_minimum() -> None:
    busy, count, seen = make_history(1.0, count=8).snapshots[-1], 8, []
    scaler = Autoscaler(replace(SPEC, roles={D: RoleSpec(min=2, max=8)}))
    for step in range(720):
        state = replace(busy.roles[D], replicas=count, ready=count, kv_tokens_used=0)
        count = scaler.decide(step * 5.0, replace(busy, at=step * 5.0, roles={D: state}))[D]
        if not seen or seen[-1] != count:
            seen.append(count)
    assert seen == [8, 4, 2]


@pytest.mark.parametrize("extra", [0.1, inf])
def test_prompts_without_an_answer_meet_the_target_for_a_token(extra: float) -> None:
    """As where only scores or embeddings are asked for, on replicas whose steps chats have shown before."""
    demand = replace(DEMAND, answers=replace(DEMAND.answers, output=0.0))
    count, missed = size_shared(demand, replace(REPLICA, extra=extra), TTFT, TPOT)
    assert (count, missed) == (size_shared(demand, replace(REPLICA, extra=0.0), TTFT, TPOT))
