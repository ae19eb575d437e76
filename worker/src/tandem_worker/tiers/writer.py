"""What memory is about to give up goes to a tier, on a thread of its own.

The engine offers idle blocks from the cold end when they are due, a batch at a time. They are copied first and handed
back, however long the tier takes; then summed and written. What the tier does not keep up with is lost to memory's
eviction, which never waits.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from tandem_worker.engine.tiers import Offer, TierEngine
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.memory import BlockMemory
from tandem_worker.tiers.policy import WriteBudget, plan_batch
from tandem_worker.tiers.slots import SlotStore
from tandem_worker.tiers.stats import Counters

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 1.0
"""Between two looks at whether the engine that should answer is still wanted."""


class BlockWriter:
    """One thread runs `write_due`; the engine's calls `due` and `offered`."""

    def __init__(
        self,
        slots: SlotStore,
        memory: BlockMemory,
        health: TierHealth,
        counters: Counters,
        budget: WriteBudget,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._slots, self._memory, self._health, self._counters = slots, memory, health, counters
        self.budget = budget
        self._clock, self._wall = clock, wall
        self._due = threading.Event()
        self._offers: queue.SimpleQueue[Offer | None] = queue.SimpleQueue()
        self._count = min(plan_batch(slots.geometry.slot_bytes), slots.most_slots)
        self._rows = slots.allocate(self._count)
        self._busy_since: float | None = None
        self._closed = False
        self.engine: TierEngine | None = None

    def due(self) -> None:
        """There are blocks to be written. Any thread."""
        self._due.set()

    def offered(self, offer: Offer | None) -> None:
        """On the engine thread: what `offer_blocks` has asked for."""
        self._offers.put(offer)

    def passes(self, name: bytes, reused: bool) -> bool:
        """On the engine thread: the block is there, or is not worth being written."""
        return self._slots.has(name) or not self.budget.admits(reused=reused, now=self._wall())

    @property
    def busy_seconds(self) -> float:
        """How long the present call to the system has taken; 0 while there is none."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def close(self) -> None:
        """The thread ends as soon as it can."""
        self._closed = True
        self._due.set()

    def wait(self, seconds: float) -> bool:
        """Sleep until blocks are due, for so long at most; whether they are."""
        return self._due.wait(seconds)

    def write_due(self) -> None:
        """Everything that is due now, coldest first."""
        self._due.clear()
        self._write_all(hottest=False, deadline=None)

    def write_rest(self, deadline: float) -> None:
        """Everything that is idle, hottest first, until then by this object's clock."""
        self._write_all(hottest=True, deadline=deadline)

    def _write_all(self, *, hottest: bool, deadline: float | None) -> None:
        engine = self.engine
        assert engine is not None, "the tier is joined with the engine before there are blocks"
        while self._health.on and not self._closed and (deadline is None or self._clock() < deadline):
            engine.offer_blocks(self._count, hottest=hottest)
            offer = self._await_offer()
            if offer is None:
                return
            if self._closed or not self._health.on:
                engine.hand_back(offer)  # it was asked for before that
                return
            # Of a chain the deepest block is the coldest one: parents are written before their children.
            order = slice(None) if hottest else slice(None, None, -1)
            self._write(engine, offer, order)

    def _await_offer(self) -> Offer | None:
        """None: nothing is due, or who should answer has ended."""
        while True:
            try:
                return self._offers.get(timeout=_ANSWER_SECONDS)
            except queue.Empty:
                if self._closed:
                    return None

    def _write(self, engine: TierEngine, offer: Offer, order: slice) -> None:
        began = self._clock()
        ids, names = offer.block_ids[order], offer.names[order]
        start = self._slots.geometry.slot_header_bytes
        try:
            self._memory.copy_out(ids, self._rows[: len(ids)], start, offer.fence)
        finally:
            engine.hand_back(offer)
        self._busy_since = self._clock()
        try:
            written = self._slots.write(names, self._rows[: len(ids)])
        except TierError as error:
            self._health.fail(error, Work.WRITE)
            return
        finally:
            self._busy_since = None
        if written:
            self._health.passed(Work.WRITE)
        num_bytes = written * self._slots.geometry.slot_bytes
        self.budget.record(num_bytes, self._wall())
        self._counters.count_written(written, num_bytes, self._clock() - began)
