"""What gateways report, added up: totals that only grow, samples that are fresh, and nothing made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tandem_api.fleet import TTFT_BOUNDS, FleetReport, Traffic, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import MOST, WorkerTelemetry
from tandem_operator.autoscale.plan.contract import Counters, RoleDecision, RoleSpec, RoleState, ScalingSpec, Target
from tandem_operator.autoscale.plan.contract import Decision as Decided
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.peers import MOST_APART
from tandem_operator.autoscale.plan.planner import plan
from tandem_operator.autoscale.plan.sizing import MOST_REPLICAS
from tandem_operator.autoscale.plan.slo import Measured, judge, measure
from tandem_operator.autoscale.plan.snapshots import STALE_SECONDS, Heard, RoleCount, Totals, add_up, take_snapshot
from tandem_operator.autoscale.plan.temper import Circumstances, temper

P, D = Role.PREFILL, Role.DECODE
BUCKETS = len(TTFT_BOUNDS) + 1


def telemetry(pod: str, role: Role = P, **figures: Any) -> WorkerTelemetry:
    told: dict[str, Any] = {
        "draining": False, "running_requests": 0, "queued_requests": 0, "running_tokens": 0,
        "queued_prefill_tokens": 0, "kv_blocks_used": 0, "kv_blocks_cached": 0, "kv_blocks_total": 100,
        "kv_eviction_horizon": 0.0,
    }  # fmt: skip
    return WorkerTelemetry(model_name="m", role=role, revision="r", pod=pod, **(told | figures))


def worker(name: str, role: Role = P, age: float | None = 0.0, ttft: Any = (), **figures: Any) -> WorkerReport:
    return WorkerReport(
        name=name, address="10.0.0.1:8000", role=role, revision="r", state="Admitted", ttft_counts=list(ttft),
        telemetry=telemetry(name, role, **figures), telemetry_age=age,
    )  # fmt: skip


def heard(gateway: str, *workers: WorkerReport, age: float = 0.0, started: float = 100.0, **traffic: Any) -> Heard:
    told = None if traffic.get("none") else Traffic(**traffic)
    report = FleetReport(gateway=gateway, started_at=started, at=0.0, workers=list(workers), traffic=told)
    return Heard(report=report, age=age)


def counts(**leaders: list[str]) -> dict[Role, RoleCount]:
    return {Role(role): RoleCount(replicas=len(found) + 1, leaders=frozenset(found)) for role, found in leaders.items()}


def test_roles_are_summed_over_their_ready_workers() -> None:
    workers = [
        worker("p-0", queued_prefill_tokens=100, queued_requests=1, prefill_tokens_per_second=1000.0),
        worker("p-1", queued_prefill_tokens=50, prefill_tokens_per_second=3000.0),
        worker("p-2", queued_prefill_tokens=999, prefill_tokens_per_second=9.0),
        worker("d-0", D, running_requests=2, running_tokens=300, decode_step_seconds=0.02),
        worker("d-1", D, decode_step_seconds=0.5, kv_block_size=32),
    ]
    seen = take_snapshot(
        [heard("a", *workers, waiting_tokens=7, waiting_requests=2), heard("b")],
        counts(prefill=["p-0", "p-1"], decode=["d-0", "d-1"]), Totals(since=0.0), now=50.0,
    )  # fmt: skip
    assert seen is not None
    prefill, decode = seen.roles[P], seen.roles[D]
    assert (prefill.replicas, prefill.ready, prefill.warming) == (3, 2, 1)
    assert (prefill.queued_tokens, prefill.queued_requests, prefill.tokens_per_second) == (157, 3, 2000.0)
    assert (decode.running_requests, decode.kv_tokens_used, decode.kv_tokens_total) == (2, 300, 4800)
    assert decode.step_seconds == 0.02, "a step that a worker took long ago says nothing"
    assert (prefill.busy, decode.transfer_share) == (None, None), "nobody measures it"


def test_what_waits_is_of_those_that_compute_prompts() -> None:
    """Without prefill workers, decode workers do."""
    workers = [
        worker("d-0", Role.UNIFIED, running_requests=1, mixed_step_seconds=0.1, queued_prefill_tokens=30),
        worker("d-1", Role.UNIFIED, running_requests=1, mixed_step_seconds=0.3, queued_requests=1),
        worker("d-2", Role.UNIFIED, mixed_step_seconds=9.0, prefill_tokens_per_second=1000.0),
    ]
    seen = take_snapshot(
        [heard("a", *workers, waiting_tokens=7, waiting_requests=2)], counts(decode=["d-0", "d-1", "d-2"]),
        Totals(since=0.0), now=50.0,
    )  # fmt: skip
    assert seen is not None
    both = seen.roles[D]
    assert (both.queued_tokens, both.queued_requests, both.tokens_per_second) == (37, 3, 1000.0)
    assert both.mixed_step_seconds == pytest.approx(0.2), "of those that decode"


def decoding(*steps: float, **more: Any) -> RoleState:
    """Decode replicas whose steps take so long."""
    workers = [worker(f"d-{n}", D, running_requests=1, decode_step_seconds=s, **more) for n, s in enumerate(steps)]
    names = counts(decode=[one.name for one in workers], prefill=[])
    seen = take_snapshot([heard("a", *workers)], names, Totals(since=0.0), now=0.0)
    assert seen is not None
    return seen.roles[D]


def test_a_step_that_makes_several_tokens_of_an_answer_is_so_many_token_times() -> None:
    assert decoding(0.03, decode_tokens_per_step=1.5).step_seconds == pytest.approx(0.02)
    assert decoding(0.03).step_seconds == pytest.approx(0.03)


def test_the_time_of_a_token_is_taken_as_it_is_told_beside_prompts_too() -> None:
    """Else a prompt beside answers whose guesses are right would seem to hold them up for several tokens."""
    told = {"decode_token_seconds": 0.012, "decode_tokens_per_step": 3.0, "mixed_step_seconds": 0.06}
    found = decoding(0.03, **told, mixed_token_seconds=0.02)
    assert (found.step_seconds, found.mixed_step_seconds) == (pytest.approx(0.012), pytest.approx(0.02))
    assert decoding(0.03, mixed_step_seconds=0.06).mixed_step_seconds == pytest.approx(0.06)


@pytest.mark.parametrize("told", [2.0, 1e8, 2e-4, 1e-6])
def test_what_most_workers_agree_on_counts_and_who_differs_is_named(told: float) -> None:
    found = decoding(0.019, told, 0.021, 0.02)
    assert found.step_seconds == pytest.approx(0.02)
    assert found.odd == ("d-1",)
    assert found.mean_step_seconds == pytest.approx((0.06 + told) / 4), "clients of that one may really wait so long"


def test_unequal_workers_are_no_odd_ones() -> None:
    found = decoding(0.01, 0.02, 0.035)
    assert found.step_seconds == found.mean_step_seconds == pytest.approx(0.065 / 3)
    assert found.odd == ()


@pytest.mark.parametrize("steps", [(0.02, 2.0), (0.02, 0.02, 2.0, 2.0)])
def test_without_a_majority_nobody_knows_who_is_right(steps: tuple[float, ...]) -> None:
    found = decoding(*steps)
    assert found.step_seconds == found.mean_step_seconds == pytest.approx(1.01)
    assert found.odd == ()


def test_velocities_and_mixed_steps_are_judged_alike() -> None:
    names = ["d-0", "d-1", "d-2"]
    workers = [
        worker("d-0", Role.UNIFIED, running_requests=1, mixed_step_seconds=0.1, prefill_tokens_per_second=900.0),
        worker("d-1", Role.UNIFIED, running_requests=1, mixed_step_seconds=0.1, prefill_tokens_per_second=9.0),
        worker("d-2", Role.UNIFIED, running_requests=1, mixed_step_seconds=99.0, prefill_tokens_per_second=1100.0),
    ]
    seen = take_snapshot([heard("a", *workers)], counts(decode=names), Totals(since=0.0), now=0.0)
    assert seen is not None
    both = seen.roles[D]
    assert (both.mixed_step_seconds, both.tokens_per_second) == (pytest.approx(0.1), pytest.approx(1000.0))
    assert both.odd == ("d-1", "d-2")


HONEST = st.floats(0.01, 0.03)
LIE = st.sampled_from([1e-6, 1e-3, 0.05, 1.0, 100.0, 1e9]) | st.floats(1e-6, 1e9)


@given(st.lists(HONEST, min_size=2, max_size=9), st.data())
def test_less_than_half_of_the_workers_cannot_move_what_the_planner_sees_far(honest: list[float], data: Any) -> None:
    lies = data.draw(st.lists(LIE, min_size=1, max_size=len(honest) - 1))
    told = data.draw(st.permutations(honest + lies))
    step = decoding(*told).step_seconds
    assert step is not None
    assert min(honest) / MOST_APART <= step <= max(honest) * MOST_APART


@given(st.lists(HONEST, min_size=1, max_size=9))
def test_workers_that_are_alike_are_averaged(honest: list[float]) -> None:
    found = decoding(*honest)
    assert found.step_seconds == found.mean_step_seconds == pytest.approx(sum(honest) / len(honest))
    assert found.odd == ()


def test_of_several_samples_the_freshest_counts_and_stale_ones_do_not() -> None:
    old, new = worker("p-0", age=20.0, queued_prefill_tokens=1), worker("p-0", age=5.0, queued_prefill_tokens=2)
    stale, untold = worker("p-1", age=STALE_SECONDS - 1, prefill_tokens_per_second=1.0), worker("p-2", age=None)
    seen = take_snapshot(
        [heard("a", old, stale, age=1.5), heard("b", new, untold, age=8.0)],
        counts(prefill=["p-0", "p-1", "p-2"]), Totals(since=0.0), now=50.0,
    )  # fmt: skip
    assert seen is not None
    assert (seen.roles[P].queued_tokens, seen.roles[P].tokens_per_second) == (2, None)
    assert seen.at == 42.0, "as old as the oldest report"


@pytest.mark.parametrize("traffic", [{"none": True}, {"prompt_squares": float("inf")}])
def test_a_gateway_that_does_not_tell_leaves_demand_unknown(traffic: dict[str, Any]) -> None:
    both = [heard("a", requests=5), heard("b", **traffic)]
    seen = take_snapshot(both, {}, add_up(Totals(since=0.0), both, now=0.0), now=0.0)
    assert seen is not None
    assert seen.counters is None
    assert take_snapshot([], {}, Totals(since=0.0), now=0.0) is None


def test_of_a_gateway_that_was_there_before_only_what_is_new_counts() -> None:
    totals = Totals(since=1000.0)
    for requests in (700, 705):
        totals = add_up(
            totals, [heard("old", worker("d-0", D, ttft=[requests] * BUCKETS), requests=requests)], now=500.0
        )
    assert (totals.counters.requests, sum(totals.ttft_counts)) == (5, 5 * BUCKETS)
    totals = add_up(totals, [heard("new", started=1001.0, requests=3)], now=500.0)
    assert totals.counters.requests == 8


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_clock_that_is_an_hour_off_makes_no_old_requests_new(ahead: float) -> None:
    """The operator began to look 50 s ago, by a clock that has nothing to do with those of gateways."""
    old, new = (
        Heard(report=FleetReport(gateway=name, started_at=ahead + 9000 - lived, at=ahead + 9000, traffic=told), age=2.0)
        for name, lived, told in (("old", 1800, Traffic(requests=700)), ("new", 30, Traffic(requests=3)))
    )
    assert add_up(Totals(since=7.0), [old, new], now=57.0).counters.requests == 3


def test_the_share_that_is_cached_is_known_where_no_answer_tells_its_usage() -> None:
    totals = Totals(since=0.0)
    for total, cached in ((1000, 900), (1400, 1000), (20, 5), (120, 30)):
        told = worker("d-0", D, prompt_tokens_total=total, cached_prompt_tokens_total=cached)
        prefill = worker("p-0", P, prompt_tokens_total=9 * total, cached_prompt_tokens_total=0)
        totals = add_up(totals, [heard("a", told, prefill), heard("b", told)], now=0.0)
    counters = totals.counters
    assert (counters.computed_prompt_tokens, counters.computed_tokens) == (400 + 100, 300 + 75)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_totals_only_grow_and_miss_nothing_whatever_becomes_of_gateways(seed: int) -> None:
    """Gateways restart, go, come and are not heard for a while."""
    chance, totals, truth = random.Random(seed), Totals(since=0.0), 0
    live: dict[str, tuple[float, int]] = {}
    before = totals.counters
    for step in range(60):
        name = f"g-{chance.randrange(4)}"
        match chance.randrange(6):
            case 0:
                live[name] = (float(step + 1), 0)
            case 1 if name in live:
                totals = add_up(totals, [heard(name, started=live[name][0], requests=live[name][1])], now=0.0)
                del live[name]
            case _ if name in live:
                more = chance.randrange(20)
                live[name], truth = (live[name][0], live[name][1] + more), truth + more
                totals = add_up(totals, [heard(name, started=live[name][0], requests=live[name][1])], now=0.0)
            case _:
                pass
        assert all(getattr(totals.counters, f.name) >= getattr(before, f.name) for f in fields(Counters))
        before = totals.counters
    assert totals.counters.requests == truth


def decided(prefill: tuple[int, int], decode: tuple[int, int]) -> Decided:
    roles = {
        role: RoleDecision(observed=before, replicas=after, required=after, limit="TTFT target")
        for role, (before, after) in ((P, prefill), (D, decode))
    }
    return Decided(at=0.0, roles=roles)


SPEC = ScalingSpec(
    roles={P: RoleSpec(max=50), D: RoleSpec(max=50)}, ttft=Target(seconds=1.0), tpot=Target(seconds=0.1), gpu_budget=40
)
COUNT = st.integers(1, 20)


@given(COUNT, COUNT, COUNT, COUNT, st.booleans(), st.integers(0, 20), st.sets(st.sampled_from([P, D])))
def test_what_is_tempered_takes_nothing_that_serves_and_keeps_the_budget(
    p: int, to_p: int, d: int, to_d: int, rolling: bool, steady: int, followed: set[Role]
) -> None:
    circumstances = Circumstances(followed=frozenset(followed), rolling=rolling, steady={P: steady, D: steady})
    found = temper(SPEC, decided((p, to_p), (d, to_d)), circumstances)
    assert found.roles.keys() == followed
    for role, one in found.roles.items():
        asked = {P: to_p, D: to_d}[role]
        assert one.replicas in (one.observed, asked)
        if one.replicas < one.observed:
            assert not rolling
            assert one.replicas <= steady
        if asked < one.observed == one.replicas:
            assert one.limit in ("rollout", "readiness")
    whole = {P: p, D: d} | found.replicas
    assert sum(whole.values()) <= max(40, p + d)


FAST, SLOW = [0, 0, 0, 0, 40, *[0] * (BUCKETS - 5)], [0, 0, 0, 0, 10, 30, *[0] * (BUCKETS - 6)]
"""All within 0.5 to 1 s; most of them within 1 to 2 s."""


@pytest.mark.parametrize(
    ("times", "step", "seconds", "met", "reason"),
    [
        (FAST, 0.01, 1.0, True, "TargetsMet"),
        (FAST, 0.2, 1.0, False, "TPOTMissed"),
        (SLOW, 0.01, 1.0, False, "TTFTMissed"),
        (SLOW, 0.01, 1.5, None, "BetweenBounds"),
        (SLOW, 0.2, 1.5, False, "TPOTMissed"),
        (SLOW, 0.01, 2.0, True, "TargetsMet"),
        ([1], 0.01, 1.0, None, "TooFewStreams"),
        (FAST, None, 1.0, None, "NothingDecoded"),
    ],
)
def test_targets_count_as_met_only_where_that_is_measured(
    times: list[int], step: float | None, seconds: float, met: bool | None, reason: str
) -> None:
    measured = Measured(ttft_counts=times, prompt_tokens=100.0, step_seconds=step)
    found = judge(Target(seconds=seconds), Target(seconds=0.1), measured)
    assert (found.met, found.reason) == (met, reason)


def test_longer_prompts_may_take_longer() -> None:
    measured = Measured(ttft_counts=SLOW, prompt_tokens=5000.0, step_seconds=0.01)
    assert judge(Target(seconds=1.0, seconds_per_token=2e-4), Target(seconds=0.1), measured).met


EXTREME_COUNT = st.sampled_from([0, 1, 7, 1000, 10**9, 2**53, MOST])
EXTREME_AMOUNT = st.sampled_from([0.0, 5e-324, 1e-300, 1e-7, 1e-3, 1.0, 1e4, 1e10, float(2**62)])
COUNTED = (
    "running_requests", "queued_requests", "running_tokens", "queued_prefill_tokens", "kv_blocks_total",
    "prompt_tokens_total", "cached_prompt_tokens_total",
)  # fmt: skip
MEASURED = ("prefill_tokens_per_second", "decode_step_seconds", "busy_seconds_total", "kv_transfer_seconds_total")
SAMPLES = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(COUNTED, EXTREME_COUNT)
    | dict.fromkeys(MEASURED, EXTREME_AMOUNT)
    | {"kv_block_size": st.sampled_from([1, 16, MOST])},
)
TRAFFIC = st.fixed_dictionaries(
    {},
    optional={f.name: EXTREME_COUNT for f in fields(Counters) if f.name != "prompt_squares"}
    | {"waiting_tokens": EXTREME_COUNT, "prompt_squares": EXTREME_AMOUNT | st.sampled_from([1e29, 1e308])},
)


def follow(
    totals: Totals, history: History, steps: range, told: Sequence[tuple[dict[str, Any], ...]]
) -> tuple[Totals, History]:
    """So many steps in which workers and gateways say what is `told` by turns, beside what is ordinary."""
    ordinary: dict[str, Any] = {
        "prefill_tokens_per_second": 1000.0, "running_requests": 1, "running_tokens": 100, "decode_step_seconds": 0.02,
    }  # fmt: skip
    for step in steps:
        at, n = 5.0 * step, 30 * step
        prefill, decode, traffic = told[step % len(told)]
        traffic = {f.name: 100 * n for f in fields(Counters)} | {"requests": n, "finished": n} | traffic
        seen = [heard("g", worker("p-0", **ordinary | prefill), worker("d-0", D, **ordinary | decode), **traffic)]
        totals = add_up(totals, seen, now=0.0)
        snapshot = take_snapshot(seen, counts(prefill=["p-0"], decode=["d-0"]), totals, now=at)
        assert snapshot is not None
        history = history.observe(snapshot)
        decision = plan(SPEC, snapshot, history, at)
        history = history.record(decision)
        assert all(0 <= one.required <= MOST_REPLICAS for one in decision.roles.values())
        assert all(1 <= count <= 50 for count in decision.replicas.values())
        assert len(decision.sentence) < 2000
        measure([(one, totals.ttft_counts) for one in history.snapshots])
    return totals, history


@cache
def ordinary_past() -> tuple[Totals, History]:
    return follow(Totals(since=0.0), History(), range(40), [({}, {}, {})])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SAMPLES, SAMPLES, TRAFFIC), min_size=1, max_size=6))
def test_no_figure_that_the_types_let_through_stops_the_planner(told: list[Any]) -> None:
    """A worker or a gateway with a defect says anything: replicas stay within their bounds, and words short."""
    follow(*ordinary_past(), range(40, 60), told)


@pytest.mark.parametrize(
    "figures", [{"kv_blocks_total": 10**400}, {"decode_step_seconds": 1e300}, {"running_tokens": -1},
                {"prefill_tokens_per_second": float("nan")}, {"busy_seconds_total": float("inf")}],
)  # fmt: skip
def test_figures_that_cannot_be_are_no_sample(figures: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        telemetry("p-0", **figures)
