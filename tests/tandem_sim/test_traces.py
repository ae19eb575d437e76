"""Traces are read, and played at the pace that a shape says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_sim.shapes import Shape, build_constant, build_diurnal, build_ramp, build_spike, play
from tandem_sim.traces import Arrival, make_conversations, make_requests, read, spread

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def test_both_formats_are_read(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text(AZURE)
    assert [(round(a.at, 3), a.prompt, a.output) for a in read(azure)] == [(0.0, 374, 44), (4.315, 396, 109)]
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text('{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}\n')
    (arrival,) = read(mooncake)
    assert 3.0 <= arrival.at < 6.0
    with pytest.raises(ValueError, match=r"name it .jsonl"):
        read(tmp_path / "trace.txt")


def test_rounded_arrivals_are_spread_over_what_they_were_rounded_to() -> None:
    rounded = [Arrival(3.0 * (number // 10), 10, 10, (), number) for number in range(1000)]
    moved = spread(rounded, 3.0)
    assert all(0 <= arrival.at - 3.0 * (arrival.session // 10) < 3.0 for arrival in moved)
    assert len({arrival.at for arrival in moved}) == 1000


@pytest.mark.parametrize("shape", [build_ramp(), build_spike(), build_diurnal(day=1800), build_constant(900)])
def test_a_shape_sets_the_pace(shape: Shape) -> None:
    recording = make_requests(rate=5.0, seconds=600)
    rate = len(recording) / 600
    arrivals = play(recording, shape, 2.0)
    at = np.array([arrival.at for arrival in arrivals])
    assert (np.diff(at) >= 0).all()
    assert at[-1] <= shape.seconds
    edges = np.arange(0.0, shape.seconds, 100.0)
    for begin in edges[:-1]:
        count = ((at >= begin) & (at < begin + 100)).sum()
        expected = 2.0 * rate * np.mean([shape.at(begin + step) for step in range(100)]) * 100
        assert count == pytest.approx(expected, rel=0.25)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 5.0), st.integers(1, 5))
def test_copies_share_no_prefix(load: float, seed: int) -> None:
    recording = make_conversations(sessions=20, seconds=100, seed=seed)
    arrivals = play(recording, build_constant(300.0), load)
    owners: dict[int, set[int]] = {}
    for arrival in arrivals:
        if len(arrival.blocks) > 4:
            owners.setdefault(arrival.blocks[4], set()).add(arrival.session)
    assert all(len(sessions) == 1 for sessions in owners.values())
