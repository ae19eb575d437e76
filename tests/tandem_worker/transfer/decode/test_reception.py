from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.transfer.decode.reception import Reception
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.protocol import BlockRange


def reception(*, tokens: int = 40, cached: int = 8, layers: int = 2) -> Reception:
    return Reception(tuple(range(100, 100 + -(-tokens // 4))), cached // 4, range(layers))


def test_blocks_go_where_they_were_reserved() -> None:
    assert reception().expected(BlockRange(1, 3, 2)) == (103, 104)


@pytest.mark.parametrize(
    "blocks", [BlockRange(2, 3, 1), BlockRange(0, 1, 1), BlockRange(0, 1, 3), BlockRange(0, 9, 2), BlockRange(0, 10, 1)]
)
def test_blocks_that_were_not_ordered_are_an_error(blocks: BlockRange) -> None:
    with pytest.raises(TransferError, match="ordered were 2 to 9 of 2 layers"):
        reception().expected(blocks)


def test_a_duplicate_is_not_written() -> None:
    state = reception()
    state.record(BlockRange(0, 4, 2), [True, True])
    assert state.expected(BlockRange(0, 5, 2)) is None
    assert state.expected(BlockRange(1, 5, 2)) == (105, 106)


def test_damaged_blocks_stay_missing() -> None:
    state = reception(layers=1)
    state.record(BlockRange(0, 2, 8), [True, False, True, True, False, False, True, True])
    assert not state.complete
    assert state.missing() == [BlockRange(0, 3, 1), BlockRange(0, 6, 2)]


FRAMES = st.tuples(st.integers(0, 1), st.integers(2, 9), st.integers(1, 8), st.integers(0, 255))


@given(st.lists(FRAMES, max_size=30))
def test_missing_is_exactly_what_never_arrived_intact(frames: list[tuple[int, int, int, int]]) -> None:
    state = reception()
    missing = {(layer, index) for layer in range(2) for index in range(2, 10)}
    for layer, first, length, mask in frames:
        blocks = BlockRange(layer, first, min(length, 10 - first))
        wanted = [(layer, first + i) for i in range(blocks.count)]
        if not missing.issuperset(wanted):
            assert state.expected(blocks) is None
            continue
        good = [bool(mask >> i & 1) for i in range(blocks.count)]
        state.record(blocks, good)
        missing -= {block for block, intact in zip(wanted, good, strict=True) if intact}
    listed = [(run.layer, run.first + i) for run in state.missing() for i in range(run.count)]
    assert sorted(listed) == sorted(missing)
    assert state.complete == (not missing)
