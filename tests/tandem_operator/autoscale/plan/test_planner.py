"""Properties of the planner's decisions, and what each term does."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_operator.autoscale.plan.adapter import Autoscaler
from tandem_operator.autoscale.plan.contract import (
    Behavior,
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
from tandem_operator.autoscale.plan.rates import JUMP_SHARE

P, D = Role.PREFILL, Role.DECODE
SPEC = ScalingSpec(
    roles={P: RoleSpec(max=64), D: RoleSpec(max=64)},
    ttft=Target(percentile=0.95, seconds=2.0, seconds_per_token=1e-4),
    tpot=Target(seconds=0.03),
)
KV = 400_000


def make_history(
    load: float = 1.0, *, prefills: int = 4, decodes: int = 2, queued: int = 0, until: float = 300.0, jump: float = 1.0,
    transfer: float | None = 0.2, tokens: float = 4000.0, held: float | None = None, busy: float | None = 0.5,
) -> History:  # fmt: skip
    """`load` times 4 requests per second, the last 20 seconds `jump` times that; 300 tokens of output each.

    Decode workers hold the context of `load`, or of `held` where that is given.
    """
    history = History()
    requests = 0.0
    for step in range(int(until / 5) + 1):
        at = step * 5.0
        requests += 20.0 * load * (jump if at > until - 20 else 1.0)
        context = 12_000.0 * (held or load) * (0.9 + 0.2 * (step % 3))
        history = history.observe(
            Snapshot(
                at=at,
                roles={
                    P: RoleState(
                        replicas=prefills, ready=prefills, queued_tokens=queued, busy=busy, tokens_per_second=1e4
                    ),
                    D: RoleState(
                        replicas=decodes, ready=decodes, kv_tokens_used=int(context), kv_tokens_total=decodes * KV,
                        step_seconds=0.006 + 8e-8 * context / decodes, transfer_share=transfer,
                    ),
                },
                counters=Counters(
                    requests=int(requests), prompt_tokens=int(requests * tokens),
                    prompt_squares=requests * 2 * tokens**2, computed_prompt_tokens=int(requests * tokens),
                    computed_tokens=int(requests * tokens * 0.7), finished=int(requests),
                    output_tokens=int(requests * 300),
                ),
            )
        )  # fmt: skip
    return history


def decide(history: History, spec: ScalingSpec = SPEC, age: float = 0.0) -> Decision:
    fleet = history.snapshots[-1]
    return plan(spec, fleet, history, fleet.at + age)


loads = st.floats(0.05, 40)
specs = st.builds(
    lambda low_p, more_p, low_d, more_d, gpus_p, gpus_d, spare, ratio: ScalingSpec(
        roles={
            P: RoleSpec(min=low_p, max=low_p + more_p, gpus=gpus_p),
            D: RoleSpec(min=low_d, max=low_d + more_d, gpus=gpus_d),
        },
        ttft=SPEC.ttft, tpot=SPEC.tpot, max_ratio=ratio,
        gpu_budget=None if spare is None else low_p * gpus_p + low_d * gpus_d + spare,
    ),
    st.integers(1, 4), st.integers(0, 40), st.integers(1, 4), st.integers(0, 40), st.integers(1, 8), st.integers(1, 8),
    st.none() | st.integers(0, 60), st.sampled_from([0.5, 2.0, float("inf")]),
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(loads, specs, st.integers(1, 20), st.integers(1, 20), st.integers(0, 10_000_000), st.floats(1, 8))
def test_never_below_min_above_max_or_over_budget(
    load: float, spec: ScalingSpec, prefills: int, decodes: int, queued: int, jump: float
) -> None:
    decision = decide(make_history(load, prefills=prefills, decodes=decodes, queued=queued, jump=jump), spec)
    assert not decision.held
    for role, count in decision.replicas.items():
        assert spec.roles[role].min <= count <= spec.roles[role].max
    if spec.gpu_budget is not None:
        assert sum(count * spec.roles[role].gpus for role, count in decision.replicas.items()) <= spec.gpu_budget


# Requests are counted in whole ones: at the least jump itself, of two loads either may seem to jump.
jumps = st.floats(1, 6).filter(lambda jump: abs(jump / JUMP_SHARE - 1) > 0.01)


@settings(max_examples=100, deadline=None)
@example(4.0, 1.125, 0, 0, 1.32)
@given(loads, st.floats(1.0, 4.0), st.integers(0, 1_000_000), st.integers(0, 1_000_000), jumps)
def test_more_load_never_takes_fewer_replicas(load: float, more: float, queued: int, further: int, jump: float) -> None:
    spec = replace(SPEC, roles={P: RoleSpec(max=4000), D: RoleSpec(max=4000)})
    less = decide(make_history(load, queued=queued, jump=jump, held=1.0), spec)
    greater = decide(make_history(load * more, queued=queued + further, jump=jump, held=1.0), spec)
    for role in (P, D):
        assert greater.roles[role].required >= less.roles[role].required
        assert greater.replicas[role] >= less.replicas[role]


@settings(max_examples=50, deadline=None)
@given(loads, st.floats(30.1, 10_000), st.integers(0, 10_000_000))
def test_nothing_moves_on_stale_telemetry(load: float, age: float, queued: int) -> None:
    decision = decide(make_history(load, queued=queued), age=age)
    assert decision.replicas == {P: 4, D: 2}
    assert "old" in decision.held
    assert "Nothing moves" in decision.sentence


@settings(max_examples=50, deadline=None)
@given(loads, st.integers(0, 1_000_000), st.floats(1, 8))
def test_the_same_input_gives_the_same_decision(load: float, queued: int, jump: float) -> None:
    assert decide(make_history(load, queued=queued, jump=jump)) == decide(make_history(load, queued=queued, jump=jump))


def test_nothing_moves_where_something_is_missing() -> None:
    history = make_history(5.0)
    fleet = history.snapshots[-1]
    prefill, decode = fleet.roles[P], fleet.roles[D]
    silent = replace(history, snapshots=tuple(
        replace(one, roles={**one.roles, D: replace(one.roles[D], step_seconds=None)}) for one in history.snapshots
    ))  # fmt: skip
    cases = [
        (None, history, "no gateway"),
        (replace(fleet, counters=None), history, "what arrives"),
        (replace(fleet, roles={D: decode}), history, "prefill"),
        (replace(fleet, roles={P: replace(prefill, ready=0), D: decode}), history, "ready"),
        (replace(fleet, roles={P: replace(prefill, tokens_per_second=None), D: decode}), history, "velocity"),
        (silent.snapshots[-1], silent, "step time"),
        (fleet, History(), "too few"),
    ]
    for given_fleet, given_history, reason in cases:
        decision = plan(SPEC, given_fleet, given_history, 300.0)
        assert reason in decision.held
        assert all(one.replicas == one.observed for one in decision.roles.values())


def test_a_decision_says_what_it_saw_and_what_limits_it() -> None:
    decision = decide(make_history(8.0), replace(SPEC, gpu_budget=10))
    assert decision.roles[P].limit == "GPU budget"
    assert "prefill 4 → " in decision.sentence
    assert "GPU budget" in decision.sentence
    assert f"demand asks for {decision.roles[P].required}" in decision.sentence
    assert decision.inputs["prefill_tokens_per_second"] == 1e4


def test_a_jump_is_seen_in_seconds_and_not_without_its_term() -> None:
    history = make_history(2.0, jump=5.0)
    quiet = replace(SPEC, tuning=Tuning(jump=False, trend=False))
    assert decide(history).roles[P].required >= 1.5 * decide(history, quiet).roles[P].required


def test_a_backlog_takes_more_and_decode_follows_its_outflow() -> None:
    calm, late = make_history(2.0), make_history(2.0, queued=2_000_000)
    assert decide(late).roles[P].limit == "backlog"
    assert decide(late).roles[P].required > decide(calm).roles[P].required
    assert decide(late).roles[D].required > decide(calm).roles[D].required
    apart = replace(SPEC, tuning=Tuning(joint=False))
    assert decide(late, apart).roles[D].required == decide(calm, apart).roles[D].required


def test_replicas_on_their_way_are_coming_and_no_capacity() -> None:
    history = make_history(4.0, prefills=4, queued=500_000)
    fleet = history.snapshots[-1]

    def with_warming(count: int) -> Decision:
        state = replace(fleet.roles[P], replicas=4 + count, warming=count)
        newest = replace(fleet, roles={**fleet.roles, P: state})
        return plan(SPEC, newest, replace(history, snapshots=(*history.snapshots[:-1], newest)), fleet.at)

    ordered = with_warming(0).replicas[P]
    again = with_warming(ordered - 4)
    assert ordered > 4
    assert again.replicas[P] == ordered  # neither ordered twice nor taken for capacity
    assert again.inputs == with_warming(0).inputs


def test_full_links_bound_prefill_and_are_named() -> None:
    decision = decide(make_history(8.0, transfer=0.97))
    assert decision.roles[P].limit == decision.roles[D].limit == "KV transfer"
    assert decision.replicas[D] > decide(make_history(8.0)).replicas[D]


@settings(max_examples=60, deadline=None)
@given(loads, st.floats(0.9, 1), st.none() | st.floats(0, 1), st.integers(1, 12), st.integers(1, 12))
def test_full_links_take_no_prefill_replica_away(
    load: float, share: float, busy: float | None, prefills: int, decodes: int
) -> None:
    free = decide(make_history(load, prefills=prefills, decodes=decodes, transfer=0.0, busy=busy)).replicas
    full = decide(make_history(load, prefills=prefills, decodes=decodes, transfer=share, busy=busy)).replicas
    assert full[P] >= min(prefills, free[P])
    assert full[D] >= free[D]
    assert full[D] > decodes or (share * decodes <= 0.9 * full[D]), "links are full: there must be more"


def test_decode_replicas_whose_links_are_needed_stay() -> None:
    patient = replace(SPEC, tpot=Target(seconds=0.2))
    spare = decide(make_history(1.0, decodes=3), patient)
    needed = decide(make_history(1.0, decodes=3, transfer=0.63), patient)
    assert spare.replicas[D] < 3
    assert (needed.replicas[D], needed.roles[D].limit) == (3, "KV transfer"), "two would be full to 94%"


def test_full_memory_bounds_decode() -> None:
    roomy = replace(SPEC, tpot=Target(seconds=0.2))
    decision = decide(make_history(20.0, prefills=60), roomy)
    assert decision.roles[D].limit == "KV blocks"


def test_replicas_go_only_after_the_window_and_only_with_one_to_spare() -> None:
    history = make_history(1.0, prefills=8, decodes=4)
    fleet = history.snapshots[-1]
    assert decide(history).replicas[P] < 8
    lately = history.record(Decision(at=fleet.at - 200, roles={}, needs={P: 7, D: 4}))
    assert plan(SPEC, fleet, lately, fleet.at).replicas == {P: 7, D: 4}
    before = history.record(Decision(at=fleet.at - 610, roles={}, needs={P: 7, D: 4}))
    assert plan(SPEC, fleet, before, fleet.at).replicas == decide(history).replicas
    eager = replace(SPEC, behavior=Behavior(scale_down_seconds=60.0))
    assert plan(eager, fleet, lately, fleet.at).replicas == decide(history).replicas


def make_fall(start: float, *, warming: int = 0) -> History:
    """Demand that falls by half within 5 minutes, on a fleet of 8 and 4 whose replicas took so long to start. So many
    of the prefill replicas are still on their way."""
    history, requests = History(), 0.0
    for step in range(61):
        requests += 5 * 40.0 * (1.0 - 0.5 * step / 60)
        roles = make_history(prefills=8, decodes=4, until=5.0).snapshots[-1].roles
        counters = Counters(
            requests=int(requests), prompt_tokens=int(requests * 400), prompt_squares=requests * 2 * 400.0**2,
            computed_prompt_tokens=int(requests * 400), computed_tokens=int(requests * 280), finished=int(requests),
            output_tokens=int(requests * 30),
        )  # fmt: skip
        roles = {role: replace(state, starts=(start,) * 4) for role, state in roles.items()}
        roles[P] = replace(roles[P], ready=8 - warming, warming=warming)
        history = history.observe(Snapshot(at=5.0 * step, roles=roles, counters=counters))
    return history


@pytest.mark.parametrize(
    ("start", "ago", "kept"),
    [
        (45.0, 55.0, True), (45.0, 65.0, False),  # the shortest window
        (180.0, 175.0, True), (180.0, 190.0, False),  # a start
        (3600.0, 590.0, True), (3600.0, 610.0, False),  # never longer than while demand is steady
    ],
)  # fmt: skip
def test_while_demand_falls_replicas_stay_for_as_long_as_others_would_take_to_come(
    start: float, ago: float, kept: bool
) -> None:
    for warming in (0, 5):
        history = make_fall(start, warming=warming)
        fleet = history.snapshots[-1]
        lately = history.record(Decision(at=fleet.at - ago, roles={}, needs={P: 8, D: 4}))
        decision = plan(SPEC, fleet, lately, fleet.at)
        assert (decision.replicas[P] == 8) is kept, decision.sentence
        assert decision.roles[P].limit == ("stabilization" if kept else "TTFT target")


def test_a_step_belongs_to_the_context_of_those_that_decode() -> None:
    """One of eight replicas works now and then: its steps are no sign that eight are full."""
    history = make_history(1.0, decodes=8)
    alone = [
        replace(
            one, roles={**one.roles, D: replace(one.roles[D], kv_tokens_used=4000, step_seconds=0.0063, decoding=1)}
        )
        for one in history.snapshots
    ]
    decision = plan(SPEC, alone[-1], History(tuple(alone)), alone[-1].at)
    spread = [replace(one, roles={**one.roles, D: replace(one.roles[D], decoding=None)}) for one in alone]
    blurred = plan(SPEC, spread[-1], History(tuple(spread)), spread[-1].at)
    assert 4 * decision.roles[D].required < blurred.roles[D].required


def test_a_fleet_that_nobody_asks_shrinks_by_halves_to_its_minimum() -> None:
    busy = make_history(1.0, prefills=8, decodes=6).snapshots[-1]
    spec = replace(SPEC, roles={P: RoleSpec(min=1, max=8), D: RoleSpec(min=2, max=8)})
    scaler, counts, seen = Autoscaler(spec), {P: 8, D: 6}, []
    for step in range(720):
        now = step * 5.0
        roles = {role: replace(busy.roles[role], replicas=counts[role], ready=counts[role]) for role in (P, D)}
        counts = dict(scaler.decide(now, replace(busy, at=now, roles=roles)))
        assert scaler.last is not None
        if now < 240:
            assert scaler.last.reason == "NothingMeasured"
        if not seen or counts != seen[-1]:
            seen.append(counts)
    assert seen == [{P: 8, D: 6}, {P: 4, D: 3}, {P: 2, D: 2}, {P: 1, D: 2}]


def test_requests_that_never_end_are_not_taken_for_idleness() -> None:
    history = make_history(1.0, prefills=8)
    stuck = [
        replace(one, counters=replace(one.counters, finished=0, output_tokens=0))
        for one in history.snapshots
        if one.counters is not None
    ]
    decision = plan(SPEC, stuck[-1], History(tuple(stuck)), stuck[-1].at)
    assert (decision.reason, decision.replicas[P]) == ("NothingMeasured", 8)
    queued = make_history(0.0, prefills=8, queued=100)
    assert decide(queued).held


def test_counters_that_went_back_are_no_demand() -> None:
    history = make_history(3.0)
    fleet = history.snapshots[-1]
    assert fleet.counters is not None
    restarted = replace(fleet, at=fleet.at + 5, counters=replace(fleet.counters, requests=3, prompt_tokens=9))
    after = history.observe(restarted)
    assert plan(SPEC, restarted, after, restarted.at).held


@pytest.mark.parametrize(("seed", "load"), [(0, 2.5), (0, 4.0), (1, 2.5), (2, 6.0), (3, 1.0), (4, 1.7)])
def test_no_reversal_under_steady_noisy_load(seed: int, load: float) -> None:
    """Half an hour, the first five minutes left out: at most one change of direction in any ten minutes."""
    for changes in run_steady(seed, load).values():
        turned = [at for (_, one), (at, other) in pairwise(changes) if one != other]
        assert all(later - at > 600 for at, later in pairwise(turned))


def test_what_steps_take_is_remembered_under_steady_load() -> None:
    """Decode comes down and stays there: steps at other contexts than now's are not forgotten."""
    turned = [run_steady(seed, load)[D] for seed, load in ((0, 1.7), (1, 6.0), (1, 1.0), (5, 1.7))]
    assert all(one == other for changes in turned for (_, one), (_, other) in pairwise(changes))


def run_steady(seed: int, load: float) -> dict[Role, list[tuple[float, int]]]:
    """Poisson arrivals of unequal prompts; when, and in which direction, each role's replicas changed."""
    chance = random.Random(seed)
    scaler = Autoscaler(SPEC)
    replicas = {P: 4, D: 2}
    requests = tokens = 0
    squares = 0.0
    signs: dict[Role, list[tuple[float, int]]] = {P: [], D: []}
    for step in range(360):
        now = step * 5.0
        due = 4.0 * load * 5
        for _ in range(max(0, round(chance.gauss(due, due**0.5)))):
            prompt = int(chance.lognormvariate(8.0, 0.9))
            requests, tokens, squares = requests + 1, tokens + prompt, squares + prompt * prompt
        context = 12_000.0 * load * chance.uniform(0.8, 1.2)
        snapshot = Snapshot(
            at=now,
            roles={
                P: RoleState(
                    replicas=replicas[P], ready=replicas[P], busy=0.5,
                    tokens_per_second=1e4 * chance.uniform(0.95, 1.05),
                ),
                D: RoleState(
                    replicas=replicas[D], ready=replicas[D], kv_tokens_used=int(context),
                    kv_tokens_total=replicas[D] * KV, step_seconds=0.006 + 8e-8 * context / replicas[D],
                ),
            },
            counters=Counters(
                requests=requests, prompt_tokens=tokens, prompt_squares=squares, computed_prompt_tokens=tokens,
                computed_tokens=int(tokens * 0.7), finished=requests, output_tokens=requests * 300,
            ),
        )  # fmt: skip
        wanted = dict(scaler.decide(now, snapshot))
        for role, count in wanted.items():
            if count != replicas[role] and now >= 300:
                signs[role].append((now, 1 if count > replicas[role] else -1))
        replicas = wanted or replicas
    return signs


def test_answers_that_run_on_while_nothing_comes_keep_their_room() -> None:
    history = make_history(4.0, prefills=4, decodes=8)
    last = history.snapshots[-1]

    def wait(context: int) -> Decision:
        """The last decision after 25 minutes in which no request came and so much context was held."""
        decision, seen = Decision(at=0.0, roles={}), history
        for step in range(1, 300):
            roles = {P: last.roles[P], D: replace(last.roles[D], running_requests=800, kv_tokens_used=context)}
            seen = seen.observe(replace(last, at=last.at + 5 * step, roles=roles))
            decision = decide(seen)
            seen = seen.record(decision)
        return decision

    assert wait(0).replicas == {P: 2, D: 4}
    assert wait(int(0.6 * 8 * KV)).replicas[D] >= 6, "half of them would not hold it"
    assert wait(int(0.9 * 8 * KV)).replicas == {P: 2, D: 8}
