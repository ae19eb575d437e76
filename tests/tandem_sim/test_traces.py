"""Traces are read, and played at the pace that a shape says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_sim.cache import PrefixCache
from tandem_sim.shapes import Shape, build_constant, build_ramp, build_spike, play
from tandem_sim.synthetic import MAKERS, make_conversations, make_requests
from tandem_sim.synthetic import write as write_trace
from tandem_sim.traces import Arrival, TraceError, find_rounding, read, spread

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


MOONCAKE = '{"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [0, 2]}\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_both_formats_are_told_apart_by_what_is_in_them(tmp_path: Path) -> None:
    arrivals = read(write(tmp_path, AZURE))
    assert [(round(a.at, 3), a.prompt, a.output) for a in arrivals] == [(0.0, 374, 44), (4.315, 396, 109)]
    (arrival,) = read(write(tmp_path, "\n" + MOONCAKE))
    assert 3.0 <= arrival.at < 6.0
    assert arrival.blocks == (0,)


def test_moments_with_an_offset_and_columns_in_another_order_are_read(tmp_path: Path) -> None:
    later = "ContextTokens,GeneratedTokens,TIMESTAMP\n1,2,2024-05-10 00:00:00+00:00\n3,4,2024-05-10 00:00:01.5+00:00\n"
    assert [(a.at, a.prompt, a.output) for a in read(write(tmp_path, later))] == [(0.0, 1, 2), (1.5, 3, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"trace has no line: write one request per line, for example \{"),
        (
            "time,in,out\n1,2,3\n",
            r"line 1: neither a JSON object as in Mooncake's .* nor the header of Azure's .*time,in",
        ),
        (MOONCAKE + "{\n", r"line 2: no JSON .*; write \{"),
        (MOONCAKE + "[1]\n", r"line 2: \[1\] is no JSON object"),
        (MOONCAKE + '{"timestamp": 0, "input_length": 5}\n', r"line 2: output_length is missing; write"),
        (MOONCAKE.replace("600", '"many"'), r'line 1: input_length is "many"; write a number'),
        (MOONCAKE.replace("600", "0"), r"line 1: input_length is 0; write a number of tokens, at least 1"),
        (MOONCAKE.replace("3000", "-1"), r"line 1: timestamp is -1; write milliseconds"),
        (MOONCAKE.replace("[0, 2]", '"x"'), r'line 1: hash_ids is "x"; write a list of whole numbers'),
        (AZURE + "2023-11-16 18:16:00,12\n", r"line 4: 2 columns where the header names 3; write 2023"),
        (AZURE + "yesterday,12,3\n", r"line 4: TIMESTAMP is 'yesterday'; write a moment"),
        (AZURE + "2023-11-16 18:16:00,twelve,3\n", r"line 4: ContextTokens is 'twelve'; write a number of tokens"),
        (AZURE.splitlines()[0], r"has a header and no requests"),
        ("2023-11-16 18:16:00,12,3\n", r"line 1: neither"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(write(tmp_path, text))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\x1f\x8b\xff\xff")
    with pytest.raises(TraceError, match="no text in UTF-8"):
        read(tmp_path / "trace")
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "prompt", "output", "shared"), [("conversation", 12_000, 343, 0.37), ("azure", 1155, 211, 0.0)]
)
def test_what_is_made_up_is_like_what_was_published(
    tmp_path: Path, name: str, prompt: float, output: float, shared: float
) -> None:
    write_trace(MAKERS[name](2000.0), name, tmp_path / "made")
    arrivals = read(tmp_path / "made")
    prompts = np.array([a.prompt for a in arrivals])
    assert prompts.mean() == pytest.approx(prompt, rel=0.12)
    assert np.mean([a.output for a in arrivals]) == pytest.approx(output, rel=0.08)
    cache = PrefixCache(1 << 40)
    hits = 0
    for arrival in arrivals:
        hits += cache.match(arrival.blocks, arrival.prompt)
        cache.keep(arrival.blocks, arrival.at)
    assert hits / prompts.sum() == pytest.approx(shared, abs=0.06)


@pytest.mark.parametrize(("step", "found"), [(3.0, 3000), (1.0, 1000), (0.25, 0)])
def test_rounding_is_found(step: float, found: int) -> None:
    assert find_rounding([Arrival(step * number, 1, 1, (), 0) for number in range(100)]) == found


def test_rounded_arrivals_are_spread_over_what_they_were_rounded_to() -> None:
    rounded = [Arrival(3.0 * (number // 10), 10, 10, (), number) for number in range(1000)]
    moved = spread(rounded, 3.0)
    assert all(0 <= arrival.at - 3.0 * (arrival.session // 10) < 3.0 for arrival in moved)
    assert len({arrival.at for arrival in moved}) == 1000


@pytest.mark.parametrize("shape", [build_ramp(), build_spike(), build_constant(900)])
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
