from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.quantities import parse_duration, parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("500m", 0.5), ("2", 2), ("1.5", 1.5), ("16Gi", 16 * 2**30), ("3k", 3000), ("1Ei", 2**60), ("1E", 10**18),
        ("1e3", 1000), ("1.5E2", 150), ("5e-1", 0.5),
    ],
)  # fmt: skip
def test_quantities(text: str, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1gi", "-1", "1 Gi", "1e999", "1e3Gi", "e3"])
def test_what_is_not_a_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a quantity"):
        parse_quantity(text)


@given(hours=st.integers(0, 99), minutes=st.integers(0, 99), seconds=st.integers(0, 99))
def test_durations_add_up(hours: int, minutes: int, seconds: int) -> None:
    assert parse_duration(f"{hours}h{minutes}m{seconds}s") == hours * 3600 + minutes * 60 + seconds


@pytest.mark.parametrize("text", ["", "10", "5s3m", "1d"])
def test_what_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)
