"""Demand from counters: what is a jump and what is chance, and over how long a mean is taken."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_operator.autoscale.plan import rates
from tandem_operator.autoscale.plan.contract import Tuning
from tandem_operator.autoscale.plan.rates import Point, estimate_rate, find_jump, measure_dispersion

LOOK = 5.0


def points_of(counts: Sequence[float]) -> list[Point]:
    """Totals every five seconds."""
    points, total = [(0.0, 0.0)], 0.0
    for step, count in enumerate(counts):
        total += count
        points.append((LOOK * (step + 1), total))
    return points


def draw(chance: random.Random, mean: float) -> int:
    """A Poisson number, after Knuth."""
    limit, count, product = exp(-mean), 0, chance.random()
    while product > limit:
        count, product = count + 1, product * chance.random()
    return count


def count_alarms(draw_one: Callable[[], float], looks: int) -> int:
    """In so many looks at the last 15 minutes."""
    points = points_of([draw_one() for _ in range(looks)])
    return sum(find_jump(points[max(0, end - 180) : end]) is not None for end in range(30, looks))


@pytest.mark.parametrize(
    ("mean", "last", "jumps"),
    [
        (16, [16, 40], False),  # a burst of five seconds, as in a production trace of 3.4 requests/s
        (16, [40, 16], False),  # and when it is over
        (16, [16, 16], False),
        (16, [40, 60], True),
        (16, [48, 48], True),
        (0.5, [2, 2], False),  # eight times the mean, of a handful of requests
        (0.5, [6, 6], True),
        (400, [480, 500], False),  # as sure as can be, and less than a third more
        (400, [560, 560], True),
    ],
)
def test_a_jump_stands_out_of_chance_in_both_halves(mean: float, last: list[float], jumps: bool) -> None:
    assert (find_jump(points_of([mean] * 60 + last)) is not None) == jumps


@pytest.mark.parametrize("mean", [0.3, 2.0, 17.0, 60.0])
def test_steady_arrivals_hardly_ever_look_like_a_jump(mean: float) -> None:
    chance = random.Random(round(10 * mean))
    assert count_alarms(lambda: draw(chance, mean), 3600) <= 4


def test_clumped_arrivals_are_judged_by_their_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six requests at a time: six times the variance, which alarms a test for single ones."""
    chance = random.Random(2)
    clumps = [6.0 * draw(chance, 3) for _ in range(3600)]
    assert measure_dispersion(points_of(clumps[:180]), 10.0) == pytest.approx(6, rel=0.5)
    judged = count_alarms(iter(clumps).__next__, 3600)
    monkeypatch.setattr(rates, "measure_dispersion", lambda *_: 1.0)
    assert count_alarms(iter(clumps).__next__, 3600) > 10 * judged


@pytest.mark.parametrize(("mean", "factor"), [(10.0, 5.0), (30.0, 3.0), (100.0, 2.0)])
def test_a_jump_is_seen_within_ten_seconds(mean: float, factor: float) -> None:
    chance = random.Random(3)
    for _ in range(20):
        points = points_of([draw(chance, mean) for _ in range(60)] + [draw(chance, factor * mean) for _ in range(2)])
        jump = find_jump(points)
        assert jump is not None
        assert jump.rate == pytest.approx(factor * mean / LOOK, rel=0.5)


@given(st.floats(0.1, 200), st.floats(0.1, 200))
def test_slow_changes_are_not_taken_for_noise(first: float, last: float) -> None:
    ramp = [first + (last - first) * step / 180 for step in range(180)]
    assert measure_dispersion(points_of(ramp), 10.0) <= 1 + (last - first) ** 2 / 180 / min(first, last)


def test_a_steady_mean_is_taken_over_all_that_is_known() -> None:
    rate = estimate_rate(points_of([50.0] * 200), 10.0, 50.0, Tuning())
    short = estimate_rate(points_of([50.0] * 200), 10.0, 50.0, Tuning(steady=False))
    assert rate is not None
    assert short is not None
    assert (rate.now, short.now) == (10.0, 10.0)
    assert rate.deviation == pytest.approx(sqrt(10 / 900))
    assert short.deviation == pytest.approx(sqrt(10 / 120))


def test_a_changed_mean_is_of_the_time_since() -> None:
    """Half as much again since two minutes: too little for a jump by now, and older counts say nothing any more."""
    rate = estimate_rate(points_of([50.0] * 160 + [75.0] * 24), 10.0, 50.0, Tuning(trend=False, jump=False))
    assert rate is not None
    assert rate.now == pytest.approx(15.0)
    assert rate.deviation == pytest.approx(sqrt(10 / 120))


def test_the_mean_of_steady_demand_is_the_surer_the_longer_it_lasts() -> None:
    chance = random.Random(7)
    errors: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(60):
        points = points_of([draw(chance, 20) for _ in range(200)])
        for steady, found in errors.items():
            rate = estimate_rate(points, 4.0, 50.0, Tuning(steady=steady, trend=False))
            assert rate is not None
            found.append((rate.now - 4.0) ** 2)
    assert 3 * sum(errors[True]) < sum(errors[False])
