"""What a report's histogram of first tokens tells about percentiles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.fleet import TTFT_BOUNDS, percentile, percentile_bounds

BUCKETS = len(TTFT_BOUNDS) + 1


def counts(**by_bucket: int) -> list[int]:
    return [by_bucket.get(f"b{index}", 0) for index in range(BUCKETS)]


@pytest.mark.parametrize(
    ("found", "share", "bounds"),
    [
        (counts(b0=10), 0.5, (0.0, TTFT_BOUNDS[0])),
        (counts(b0=9, b3=1), 0.9, (0.0, TTFT_BOUNDS[0])),
        (counts(b0=9, b3=1), 0.91, (TTFT_BOUNDS[2], TTFT_BOUNDS[3])),
        ([0] * (BUCKETS - 1) + [1], 0.5, (TTFT_BOUNDS[-1], float("inf"))),
    ],
)
def test_a_percentile_is_in_the_bucket_that_its_rank_is_in(
    found: list[int], share: float, bounds: tuple[float, float]
) -> None:
    assert percentile_bounds(found, share) == bounds


@given(st.lists(st.integers(0, 50), min_size=BUCKETS, max_size=BUCKETS).filter(any), st.integers(50, 99))
def test_a_percentile_lies_within_its_bounds(found: list[int], percent: int) -> None:
    low, high = percentile_bounds(found, percent / 100)
    assert low <= percentile(found, percent / 100) <= high


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no percentile of nothing"):
        percentile(counts(), 0.5)
