"""What tiers have in common that blocks are written to and loaded from: when they are on, who writes, and how they end.

They differ in what a look at them is (`_open`), and in what is done between two writes (`_tend`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from tandem_worker.engine.tiers import Offer, TierEngine
from tandem_worker.host.vitals import Vitals
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.loads import LoadPool
from tandem_worker.tiers.policy import CLEAR_GAIN, LEAST_GAIN, is_slow
from tandem_worker.tiers.writer import BlockWriter


class WrittenTier(ABC):
    """`bind` it with the engine before the first request. `BlockSink` but for what its writer decides."""

    def __init__(
        self,
        pool: LoadPool,
        writer: BlockWriter,
        health: TierHealth,
        vitals: Vitals | None,
        clock: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        """`retry_seconds`: between two looks while it is off."""
        self._pool, self._writer, self.health = pool, writer, health
        self._vitals, self._clock, self._retry_seconds = vitals or Vitals(), clock, retry_seconds
        self._closed = threading.Event()
        self._flush_until: float | None = None
        self._flushed = threading.Event()
        self._retry_at = 0.0
        self._threads: list[threading.Thread] = []
        health.on_off = self._go_off

    def bind(self, engine: TierEngine) -> None:
        """Join with the engine."""
        self._pool.engine = self._writer.engine = engine

    def flush(self, seconds: float) -> bool:
        """Write what is idle in memory, hottest first, for so long at most. Whether everything was written."""
        self._flushed.clear()
        if not self.health.on:
            return False
        self._flush_until = self._clock() + seconds
        self._writer.due()
        return self._flushed.wait(seconds) and self.health.on

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def passes(self, name: bytes, reused: bool) -> bool:
        """As `BlockSink.passes`."""
        return self._writer.passes(name, reused)

    def due(self) -> None:
        """As `BlockSink.due`."""
        self._writer.due()

    @property
    def wants_blocks(self) -> bool:
        """Whether it is in use. Any thread."""
        return self.health.on

    def offered(self, offer: Offer | None) -> None:
        """As `BlockSink.offered`."""
        self._writer.offered(offer)

    # -- threads ---------------------------------------------------------------------------------------------------

    def _start_thread(self, name: str, target: Callable[[], Any]) -> None:
        self._threads.append(self._vitals.start_thread(name, target, is_over=self._closed.is_set))

    def _end_work(self) -> None:
        """Nothing is begun any more, and loads under way end with what is there."""
        self._closed.set()
        self._flushed.set()
        self._pool.close()
        self._writer.close()

    def _join_threads(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    @abstractmethod
    def _open(self) -> None:
        """Look whether it can be used; switch it on, or say why it stays off."""

    def _may_look(self) -> bool:
        """Whether a look can tell anything by now."""
        return True

    @abstractmethod
    def _find_pause(self) -> float:
        """Seconds that may pass until `_tend`, if nothing is to be written."""

    @abstractmethod
    def _tend(self) -> None:
        """What is due besides blocks, after a write or a pause."""

    def _run_writer(self) -> None:
        while not self._closed.is_set():
            if not self.health.on:
                self._closed.wait(max(0.0, self._retry_at - self._clock()))
                self._retry_at = self._clock() + self._retry_seconds
                if not self._closed.is_set() and self._may_look():
                    self._open()
                continue
            if self._writer.wait(self._find_pause()):
                self._writer.write_due()
                if self._flush_until is not None:
                    self._writer.write_rest(self._flush_until)
                    self._flush_until = None
                    self._flushed.set()
            self._tend()

    def _go_off(self) -> None:
        """On the thread that found out why: loads end with what is there, and the writer looks again after a while."""
        self._retry_at = self._clock() + self._retry_seconds
        self._flushed.set()
        self._pool.cut_all()
        self._writer.due()
        if self._writer.engine is not None:
            self._writer.engine.drop_kept()

    def _watch_speed(self, num_readers: int, slot_bytes: int, reason: str) -> None:
        """Switch it off for this reason where reading blocks is not worth it. What a probe says does not end that: it
        is read by one reader, while nothing else is, and it would hide the first hundreds of megabytes of blocks."""
        try:
            self._check_speed(num_readers, slot_bytes, reason)
        except TierError as error:
            self.health.fail(error, Work.SPEED)
            return
        rate, per_block = self._pool.blocks_rate, self._pool.seconds_per_block
        if rate is None or per_block is None:
            return
        if not is_slow(rate * num_readers, slot_bytes, per_block, CLEAR_GAIN):
            self.health.passed(Work.SPEED)

    def _check_speed(self, num_readers: int, slot_bytes: int, reason: str) -> None:
        """Raises TierError for this reason where reading is not worth it."""
        rate, per_block = self._pool.rate, self._pool.seconds_per_block
        if rate is None or per_block is None:
            return
        rate *= num_readers
        if is_slow(rate, slot_bytes, per_block):
            needed = LEAST_GAIN * slot_bytes / per_block
            raise TierError(
                reason,
                f"it is read at {rate / 1e6:.1f} MB/s; it takes {needed / 1e6:.1f} MB/s to be {LEAST_GAIN:g} times as "
                "fast as computing",
            )
