"""Copying and summing in one loop is copying, and summing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.transfer.checksums import copy_in, copy_out, sum_blocks

blocks_of_runs = st.integers(1, 4).flatmap(
    lambda runs: st.lists(
        st.lists(st.binary(min_size=1, max_size=40), min_size=runs, max_size=runs), min_size=1, max_size=6
    )
)


@given(blocks=blocks_of_runs, transfer=st.integers(0, 2**32 - 1), layer=st.integers(0, 200), first=st.integers(0, 900))
def test_what_is_copied_out_stands_in_a_row_with_the_sums_of_the_blocks(
    blocks: list[list[bytes]], transfer: int, layer: int, first: int
) -> None:
    views = [tuple(memoryview(run) for run in runs) for runs in blocks]
    whole = b"".join(run for runs in blocks for run in runs)
    room = bytearray(len(whole) + 7)
    sums = copy_out(views, memoryview(room), transfer, layer, first)
    assert room == whole + bytes(7)
    assert sums == sum_blocks(views, transfer, layer, first)


@given(blocks=blocks_of_runs, transfer=st.integers(0, 2**32 - 1), layer=st.integers(0, 200), first=st.integers(0, 900))
def test_what_is_copied_in_has_the_sums_of_the_copies(
    blocks: list[list[bytes]], transfer: int, layer: int, first: int
) -> None:
    source = memoryview(b"".join(run for runs in blocks for run in runs) + b"more")
    landed = [tuple(memoryview(bytearray(len(run))) for run in runs) for runs in blocks]
    sums = copy_in(source, landed, transfer, layer, first)
    assert [[bytes(run) for run in runs] for runs in landed] == blocks
    assert sums == sum_blocks(landed, transfer, layer, first)
