"""Loads under way: read a piece, verify it, copy it to where it belongs, on a few threads; and a look at the clock.

What is read lands in a buffer of the thread that reads. It is copied to the engine's blocks once it is verified, under
the lock of its load, unless the load has ended: a read that never returns holds up a thread, and no request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem_worker.engine.tiers import LoadOrder, TierEngine
from tandem_worker.tiers.book import Load, LoadBook
from tandem_worker.tiers.errors import VOLUME_FROZEN, TierError
from tandem_worker.tiers.format import TierKey, is_intact
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.memory import BlockMemory
from tandem_worker.tiers.policy import plan_pieces, predict_seconds
from tandem_worker.tiers.slots import SlotStore
from tandem_worker.tiers.stats import Counters
from tandem_worker.tiers.store import Place
from tandem_worker.transfer.contract import BandwidthMeter

logger = logging.getLogger(__name__)

NUM_READERS = 3
FROZEN_SECONDS = 5.0
"""A call to the system that takes longer than this does not come back, as far as anybody can tell."""
_IDLE_SECONDS = 0.5


@dataclass(slots=True, eq=False, kw_only=True)
class _Load(Load):
    places: list[Place]
    arrived: list[bool]
    """Whether a block has arrived, by block."""
    limit: int
    """Blocks before the first one that cannot be had."""

    def stop_at(self, index: int) -> None:
        """Blocks from `index` on are computed."""
        with self.lock:
            self.limit = min(self.limit, index)

    @property
    def num_wanted(self) -> int:
        return len(self.places)


class LoadPool:
    """Reads on threads that `run_reader` is given; `watch_once` cuts what is late."""

    def __init__(
        self,
        slots: SlotStore,
        key: TierKey,
        memory: BlockMemory,
        health: TierHealth,
        counters: Counters,
        clock: Callable[[], float] = time.monotonic,
        num_readers: int = NUM_READERS,
    ) -> None:
        """`num_readers`: threads that are given to `run_reader`."""
        self._num_readers = num_readers
        self._slots, self._key, self._memory, self._health, self._counters = slots, key, memory, health, counters
        self._clock = clock
        self._wake = threading.Condition()
        """Guards what follows; never taken while a load's lock is held by the same thread."""
        self._jobs: deque[tuple[_Load, int, int]] = deque()
        """A load, and `[first, end)` of its blocks."""
        self._queued_bytes = 0
        self._busy_since: dict[int, float] = {}
        """Readers that are in a call to the system, by thread."""
        self._meter = BandwidthMeter()
        self._closed = False
        self._book: LoadBook[_Load] = LoadBook(counters, clock)
        self.seconds_per_block: float | None = None
        """What computing one takes, as the engine told last."""
        self._most = slots.most_slots
        self.failed: tuple[Sequence[Place], Sequence[bytes]] | None = None
        """The blocks that could not be read last, or not in time, in one read, and where they are."""
        self._read = 0, 0.0
        """Bytes of blocks that were read since the rate was set, and what that took, about: several threads count."""

    @property
    def engine(self) -> TierEngine | None:
        """Whom loads are for; None before it is known."""
        return self._book.engine

    @engine.setter
    def engine(self, engine: TierEngine) -> None:
        self._book.engine = engine

    @property
    def rate(self) -> float | None:
        """Bytes per second of one reader, verified and copied; None before the first."""
        return self._meter.rate

    @property
    def blocks_rate(self) -> float | None:
        """As `rate`, of the blocks alone that were read since `set_rate`; None before the first."""
        num_bytes, seconds = self._read
        return num_bytes / seconds if seconds else None

    def set_rate(self, num_bytes: int, seconds: float) -> None:
        """So many bytes of the volume were read in so many seconds; what was known before does not count."""
        self._meter, self._read = BandwidthMeter(), (0, 0.0)
        self._meter.observe(num_bytes, seconds)

    def _note_rate(self, num_bytes: int, seconds: float) -> None:
        if not num_bytes:  # what had been given up meanwhile was not read
            return
        self._meter.observe(num_bytes, seconds)
        self._read = self._read[0] + num_bytes, self._read[1] + seconds

    def predict(self, num_blocks: int, num_pieces: int) -> float:
        """Seconds until so many blocks would be there."""
        size = self._slots.geometry.slot_bytes
        return predict_seconds(num_blocks * size, self._queued_bytes, num_pieces, self._num_readers, self._meter.rate)

    def count_pieces(self, places: Sequence[Place]) -> int:
        """Reads that it takes to bring these."""
        return len(plan_pieces(places, self._most))

    def start(self, order: LoadOrder, places: Sequence[Place]) -> None:
        """Begin with it. Any thread."""
        count = len(places)
        load = _Load(order=order, began=self._clock(), places=list(places), arrived=[False] * count, limit=count)
        self._book.add(load)
        with self._wake:
            self._jobs.extend((load, first, end) for first, end in plan_pieces(places, self._most))
            self._queued_bytes += count * self._slots.geometry.slot_bytes
            self._wake.notify_all()

    def cancel(self, number: int) -> None:
        """As `LoadBook.cancel`."""
        self._book.cancel(number)

    def cut_all(self) -> None:
        """The tier is off: what is there stays."""
        self._book.cut_all()

    def close(self) -> None:
        """Threads end as soon as they can; loads end with what is there."""
        self._book.cut_all()
        self._book.close()
        with self._wake:
            self._closed = True
            self._wake.notify_all()

    def run_reader(self) -> None:
        """One thread's work until `close`."""
        rows = self._slots.allocate(self._most)
        while True:
            with self._wake:
                while not self._jobs and not self._closed:
                    self._wake.wait()
                if self._closed:
                    return
                load, first, end = self._jobs.popleft()
                self._busy_since[threading.get_ident()] = self._clock()
            try:
                if not load.ended and first < load.limit:
                    self._bring(load, first, end, rows)
            finally:
                with self._wake:
                    self._queued_bytes -= (end - first) * self._slots.geometry.slot_bytes
                    del self._busy_since[threading.get_ident()]
            if load.valid >= load.limit:
                self._book.end(load)

    def wake(self) -> None:
        """`watch_once` is to look again."""
        self._book.wake()

    def watch_once(self, find_due: Callable[[], float | None] = lambda: None) -> None:
        """As `LoadBook.cut_late`, for half a second at most; then look for readers that hang."""
        self._book.cut_late(_IDLE_SECONDS, find_due)
        if not self._closed and self.hangs and self._health.on:
            self._health.fail(TierError(VOLUME_FROZEN, f"a read has not returned for {FROZEN_SECONDS:g} s"), Work.READ)

    @property
    def hangs(self) -> bool:
        """Whether a reader has been in one call for long."""
        with self._wake:
            return any(self._clock() - since > FROZEN_SECONDS for since in self._busy_since.values())

    def _bring(self, load: _Load, first: int, end: int, rows: np.ndarray) -> None:
        """Read, verify and copy blocks `first` to `end` of a load, which follow one another in the store."""
        began, count = self._clock(), end - first
        places, names = load.places[first:end], load.order.names[first:end]
        try:
            got = self._slots.read(places, names, rows)
        except TierError as error:
            load.stop_at(first)
            self._note_failure(places, names, error)
            return
        self._note_late(began, places, names)
        good = self._count_intact(places[:got], names[:got], rows)
        self._note_good(good)
        with load.lock:
            is_late = load.ended
            if not is_late:
                self._take(load, first, good, rows)
        seconds = self._clock() - began
        self._note_rate(got * self._slots.geometry.slot_bytes, seconds)  # late ones too: else none would seem slow
        if is_late:
            return
        self._slots.use(places[0])
        self._counters.count_read(good * self._slots.geometry.slot_bytes, seconds)
        if good == count:
            return
        load.stop_at(first + good)
        if good < got:
            self._counters.count_damage()
            logger.warning("a damaged block of a tier is computed again", extra={"place": str(places[good])})
            self._discard(places[good], names[good])

    def _take(self, load: _Load, first: int, good: int, rows: np.ndarray) -> None:
        """Under the lock of the load: so many blocks from `first` on are what they should be."""
        if good:
            ids = load.order.block_ids[first : first + good]
            self._memory.copy_in(rows[:good], self._slots.geometry.slot_header_bytes, ids)
        load.arrived[first : first + good] = [True] * good
        while load.valid < len(load.arrived) and load.arrived[load.valid]:
            load.valid += 1

    def read(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> int:
        """The leading ones of these blocks that follow one another, verified, into `rows`: whole slots, as many as
        those are at most. How many; on the calling thread, for who gives them to others."""
        if not places or not self._health.on:
            return 0
        _, count = plan_pieces(places, len(rows))[0]
        places, names, began = places[:count], names[:count], self._clock()
        with self._wake:
            self._busy_since[threading.get_ident()] = began
        try:
            got = self._slots.read(places, names, rows)
            self._note_late(began, places, names)
        except TierError as error:
            self._note_failure(places, names, error)
            return 0
        finally:
            with self._wake:
                del self._busy_since[threading.get_ident()]
        good = self._count_intact(places[:got], names[:got], rows)
        self._note_good(good)
        if good < got:
            self._counters.count_damage()
            self._discard(places[good], names[good])
        elif got:
            self._slots.use(places[0])
        return good

    def _note_failure(self, places: Sequence[Place], names: Sequence[bytes], error: TierError) -> None:
        self.failed = places, names
        self._health.fail(error, Work.READ)

    def _note_late(self, began: float, places: Sequence[Place], names: Sequence[bytes]) -> None:
        """A read has returned: one that hung is to be tried again, as one that failed. `watch_once` tells of it."""
        if self._clock() - began > FROZEN_SECONDS:
            self.failed = places, names

    def _note_good(self, count: int) -> None:
        if count:
            self._health.passed(Work.READ)

    def _count_intact(self, places: Sequence[Place], names: Sequence[bytes], rows: np.ndarray) -> int:
        for row, (place, name) in enumerate(zip(places, names, strict=True)):
            if not is_intact(rows[row].data, self._slots.geometry, self._key, name, self._slots.seed(place)):
                return row
        return len(places)

    def _discard(self, place: Place, name: bytes) -> None:
        try:
            self._slots.discard(place, name)
        except TierError as error:
            self._health.fail(error)
