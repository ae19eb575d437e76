from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.schedule.host_blocks import HostBlocks, is_moving_cheaper


@given(st.lists(st.one_of(st.integers(0, 5), st.booleans()), max_size=30))
def test_every_block_is_in_one_place(moves: list[int | bool]) -> None:
    """A number takes that many blocks, a truth value gives the oldest or newest back."""
    host, taken = HostBlocks(8), list[list[int]]()
    for move in moves:
        if isinstance(move, bool):
            if taken:
                host.release(taken.pop(0 if move else -1))
        elif move <= host.num_available:
            taken.append(host.allocate(move))
        host.check([block for blocks in taken for block in blocks])
        assert host.num_held == sum(map(len, taken))


def test_blocks_follow_one_another() -> None:
    host = HostBlocks(8)
    first = host.allocate(3)
    assert (first, host.allocate(5)) == ([0, 1, 2], [3, 4, 5, 6, 7])
    host.release(first)
    assert host.allocate(2) == [0, 1]


@pytest.mark.parametrize(
    ("seconds_per_block", "rate", "cheaper"),
    [
        (0.001, 1000.0, True),
        (0.1, 1000.0, False),
        (0.0011, 15_000.0, False),
        (0.001, 15_000.0, True),
        (1.0, None, True),
    ],
)
def test_the_cheaper_way_is_taken(seconds_per_block: float, rate: float | None, cheaper: bool) -> None:
    assert is_moving_cheaper(160, 10, seconds_per_block=seconds_per_block, prefill_tokens_per_second=rate) is cheaper
