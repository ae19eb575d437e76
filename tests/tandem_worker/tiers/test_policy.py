"""What is loaded, cut and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.tiers.policy import (
    DAY_SECONDS,
    GRACE_SECONDS,
    UNKNOWN_SECONDS,
    WriteBudget,
    cut_after,
    is_slow,
    is_sooner,
    plan_batch,
    plan_limit,
    plan_pieces,
    plan_segment_bytes,
    predict_seconds,
)


@pytest.mark.parametrize(
    ("seconds", "per_block", "expected"),
    [(0.9, 0.1, True), (1.0, 0.1, False), (1.1, 0.1, False), (9.0, None, True), (0.0, 1e-9, True)],
)
def test_the_sooner_way_is_taken(seconds: float, per_block: float | None, expected: bool) -> None:
    assert is_sooner(seconds, 10, per_block) is expected


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=40),
    st.floats(1e-4, 1.0),
)
def test_no_request_is_later_than_computing_by_more_than_a_tenth(arrivals: list[float], per_block: float) -> None:
    """Blocks arrive at any times whatever; the load is cut at the first moment the rule says so."""
    count, now, valid = len(arrivals), 0.0, 0
    for pause in arrivals:
        if now + pause > cut_after(valid, count, per_block):
            now = cut_after(valid, count, per_block)
            break
        now += pause
        valid += 1
    grace = max(GRACE_SECONDS, 0.1 * count * per_block)
    assert now + (count - valid) * per_block <= count * per_block + grace + 1e-9


@given(st.integers(1, 500), st.floats(1e-3, 1.0), st.floats(0.01, 0.99))
def test_a_load_that_is_faster_than_computing_is_never_cut(count: int, per_block: float, share: float) -> None:
    for valid in range(count):
        assert (valid + 1) * share * per_block <= cut_after(valid, count, per_block) + per_block * share
        assert valid * share * per_block <= cut_after(valid, count, per_block)


def test_a_disk_is_to_be_twice_as_fast_as_computing() -> None:
    assert not is_slow(200.0, 10, 0.1)
    assert is_slow(199.0, 10, 0.1)


def test_where_computing_is_not_known_a_load_has_half_a_second_for_each_block() -> None:
    assert cut_after(0, 100, None) == UNKNOWN_SECONDS
    assert cut_after(3, 100, None) == 4 * UNKNOWN_SECONDS


def test_a_prediction_counts_what_comes_before() -> None:
    assert predict_seconds(30, 0, 1, 3, 10.0) == 3.0
    assert predict_seconds(30, 0, 3, 3, 10.0) == 1.0
    assert predict_seconds(30, 60, 3, 3, 10.0) == 3.0
    assert predict_seconds(30, 60, 3, 3, None) == 0.0


@pytest.mark.parametrize(
    ("places", "most", "expected"),
    [
        ([], 4, []),
        ([(1, 0), (1, 1), (1, 2)], 4, [(0, 3)]),
        ([(1, 0), (1, 1), (1, 2)], 2, [(0, 2), (2, 3)]),
        ([(1, 0), (1, 2), (2, 3)], 4, [(0, 1), (1, 2), (2, 3)]),
        ([(1, 2), (1, 1)], 4, [(0, 1), (1, 2)]),
    ],
)
def test_neighbours_are_read_at_once(places: list[tuple[int, int]], most: int, expected: list[tuple[int, int]]) -> None:
    assert plan_pieces(places, most) == expected


@given(st.lists(st.tuples(st.integers(1, 2), st.integers(0, 5)), max_size=30), st.integers(1, 5))
def test_pieces_are_the_whole_in_order(places: list[tuple[int, int]], most: int) -> None:
    pieces = plan_pieces(places, most)
    assert [index for first, end in pieces for index in range(first, end)] == list(range(len(places)))
    for first, end in pieces:
        segment, slot = places[first]
        assert places[first:end] == [(segment, slot + row) for row in range(end - first)]
        assert end - first <= most


@given(st.integers(64 << 20, 1 << 44), st.integers(4096, 64 << 20))
def test_a_volume_has_head_room(size: int, slot_bytes: int) -> None:
    segment = plan_segment_bytes(size, slot_bytes)
    assert segment >= slot_bytes
    assert plan_limit(size, segment) * segment <= 0.95 * size


def test_writes_are_of_a_megabyte_or_more() -> None:
    for slot_bytes in (4096, 372_736, 2 << 20, 64 << 20):
        assert plan_batch(slot_bytes) * slot_bytes >= 1 << 20


def test_a_budget_is_for_a_day() -> None:
    budget = WriteBudget(100)
    assert budget.admits(reused=False, now=0.0)
    budget.record(79, 0.0)
    assert budget.admits(reused=False, now=1.0)
    budget.record(1, 2.0)
    assert not budget.admits(reused=False, now=3.0)
    assert budget.admits(reused=True, now=3.0)
    budget.record(20, 4000.0)
    assert not budget.admits(reused=True, now=4001.0)
    later = WriteBudget(100, budget.spent)
    assert not later.admits(reused=True, now=DAY_SECONDS - 1)
    assert later.admits(reused=False, now=DAY_SECONDS + 1)


def test_without_a_budget_everything_is_written() -> None:
    budget = WriteBudget(None)
    budget.record(1 << 60, 0.0)
    assert budget.admits(reused=False, now=1.0)


@pytest.mark.parametrize("most", [None, 100])
def test_what_was_written_long_ago_is_forgotten_whether_or_not_there_is_a_budget(most: int | None) -> None:
    """It is saved every time, in a file of which a next process reads so much and no more."""
    budget = WriteBudget(most)
    for hour in range(24 * 365):
        budget.record(1, hour * 3600.0)
    assert len(budget.spent) <= 25
