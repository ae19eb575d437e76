"""The formulas against simulation and by hand."""

from __future__ import annotations

import random
from heapq import heapreplace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import RoleSpec, ScalingSpec, Target, Tuning
from tandem_operator.autoscale.plan.joint import Proposal, limit_budget, limit_ratio
from tandem_operator.autoscale.plan.rates import estimate_rate
from tandem_operator.autoscale.plan.sizing import Prompts, StepModel, find_room, fit_steps, size_decode, size_prefill

P, D = Role.PREFILL, Role.DECODE
PROMPTS = Prompts(tokens=4000, uncached=4000, squares=2 * 4000**2)
TTFT = Target(percentile=0.95, seconds=2.0)


def share_in_time(rate: float, replicas: int, velocity: float, target: Target, seed: int = 1) -> float:
    """One queue before so many servers, exponential work."""
    chance = random.Random(seed)
    free = [0.0] * replicas
    now = 0.0
    good = count = 0
    for number in range(40_000):
        now += chance.expovariate(rate / PROMPTS.uncached)
        tokens = chance.expovariate(1 / PROMPTS.uncached)
        first = max(now, free[0]) + tokens / velocity
        heapreplace(free, first)
        if number > 2000:
            count += 1
            good += max(now, first - tokens / velocity) - now <= target.limit(tokens) - PROMPTS.uncached / velocity
    return good / count


@pytest.mark.parametrize("rate", [8e3, 4e4, 1.5e5])
def test_so_many_meet_the_target_and_one_fewer_hardly(rate: float) -> None:
    replicas = size_prefill(rate, PROMPTS, 1e4, TTFT)
    assert share_in_time(rate, replicas, 1e4, TTFT) >= 0.94
    assert replicas == 1 or share_in_time(rate, replicas - 1, 1e4, TTFT) < 0.97


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e6), st.floats(1, 3), st.floats(1e3, 1e5))
def test_more_tokens_never_take_fewer(rate: float, more: float, velocity: float) -> None:
    replicas = size_prefill(rate, PROMPTS, velocity, TTFT)
    assert size_prefill(rate * more, PROMPTS, velocity, TTFT) >= replicas
    assert replicas * velocity >= rate


def test_steps_are_fitted_and_samples_that_are_alike_are_met_with_caution() -> None:
    line = [(context, 0.006 + 8e-8 * context) for context in range(10_000, 300_000, 10_000)]
    model = fit_steps(line)
    assert model is not None
    assert model.base == pytest.approx(0.006, rel=0.1)
    assert model.slope == pytest.approx(8e-8, rel=0.05)
    alike = fit_steps([(50_000.0, 0.01)] * 20)
    assert alike is not None
    assert alike.context_at(0.03) == pytest.approx(250_000)
    assert fit_steps([]) is None


def test_the_tighter_of_step_time_and_memory_bounds_a_batch() -> None:
    model = StepModel(base=0.006, slope=8e-8)
    assert find_room(model, 1e6, Target(seconds=0.03)).limit == "TPOT target"
    room = find_room(model, 1e5, Target(seconds=0.03))
    assert room.limit == "KV blocks"
    assert size_decode(2.5 * room.context, room) == 3


def points_of(rates: list[float]) -> list[tuple[float, float]]:
    total = 0.0
    points = [(0.0, 0.0)]
    for step, rate in enumerate(rates):
        total += 5 * rate
        points.append((5.0 * (step + 1), total))
    return points


def test_a_ramp_is_followed_ahead_and_a_plain_mean_lags() -> None:
    ramp = points_of([100 + step for step in range(60)])
    with_trend = estimate_rate(ramp, 10.0, 50.0, Tuning())
    without = estimate_rate(ramp, 10.0, 50.0, Tuning(trend=False))
    assert with_trend is not None
    assert without is not None
    assert with_trend.now == pytest.approx(159.5, rel=0.02)
    assert with_trend.ahead == pytest.approx(169.5, rel=0.02)
    assert without.now < 150


def test_steady_demand_has_no_trend_and_no_jump() -> None:
    chance = random.Random(5)
    for _ in range(50):
        rate = estimate_rate(points_of([chance.gauss(100, 20**0.5) for _ in range(60)]), 100.0, 50.0, Tuning())
        assert rate is not None
        assert not rate.jumped
        assert rate.ahead == pytest.approx(100, abs=12)


def proposal(prefill: int, decode: int) -> dict[Role, Proposal]:
    return {P: Proposal(replicas=prefill, limit=""), D: Proposal(replicas=decode, limit="")}


def spec(budget: int | None = None, *, low: float = 0.0, high: float = float("inf"), gpus: int = 1) -> ScalingSpec:
    return ScalingSpec(
        roles={P: RoleSpec(max=50), D: RoleSpec(max=50, gpus=gpus)}, ttft=TTFT, tpot=TTFT, gpu_budget=budget,
        min_ratio=low, max_ratio=high,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "budget", "gpus", "got"),
    [((10, 5), 15, 1, (10, 5)), ((10, 5), 9, 1, (6, 3)), ((10, 10), 12, 2, (4, 4)), ((30, 1), 4, 1, (3, 1))],
)
def test_a_budget_is_shared_in_proportion(
    wanted: tuple[int, int], budget: int, gpus: int, got: tuple[int, int]
) -> None:
    result = limit_budget(proposal(*wanted), spec(budget, gpus=gpus))
    assert (result[P].replicas, result[D].replicas) == got


def test_a_ratio_raises_the_scarce_role() -> None:
    result = limit_ratio(proposal(9, 2), spec(high=3.0))
    assert (result[P].replicas, result[D].replicas, result[D].limit) == (9, 3, "role ratio")
    result = limit_ratio(proposal(1, 4), spec(low=0.5))
    assert (result[P].replicas, result[D].replicas) == (2, 4)


def test_a_spec_that_no_number_meets_is_refused() -> None:
    with pytest.raises(ValueError, match="raise it to 2"):
        spec(1)
