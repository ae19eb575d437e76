"""GRANT and LANDED say what they were told, and refuse everything else with one kind of error."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.transfer import protocol
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.mooncake.frames import (
    MAX_BLOCKS,
    MAX_GRANT_BYTES,
    MAX_LANDED_BYTES,
    MAX_RANGES,
    Grant,
    Landed,
    Slot,
    append_blocks,
    decode_grant,
    decode_landed,
    encode_grant,
    encode_landed,
    is_same_host,
)
from tandem_worker.transfer.protocol import BlockRange, FrameKind

U16, U32, U64 = st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
SLOTS = st.builds(Slot, U32, U32)
RANGES = st.builds(BlockRange, U16, U32, st.integers(1, 5))


def body_of(frame: bytes, kind: FrameKind, transfer: int) -> bytes:
    header = protocol.decode_header(frame, frozenset({kind}))
    body = frame[protocol.HEADER_BYTES :]
    protocol.check_body(header, body)
    assert (header.transfer, header.length) == (transfer, len(body))
    return body


@given(transfer=U64, engine=st.text(max_size=60), base=U64, size=st.integers(1, 2**32 - 1), slots=st.lists(SLOTS))
def test_grants_round_trip(transfer: int, engine: str, base: int, size: int, slots: list[Slot]) -> None:
    grant = Grant(engine, base, size, tuple(slots))
    assert decode_grant(body_of(encode_grant(transfer, grant), FrameKind.GRANT, transfer)) == grant


@given(transfer=U64, slot=SLOTS, ranges=st.lists(RANGES, max_size=9), micros=U32, lost=st.booleans())
def test_landings_round_trip(transfer: int, slot: Slot, ranges: list[BlockRange], micros: int, *, lost: bool) -> None:
    sums = array("Q", [2**64 - 1 - index for index in range(sum(each.count for each in ranges))])
    landed = Landed(slot, tuple(ranges), sums, micros, lost)
    assert decode_landed(body_of(encode_landed(transfer, landed), FrameKind.LANDED, transfer)) == landed


@given(body=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    for decode in (decode_grant, decode_landed):
        try:
            decode(body)
        except TransferError:
            continue


@given(cut=st.integers(1, 60))
def test_frames_that_are_cut_off_are_refused(cut: int) -> None:
    landed = Landed(Slot(1, 2), (BlockRange(0, 1, 2),), array("Q", [3, 4]), 5)
    for frame, decode in (
        (encode_grant(7, Grant("10.0.0.1:15000", 9, 8, (Slot(0, 1),))), decode_grant),
        (encode_landed(7, landed), decode_landed),
    ):
        body = frame[protocol.HEADER_BYTES :]
        with pytest.raises(TransferError):
            decode(body[: max(0, len(body) - cut)])


def test_a_landing_of_no_blocks_is_refused() -> None:
    empty = Landed(Slot(1, 2), (BlockRange(0, 1, 0),), array("Q"), 5)
    with pytest.raises(TransferError, match="no blocks"):
        decode_landed(encode_landed(7, empty)[protocol.HEADER_BYTES :])


def test_the_largest_frames_are_taken() -> None:
    assert protocol.MAX_BODY[FrameKind.GRANT] >= MAX_GRANT_BYTES
    assert protocol.MAX_BODY[FrameKind.LANDED] >= MAX_LANDED_BYTES
    ranges = (BlockRange(0, 0, MAX_BLOCKS - MAX_RANGES + 1), *[BlockRange(1, 2 * i, 1) for i in range(MAX_RANGES - 1)])
    landed = Landed(Slot(1, 2), ranges, array("Q", range(MAX_BLOCKS)), 5)
    assert decode_landed(body_of(encode_landed(7, landed), FrameKind.LANDED, 7)) == landed


@given(blocks=st.lists(st.builds(BlockRange, st.integers(0, 1), st.integers(0, 6), st.integers(1, 3)), max_size=12))
def test_ranges_that_are_joined_name_the_same_blocks_in_the_same_order(blocks: list[BlockRange]) -> None:
    joined: list[BlockRange] = []
    for each in blocks:
        append_blocks(joined, each)

    def spell(ranges: list[BlockRange]) -> list[tuple[int, int]]:
        return [(each.layer, index) for each in ranges for index in range(each.first, each.first + each.count)]

    assert spell(joined) == spell(blocks)
    assert all(
        (one.layer, one.first + one.count) != (other.layer, other.first) for one, other in itertools.pairwise(joined)
    )


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1:15000", "10.0.0.1:4444-3", True),
        ("10.0.0.1:15000", "::ffff:10.0.0.1:4444", True),
        ("[fd00::1]:15000", "fd00::1:4444", True),
        ("[fd00:0::1]:15000", "[fd00::1]:4444-1", True),
        ("10.0.0.2:15000", "10.0.0.1:4444", False),
        ("metadata:80", "10.0.0.1:4444", False),
        ("metadata:80", "metadata:80", False),
        ("", "", False),
    ],
)
def test_an_engine_is_where_its_peer_is(one: str, other: str, same: bool) -> None:
    assert is_same_host(one, other) is same
