"""Segments of a folder, and which block is in which: what a disk tier has. Any thread, but one that writes.

Blocks are appended to the newest segment. When there is no room for another one, the segment that was used longest ago
goes as a whole: what is written together is used together. A block's name is written behind the block, so what a
process had not finished when it was killed has no name; what a machine had not, fails its sum. Names are read again
at the start, payloads are not.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tandem_worker.tiers.files import Volume, read, write
from tandem_worker.tiers.format import (
    PAGE,
    Geometry,
    TierKey,
    entry_span,
    is_header,
    pack_entry,
    pack_header,
    place_of,
    read_table,
)
from tandem_worker.tiers.memory import allocate_rows

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_STEM = re.compile(r"[0-9a-f]{16}")
"""A segment's number, in one way of writing it."""
_KEY_FILE = "key.json"


class Place(NamedTuple):
    segment: int
    slot: int


@dataclass(slots=True, eq=False)
class _Segment:
    number: int
    path: Path
    names: list[bytes | None]
    """Names of the blocks, by slot."""
    used_at: float
    """Unix seconds."""
    num_slots: int = 0
    """Number of slots that are written."""
    descriptor: int = -1
    """File descriptor of the segment that is written to; -1 for others."""
    table: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))


class SegmentStore:
    def __init__(
        self,
        volume: Volume,
        key: TierKey,
        geometry: Geometry,
        max_segments: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`clock` has unix seconds. Every method raises OSError where the volume does."""
        self._volume, self._key, self.geometry, self._clock = volume, key, geometry, clock
        self._folder = volume.root / key.digest.hex()
        self._max_segments = max_segments
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        self._places: dict[bytes, Place] = {}
        self._open: _Segment | None = None
        self._next = 1
        self._latest = 0.0
        self.num_evicted = 0
        """Blocks that were given up for others."""
        self.horizon = 0.0
        """When the newest block that was given up was last used, in unix seconds; 0 when none was."""

    def __len__(self) -> int:
        return len(self._places)

    @property
    def capacity(self) -> int:
        """Blocks for which there is room."""
        return self._max_segments * self.geometry.num_slots

    @property
    def folder(self) -> Path:
        """Folder of this key's segments."""
        return self._folder

    def load(self, note_answer: Callable[[], None] = lambda: None) -> None:
        """Find what an earlier process has left, and remove what cannot be used: other keys' blocks, what is damaged or
        was never finished, what is beyond the limit. On the thread that writes. `note_answer`: called after each
        file."""
        with self._lock:
            self._segments.clear()
            self._places.clear()
        self.close()
        for path in self._volume.root.iterdir():
            if path != self._folder and (path / _KEY_FILE).is_file():
                for inner in () if path.is_symlink() else path.glob("*" + _SUFFIX):
                    self._volume.remove(inner)
                    note_answer()
                self._volume.remove(path)
        self._folder.mkdir(exist_ok=True)
        self._volume.save(self._folder / _KEY_FILE, self._key.to_json())
        found: list[_Segment] = []
        for path in sorted(self._folder.iterdir()):
            segment = self._read_segment(path) if path.suffix == _SUFFIX else None
            if segment is not None:
                found.append(segment)
            elif path.suffix in (_SUFFIX, ".new"):
                self._volume.remove(path)
            note_answer()
        self._next = 1 + max((segment.number for segment in found), default=0)
        found.sort(key=lambda segment: segment.used_at)
        self._latest = max((segment.used_at for segment in found), default=0.0)
        for segment in found[: max(0, len(found) - self._max_segments)]:
            self._volume.remove(segment.path)
            note_answer()
        with self._lock:
            for segment in found[max(0, len(found) - self._max_segments) :]:
                self._segments[segment.number] = segment
                for slot, name in enumerate(segment.names):
                    if name is not None:
                        self._places[name] = Place(segment.number, slot)

    def has(self, name: bytes) -> bool:
        """Whether the block is there; it counts as used."""
        place = self._places.get(name)
        if place is None:
            return False
        segment = self._segments.get(place.segment)
        if segment is not None:
            segment.used_at = self._now()
        return True

    def find(self, names: Sequence[bytes]) -> list[Place]:
        """Places of the leading ones of `names` that are there."""
        places: list[Place] = []
        for name in names:
            place = self._places.get(name)
            if place is None:
                break
            places.append(place)
        return places

    def use(self, place: Place) -> None:
        """Its segment counts as used now."""
        segment = self._segments.get(place.segment)
        if segment is not None:
            segment.used_at = self._now()

    def read(self, place: Place, count: int, rows: np.ndarray) -> int | None:
        """Slots from `place` on into `rows`, `[count or more, slot_bytes]`. How many are there as a whole; None: their
        segment was given up."""
        segment = self._segments.get(place.segment)
        if segment is None:
            return None
        size = self.geometry.slot_bytes
        descriptor = self._volume.open(segment.path)
        try:
            got = read(descriptor, rows.reshape(-1)[: count * size].data, self.geometry.slot_offset(place.slot))
        finally:
            os.close(descriptor)
        return got // size

    def plan(self, count: int) -> list[Place]:
        """Places of the next blocks, `count` or as many as the newest segment has room for. On the thread that writes.

        Gives up the segment that was used longest ago where there is no room for another one.
        """
        segment = self._open
        if segment is not None and (
            segment.num_slots == self.geometry.num_slots or segment.number not in self._segments
        ):
            self._seal(segment)
            segment = None
        if segment is None:
            while len(self._segments) >= self._max_segments:
                self._evict()
            segment = self._create()
        first = segment.num_slots
        return [Place(segment.number, slot) for slot in range(first, min(self.geometry.num_slots, first + count))]

    def append(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> None:
        """Write whole slots, which `rows` are, to where `plan` said. On the thread that writes."""
        segment = self._open
        assert segment is not None, "plan comes before append"
        first, count = places[0].slot, len(places)
        data = rows[:count].reshape(-1).data
        write(segment.descriptor, data, self.geometry.slot_offset(first))
        start, end = entry_span(first, count)
        entries = b"".join(pack_entry(name, place_of(*place)) for name, place in zip(names, places, strict=True))
        segment.table[start:end] = np.frombuffer(entries, np.uint8)
        start, end = start // PAGE * PAGE, -(-end // PAGE) * PAGE
        write(segment.descriptor, segment.table[start:end].data, PAGE + start)
        with self._lock:
            segment.num_slots = first + count
            if segment.number not in self._segments:
                return  # discarded meanwhile
            segment.used_at = self._now()
            for place, name in zip(places, names, strict=True):
                segment.names[place.slot] = name
                self._places.setdefault(name, place)

    def discard(self, place: Place) -> None:
        """What is at this place is not what it should be: its segment is not trusted any more, and goes."""
        with self._lock:
            segment = self._segments.pop(place.segment, None)
            if segment is None:
                return
            self._forget(segment)
        self._volume.remove(segment.path)

    def _now(self) -> float:
        """A clock that is set back must not make what is used now the oldest."""
        self._latest = max(self._latest, self._clock())
        return self._latest

    def close(self) -> None:
        """Write nothing any more."""
        if self._open is not None:
            self._seal(self._open)

    def _read_segment(self, path: Path) -> _Segment | None:
        """None: it is not one of this key and geometry, or its header is damaged."""
        if not _STEM.fullmatch(path.stem) or path.is_symlink() or not path.is_file():
            return None
        number = int(path.stem, 16)
        head = allocate_rows(1, self.geometry.first_slot)[0]
        descriptor = self._volume.open(path)
        try:
            if read(descriptor, head.data, 0) < len(head):
                return None
            size, used_at = os.fstat(descriptor).st_size, os.fstat(descriptor).st_mtime
        finally:
            os.close(descriptor)
        if not is_header(head.data, self._key, self.geometry, number):
            return None
        names = read_table(head[PAGE:].data, self.geometry, number)
        whole = max(0, size - self.geometry.first_slot) // self.geometry.slot_bytes
        names[whole:] = [None] * max(0, len(names) - whole)
        if not any(names):
            return None
        return _Segment(number, path, names, used_at, num_slots=self.geometry.num_slots)

    def _create(self) -> _Segment:
        number, geometry = self._next, self.geometry
        head = allocate_rows(1, geometry.first_slot)[0]
        head[:PAGE] = np.frombuffer(pack_header(self._key, geometry, number), np.uint8)
        path = self._folder / f"{number:016x}{_SUFFIX}"
        descriptor = self._volume.create(path, head)
        self._next = number + 1
        segment = _Segment(
            number, path, [None] * geometry.num_slots, self._now(), descriptor=descriptor, table=head[PAGE:]
        )
        with self._lock:
            self._segments[number] = self._open = segment
        return segment

    def _seal(self, segment: _Segment) -> None:
        descriptor, segment.descriptor, segment.table = segment.descriptor, -1, np.empty(0, np.uint8)
        self._open = None
        os.close(descriptor)  # whatever that says, the number is free, and others' next

    def _evict(self) -> None:
        with self._lock:
            oldest = min(
                (segment for segment in self._segments.values() if segment is not self._open),
                key=lambda segment: segment.used_at,
            )
            del self._segments[oldest.number]
            self.num_evicted += self._forget(oldest)
            self.horizon = max(self.horizon, oldest.used_at)
        self._volume.remove(oldest.path)

    def _forget(self, segment: _Segment) -> int:
        """Under the lock. How many blocks were there."""
        count = 0
        for name in segment.names:
            if name is not None and self._places.get(name, Place(0, 0)).segment == segment.number:
                del self._places[name]
                count += 1
        return count
