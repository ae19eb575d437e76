"""What loads are read from and writes go to: blocks in slots (`format`), wherever these are. The pool of loads and the
writer are the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from tandem_worker.tiers.errors import VOLUME_GONE, describe
from tandem_worker.tiers.format import Geometry, TierKey, pack_slot, place_of, sum_layers
from tandem_worker.tiers.memory import allocate_rows
from tandem_worker.tiers.store import Place, SegmentStore

PIECE_BYTES = 4 << 20
"""What one call reads or writes, about."""


class SlotStore(Protocol):
    """Any thread, but for `write`, which one thread calls. Every method raises TierError where it cannot answer."""

    @property
    def geometry(self) -> Geometry:
        """Sizes of its slots and segments."""
        ...

    @property
    def most_slots(self) -> int:
        """What one `read` or `write` takes at most."""
        ...

    def allocate(self, count: int) -> np.ndarray:
        """`[count, slot_bytes]` uint8 that `read` and `write` take; one thread at a time uses them."""
        ...

    def seed(self, place: Place) -> int:
        """Number with which the sums of a slot at this place are seeded."""
        ...

    def has(self, name: bytes) -> bool:
        """Whether the block is there, as far as that is known here; it counts as used."""
        ...

    def read(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> int:
        """Slots that follow one another into `rows`, unverified. How many of the leading ones are there: the one after
        them was given up."""
        ...

    def use(self, place: Place) -> None:
        """What is at this place counts as used now."""
        ...

    def discard(self, place: Place, name: bytes) -> None:
        """What is at this place is not the block of this name, and is to go."""
        ...

    def write(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        """Blocks, which stand in `rows` behind room for a slot's header. How many were written; others are lost."""
        ...


class DiskSlots:
    """A disk's segments as a `SlotStore`."""

    def __init__(self, store: SegmentStore, key: TierKey) -> None:
        self._store, self._key = store, key

    @property
    def geometry(self) -> Geometry:
        """Sizes of its slots and segments."""
        return self._store.geometry

    @property
    def most_slots(self) -> int:
        return max(1, PIECE_BYTES // self.geometry.slot_bytes)

    def allocate(self, count: int) -> np.ndarray:
        return allocate_rows(count, self.geometry.slot_bytes)

    def seed(self, place: Place) -> int:
        return place_of(*place)

    def has(self, name: bytes) -> bool:
        return self._store.has(name)

    def read(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> int:
        try:
            got = self._store.read(places[0], len(places), rows)
        except OSError as error:
            failure = describe(error, f"a segment in {self._store.folder} cannot be read")
            if failure.reason == VOLUME_GONE and self._store.folder.is_dir():  # somebody has deleted this file
                self.discard(places[0], names[0])
                return 0
            raise failure from error
        if got is None:
            return 0
        rows[got : len(places)] = 0  # the file was cut: what should be there is damaged, and found to be
        return len(places)

    def use(self, place: Place) -> None:
        self._store.use(place)

    def discard(self, place: Place, name: bytes) -> None:
        try:
            self._store.discard(place)
        except OSError as error:
            raise describe(error, "a damaged segment cannot be removed") from error

    def write(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        written = 0
        try:
            while written < len(names):
                places = self._store.plan(len(names) - written)
                some, part = names[written : written + len(places)], rows[written : written + len(places)]
                fill_headers(self, self._key, places, some, part)
                self._store.append(places, some, part)
                written += len(places)
        except OSError as error:
            raise describe(error, f"blocks cannot be written to {self._store.folder}") from error
        return written


def fill_headers(
    slots: SlotStore, key: TierKey, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray
) -> None:
    """Write the slots' headers into `rows`, with the sums of the blocks that stand there."""
    geometry = slots.geometry
    start = geometry.slot_header_bytes
    for place, name, row in zip(places, names, rows, strict=True):
        block, seed = row[start : start + geometry.block_bytes].data, slots.seed(place)
        header = pack_slot(key, name, seed, sum_layers(block, geometry.layer_bytes, name, seed))
        row[: len(header)] = np.frombuffer(header, np.uint8)
