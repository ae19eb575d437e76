"""How blocks lie on a disk: segments of equal slots, and the sums by which a block is known to be what it was. Pure.

    segment: header (a page) | names of its slots, in whole pages | slot | slot | ...
    slot:    header with the sums of every layer, in whole pages | the block, layer after layer, in whole pages

A segment belongs to one key: model, revision, layout, shard and format. Every sum is seeded with what it belongs to: a
slot's header with its place, a layer of a block with the block's name, the layer and the place. What was damaged, cut,
or has come to lie elsewhere fails its sum even where every byte of it was right once. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b

from xxhash import xxh3_64_intdigest

FORMAT_VERSION = 1
PAGE = 4096
NAME_BYTES = 16
MAX_SLOTS = 1 << 16
_HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, format, slots, number of the segment, bytes of a slot, key; its sum follows."""
_ENTRY = struct.Struct("<16sQ")
"""Name of a slot's block, and the entry's sum."""
_SLOT = struct.Struct("<8sIIQ16s16s")
"""Magic, format, layers, place, name, key; the layers' sums follow, and the header's own."""
_SUM = struct.Struct("<Q")
_SEGMENT_MAGIC, _SLOT_MAGIC = b"TNDMKVSG", b"TNDMKVSL"
_HEADER_SEED, _ENTRY_SEED = 0x5347_4B56_4D44_4E54, 0x4552_544E_4B56_4D44
_LAYER_STEP = 0x9E37_79B9_7F4A_7C15
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TierKey:
    """What must be equal for a block to be used again."""

    model_digest: str
    revision: str
    layout: str
    """`KVLayout.fingerprint` of the whole model."""
    shard: str = "whole"
    """Which part of it this rank holds."""
    format: int = FORMAT_VERSION

    def to_json(self) -> str:
        """Readable, for whoever looks into the folder."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for all of it."""
        return blake2b(self.to_json().encode(), digest_size=NAME_BYTES).digest()


@dataclass(frozen=True)
class Geometry:
    """Sizes of slots and segments, in bytes."""

    layer_bytes: tuple[int, ...]
    """Bytes of one block in every layer."""
    num_slots: int
    """Number of slots in a segment."""

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(self.layer_bytes)

    @cached_property
    def slot_header_bytes(self) -> int:
        """Whole pages."""
        return pad(_SLOT.size + _SUM.size * (len(self.layer_bytes) + 1))

    @cached_property
    def slot_bytes(self) -> int:
        """Whole pages."""
        return self.slot_header_bytes + pad(self.block_bytes)

    @cached_property
    def first_slot(self) -> int:
        """Offset of the first slot in a segment."""
        return PAGE + pad(_ENTRY.size * self.num_slots)

    @property
    def segment_bytes(self) -> int:
        """Bytes of a full segment."""
        return self.first_slot + self.num_slots * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Offset of a slot in its segment."""
        return self.first_slot + slot * self.slot_bytes


def plan_geometry(layer_bytes: Sequence[int], segment_bytes: int) -> Geometry:
    """As many slots as `segment_bytes` allow, one at least."""
    one = Geometry(tuple(layer_bytes), 1)
    return Geometry(tuple(layer_bytes), min(MAX_SLOTS, max(1, segment_bytes // one.slot_bytes)))


def pad(num_bytes: int) -> int:
    """In whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def place_of(segment: int, slot: int) -> int:
    """One number for a slot of a segment."""
    return (segment * MAX_SLOTS + slot) & _MASK


def pack_header(key: TierKey, geometry: Geometry, segment: int) -> bytes:
    """The first page of a segment."""
    packed = _HEADER.pack(_SEGMENT_MAGIC, FORMAT_VERSION, geometry.num_slots, segment, geometry.slot_bytes, key.digest)
    return (packed + _SUM.pack(xxh3_64_intdigest(packed, _HEADER_SEED))).ljust(PAGE, b"\0")


def is_header(data: bytes | memoryview, key: TierKey, geometry: Geometry, segment: int) -> bool:
    """Whether `data` begins with the header of this segment."""
    expected = pack_header(key, geometry, segment)
    return bytes(data[:PAGE]) == expected


def pack_entry(name: bytes, place: int) -> bytes:
    """What the table of a segment says of one slot."""
    return _ENTRY.pack(name, xxh3_64_intdigest(name, _ENTRY_SEED ^ place))


def read_table(table: bytes | memoryview, geometry: Geometry, segment: int) -> list[bytes | None]:
    """Names by slot; None for those that are empty or damaged."""
    names: list[bytes | None] = []
    for slot in range(geometry.num_slots):
        entry = bytes(table[slot * _ENTRY.size : (slot + 1) * _ENTRY.size])
        name = entry[:NAME_BYTES]
        names.append(name if len(entry) == _ENTRY.size and entry == pack_entry(name, place_of(segment, slot)) else None)
    return names


def entry_span(slot: int, count: int) -> tuple[int, int]:
    """First byte and end of these entries, from the beginning of the table."""
    return slot * _ENTRY.size, (slot + count) * _ENTRY.size


def sum_layers(block: memoryview, layer_bytes: Sequence[int], name: bytes, place: int) -> list[int]:
    """XXH3 (64 bits) of every layer of one block, `block_bytes` in all, with seeds of their own."""
    seed = xxh3_64_intdigest(name, place)
    sums: list[int] = []
    start = 0
    for size in layer_bytes:
        sums.append(xxh3_64_intdigest(block[start : start + size], seed))
        start += size
        seed = (seed + _LAYER_STEP) & _MASK
    return sums


def pack_slot(key: TierKey, name: bytes, place: int, sums: Sequence[int]) -> bytes:
    """The header of a slot, without padding."""
    packed = _SLOT.pack(_SLOT_MAGIC, FORMAT_VERSION, len(sums), place, name, key.digest)
    packed += struct.pack(f"<{len(sums)}Q", *sums)
    return packed + _SUM.pack(xxh3_64_intdigest(packed, _HEADER_SEED ^ place))


def is_intact(slot: memoryview, geometry: Geometry, key: TierKey, name: bytes, place: int) -> bool:
    """Whether `slot`, a whole one, holds the block of this name as it was written to this place.

    The sums are computed anew and the header that they give is compared with the one that is there.
    """
    start = geometry.slot_header_bytes
    block = slot[start : start + geometry.block_bytes]
    expected = pack_slot(key, name, place, sum_layers(block, geometry.layer_bytes, name, place))
    return bytes(slot[: len(expected)]) == expected
