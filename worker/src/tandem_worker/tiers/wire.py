"""Blocks on their way between two workers: slots as on a disk, whose place is that in the fetch. Pure."""

from __future__ import annotations

import numpy as np

from tandem_worker.tiers.format import Geometry, TierKey, is_intact, pack_slot, sum_layers

PIECE_BYTES = 2 << 20
"""Bytes of slots that travel at once; of a larger slot one."""


def plan_piece(slot_bytes: int) -> int:
    """Blocks that travel at once."""
    return max(1, PIECE_BYTES // slot_bytes)


def place_in(transfer: int, index: int) -> int:
    """What the sums of block `index` of a fetch are seeded with: another for every block of every fetch."""
    return transfer ^ index


def seal(row: np.ndarray, geometry: Geometry, key: TierKey, name: bytes, place: int) -> None:
    """Give the block in `row`, a whole slot, its header with the sums."""
    start = geometry.slot_header_bytes
    block = row[start : start + geometry.block_bytes].data
    header = pack_slot(key, name, place, sum_layers(block, geometry.layer_bytes, name, place))
    row[: len(header)] = np.frombuffer(header, np.uint8)


def is_sound(row: np.ndarray, geometry: Geometry, key: TierKey, name: bytes, place: int) -> bool:
    """Whether `row`, a whole slot, is what `seal` has made of the block of this name."""
    return is_intact(row.data, geometry, key, name, place)
