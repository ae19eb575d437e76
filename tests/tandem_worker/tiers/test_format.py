"""The form of segments: what is read is what was written to that place under that name, or it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.tiers.format import (
    PAGE,
    Geometry,
    entry_span,
    is_header,
    is_intact,
    pack_entry,
    pack_header,
    pack_slot,
    pad,
    place_of,
    plan_geometry,
    read_table,
    sum_layers,
)

from tests.tandem_worker.tiers.rig import KEY

GEOMETRY = Geometry((40, 24, 100), 8)
NAME, OTHER = b"n" * 16, b"o" * 16


def write_slot(name: bytes = NAME, segment: int = 5, slot: int = 3) -> bytearray:
    data = bytearray(GEOMETRY.slot_bytes)
    start = GEOMETRY.slot_header_bytes
    block = bytes(range(GEOMETRY.block_bytes))
    data[start : start + len(block)] = block
    place = place_of(segment, slot)
    header = pack_slot(KEY, name, place, sum_layers(memoryview(block), GEOMETRY.layer_bytes, name, place))
    data[: len(header)] = header
    return data


def used() -> list[int]:
    """Bytes that carry something."""
    start = GEOMETRY.slot_header_bytes
    return [*range(56 + 8 * 4), *range(start, start + GEOMETRY.block_bytes)]


@given(st.sampled_from(used()), st.integers(0, 7))
def test_every_flipped_bit_is_found(spot: int, bit: int) -> None:
    data = write_slot()
    assert is_intact(memoryview(data), GEOMETRY, KEY, NAME, place_of(5, 3))
    data[spot] ^= 1 << bit
    assert not is_intact(memoryview(data), GEOMETRY, KEY, NAME, place_of(5, 3))


@pytest.mark.parametrize(("name", "segment", "slot"), [(OTHER, 5, 3), (NAME, 6, 3), (NAME, 5, 4), (NAME, 3, 5)])
def test_a_right_block_at_a_wrong_place_is_refused(name: bytes, segment: int, slot: int) -> None:
    assert not is_intact(memoryview(write_slot()), GEOMETRY, KEY, name, place_of(segment, slot))


@pytest.mark.parametrize("field", ["model_digest", "revision", "layout", "shard"])
def test_another_key_is_refused(field: str) -> None:
    other = replace(KEY, **{field: "other"})
    assert other.digest != KEY.digest
    assert not is_intact(memoryview(write_slot()), GEOMETRY, other, NAME, place_of(5, 3))
    assert not is_header(pack_header(KEY, GEOMETRY, 5), other, GEOMETRY, 5)


def test_a_header_is_of_one_segment_and_one_geometry() -> None:
    header = pack_header(KEY, GEOMETRY, 5)
    assert len(header) == PAGE
    assert is_header(header, KEY, GEOMETRY, 5)
    assert not is_header(header, KEY, GEOMETRY, 6)
    assert not is_header(header, KEY, Geometry(GEOMETRY.layer_bytes, 9), 5)
    assert not is_header(header[:100], KEY, GEOMETRY, 5)


def test_a_table_has_the_names_that_are_whole() -> None:
    table = bytearray(pad(24 * 8))
    for slot, name in ((0, NAME), (1, OTHER), (4, NAME)):
        start, end = entry_span(slot, 1)
        table[start:end] = pack_entry(name, place_of(7, slot))
    assert read_table(table, GEOMETRY, 7) == [NAME, OTHER, None, None, NAME, None, None, None]
    assert read_table(table, GEOMETRY, 8) == [None] * 8, "of another segment"
    table[25] ^= 1
    assert read_table(table, GEOMETRY, 7)[1] is None
    assert read_table(table[:30], GEOMETRY, 7) == [NAME] + [None] * 7


@given(st.lists(st.integers(1, 100_000), min_size=1, max_size=100), st.integers(0, 1 << 26))
def test_everything_begins_at_a_page(layers: list[int], segment_bytes: int) -> None:
    geometry = plan_geometry(layers, segment_bytes)
    assert geometry.num_slots >= 1
    assert geometry.slot_bytes % PAGE == geometry.first_slot % PAGE == geometry.slot_header_bytes % PAGE == 0
    assert geometry.slot_bytes >= geometry.block_bytes + 56 + 8 * (len(layers) + 1)
    assert geometry.slot_offset(geometry.num_slots) == geometry.segment_bytes
