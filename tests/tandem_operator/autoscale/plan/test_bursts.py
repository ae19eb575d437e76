"""Bursts are found where they were, and those that a start outlasts are left out of demand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_operator.autoscale.plan.bursts import Burst, find_bursts, find_passing


def count(*parts: tuple[float, float]) -> list[tuple[float, float]]:
    """Totals every 5 s, of so many seconds at so many requests per second each."""
    points, total = [(0.0, 0.0)], 0.0
    for seconds, rate in parts:
        for _ in range(int(seconds / 5)):
            total += 5 * rate
            points.append((points[-1][0] + 5.0, total))
    return points


def repeat(times: int, last: float, *, high: float = 20.0, every: float = 600.0) -> list[tuple[float, float]]:
    return [(every - last, 4.0), (last, high)] * times


def judge(parts: Sequence[tuple[float, float]], start: float) -> float | None:
    """The length of bursts that nothing is ordered for; None where there are none."""
    bursts, counted = find_bursts(count(*parts))
    passing = find_passing(bursts, start, counted)
    return None if passing is None else passing.longest


def test_bursts_are_where_they_were() -> None:
    bursts, counted = find_bursts(count(*repeat(3, 120.0), (60.0, 4.0)))
    assert [(one.begin, one.end, one.over) for one in bursts] == [
        (480.0, 600.0, True), (1080.0, 1200.0, True), (1680.0, 1800.0, True)
    ]  # fmt: skip
    assert [round(one.growth) for one in bursts] == [16, 16, 16]
    assert counted == 1860.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 50), min_size=20, max_size=300))
def test_bursts_are_apart_in_order_and_of_the_past(rates: list[float]) -> None:
    points = count(*((5.0, rate) for rate in rates))
    bursts, counted = find_bursts(points)
    assert counted <= points[-1][0]
    assert all(0 <= one.begin < one.end <= points[-1][0] and one.growth > 0 for one in bursts)
    assert all(before.over and before.end <= after.begin for before, after in pairwise(bursts))


@pytest.mark.parametrize(
    ("parts", "start", "expected"),
    [
        (repeat(2, 120.0), 300.0, None),  # the second one is not over
        ([*repeat(2, 120.0), (60.0, 4.0)], 300.0, 120.0),
        ([*repeat(2, 120.0), (60.0, 4.0)], 45.0, None),  # of use for most of a burst
        ([*repeat(2, 900.0, every=1800.0), (60.0, 4.0)], 300.0, None),
        ([(480.0, 4.0), (120.0, 20.0), (60.0, 4.0)], 300.0, None),  # a single one tells nothing
        ([*repeat(2, 120.0), (480.0, 4.0), (100.0, 20.0)], 300.0, 120.0),
        ([*repeat(2, 120.0), (480.0, 4.0), (200.0, 20.0)], 300.0, 120.0),  # those before stay left out, this one not
        ([*repeat(2, 120.0), (480.0, 4.0), (100.0, 80.0)], 300.0, None),  # higher than those by far
        ([*repeat(2, 120.0), (480.0, 4.0), (80.0, 20.0)], 45.0, 120.0),  # what is left of this one
        ([(3600.0, 4.0)], 300.0, None),
        ([(600.0, 4.0), *((60.0, 4.0 + step / 2) for step in range(15))], 300.0, None),  # a rise
    ],
)  # fmt: skip
def test_nothing_is_ordered_for_what_is_over_before_it_comes(
    parts: list[tuple[float, float]], start: float, expected: float | None
) -> None:
    assert judge(parts, start) == expected


def test_what_lasts_longer_than_those_before_is_demand() -> None:
    bursts, counted = find_bursts(count(*repeat(2, 120.0), (480.0, 4.0), (200.0, 20.0)))
    passing = find_passing(bursts, 300.0, counted)
    assert passing is not None
    assert not passing.present
    assert [one.begin for one in passing.cut] == [480.0, 1080.0]
    assert bursts[-1] == Burst(begin=1680.0, end=1880.0, growth=bursts[-1].growth, over=False)
