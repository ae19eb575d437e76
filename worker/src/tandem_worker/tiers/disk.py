"""The disk tier of one worker: a source and a sink of the engine's, over a volume of its own.

Three threads read, one writes and mends, one watches the clock. Whatever happens to the volume, the engine computes:
the tier switches itself off, says why, and looks at the volume again every `RETRY_SECONDS`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt

from tandem_worker.engine.tiers import LoadOrder, Run
from tandem_worker.host.vitals import Vitals
from tandem_worker.tiers.errors import (
    VOLUME_FAILED,
    VOLUME_FROZEN,
    VOLUME_FULL,
    VOLUME_SLOW,
    VOLUME_TOO_SMALL,
    TierError,
    describe,
)
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import NAME_BYTES, TierKey, plan_geometry
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.loads import FROZEN_SECONDS, NUM_READERS, LoadPool
from tandem_worker.tiers.memory import BlockMemory
from tandem_worker.tiers.policy import WriteBudget, is_sooner, plan_limit, plan_segment_bytes
from tandem_worker.tiers.slots import DiskSlots
from tandem_worker.tiers.stats import Counters, TierStats
from tandem_worker.tiers.store import SegmentStore
from tandem_worker.tiers.writer import BlockWriter
from tandem_worker.tiers.written import WrittenTier

logger = logging.getLogger(__name__)

RETRY_SECONDS = 15.0
PROBE_BYTES = 2 << 20
_SAVE_SECONDS = 10.0
"""So often it is saved what was measured. Besides it shows whether a disk answers that nobody reads or writes."""
_STATE_FILE = "state.json"
_MOST_STATE_BYTES = 1 << 16


class _State(BaseModel):
    """What a next process is told."""

    seconds_per_block: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    written: list[tuple[Annotated[float, Field(allow_inf_nan=False)], NonNegativeInt]]
    """As `WriteBudget.spent`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskLimits:
    size_bytes: int
    """Size of the volume: less is used."""
    write_through: bool = False
    """Blocks are written as soon as they are idle, not when memory is about to give them up."""
    max_daily_writes: int | None = None
    """Bytes; None: no limit."""
    cold_share: float = 0.25
    """Share of memory that is on the disk before it is given up."""
    segment_bytes: int | None = None
    """None: by the size of the volume."""


class DiskTier(WrittenTier):
    """`engine.tiers.Tier`. Build it, `bind` it with the engine before the first request, `start` it."""

    def __init__(
        self,
        root: Path,
        key: TierKey,
        memory: BlockMemory,
        block_size: int,
        limits: DiskLimits,
        vitals: Vitals | None = None,
        volume: Volume | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_size`: tokens per block."""
        one = plan_geometry(memory.layer_bytes, 0)
        segment_bytes = limits.segment_bytes or plan_segment_bytes(limits.size_bytes, one.slot_bytes)
        geometry = plan_geometry(memory.layer_bytes, segment_bytes)
        self._limits, self._block_size, self._memory = limits, block_size, memory
        self._volume = volume or Volume(root)
        self._store = SegmentStore(self._volume, key, geometry, plan_limit(limits.size_bytes, geometry.segment_bytes))
        self._counters, health = Counters(block_size), TierHealth()
        self._slots, budget = DiskSlots(self._store, key), WriteBudget(limits.max_daily_writes)
        pool = LoadPool(self._slots, key, memory, health, self._counters, clock)
        writer = BlockWriter(self._slots, memory, health, self._counters, budget, clock)
        super().__init__(pool, writer, health, vitals, clock, RETRY_SECONDS)
        self._asked_since: float | None = None
        """When the volume was last asked for something besides blocks, while it has not answered."""
        self._saved_at = 0.0

    def plan_cold_blocks(self, num_blocks: int) -> int:
        """How many of `num_blocks` in memory, those that are given up next, are to be on the disk."""
        return num_blocks + 1 if self._limits.write_through else int(num_blocks * self._limits.cold_share)

    def start(self) -> None:
        """Look at the volume, and serve. Returns at once; until the volume is known the tier is off.

        Raises ThreadStartError.
        """
        for number in range(NUM_READERS):
            self._start_thread(f"kv-disk-{number}", self._pool.run_reader)
        self._start_thread("kv-disk-write", self._run_writer)
        self._start_thread("kv-disk-watch", self._run_watch)

    def close(self, timeout: float = 2.0) -> None:
        """End the threads, those that hang in the system excepted. Loads under way end with what is there."""
        self._end_work()
        self._join_threads(timeout)
        if not any(thread.is_alive() for thread in self._threads):
            self._store.close()
            self._save_state()
            self._volume.unlock()

    def stats(self) -> TierStats:
        """Any thread."""
        cause = self.health.cause
        return replace(
            self._counters.read(),
            reason=None if cause is None else cause.reason,
            message="" if cause is None else cause.describe(),
            capacity_tokens=self._store.capacity * self._block_size,
            stored_tokens=len(self._store) * self._block_size,
            horizon=self._store.horizon,
            evictions=self._store.num_evicted,
        )

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        if seconds_per_block is not None:
            self._pool.seconds_per_block = seconds_per_block
        if not self.health.on:
            return None
        places = self._store.find(names)
        if not places:
            return None
        seconds = self._pool.predict(len(places), self._pool.count_pieces(places))
        if not is_sooner(seconds, len(places), self._pool.seconds_per_block):
            return None
        return Run(count=len(places), seconds=seconds)

    def start_load(self, order: LoadOrder) -> None:
        """As `BlockSource.start`."""
        places = self._store.find(order.names)
        if not places or not self.health.on:
            engine = self._pool.engine
            assert engine is not None, "the tier is joined with the engine before a load"
            engine.load_ended(order.load, 0)
            return
        if order.seconds_per_block is None:
            order = replace(order, seconds_per_block=self._pool.seconds_per_block)
        self._pool.start(order, places)

    def cancel(self, load: int) -> None:
        self._pool.cancel(load)

    def read_blocks(self, names: Sequence[bytes], rows: np.ndarray) -> int:
        """As `LoadPool.read`. Any thread."""
        return self._pool.read(self._store.find(names[: len(rows)]), names, rows)

    # -- threads ---------------------------------------------------------------------------------------------------

    def _may_look(self) -> bool:
        return not self._pool.hangs

    def _find_pause(self) -> float:
        return _SAVE_SECONDS

    def _tend(self) -> None:
        if self.health.on and self._clock() - self._saved_at >= _SAVE_SECONDS:
            self._saved_at = self._clock()
            self._save_state()

    def _run_watch(self) -> None:
        while not self._closed.is_set():
            self._pool.watch_once()
            asked = self._asked_since
            if self._writer.busy_seconds > FROZEN_SECONDS:
                error = TierError(VOLUME_FROZEN, f"a write has not returned for {FROZEN_SECONDS:g} s")
                self.health.fail(error, Work.WRITE)
            elif asked is not None and self._clock() - asked > FROZEN_SECONDS:
                self.health.fail(TierError(VOLUME_FROZEN, f"no answer from it for {FROZEN_SECONDS:g} s"))
            elif self.health.on:
                self._watch_speed(NUM_READERS, self._store.geometry.slot_bytes, VOLUME_SLOW)

    def _open(self) -> None:
        """Look at the volume, and at what is on it; switch the tier on, or say why it stays off."""
        self._asked_since = self._clock()
        try:
            self._check_size()
            self._volume.unlock()
            self._volume.lock()
            self._check_room()
            self._pool.set_rate(PROBE_BYTES, self._volume.probe(PROBE_BYTES))
            self._note_answer()
            self._store.load(self._note_answer)
            self._read_state()
            self._check_speed(NUM_READERS, self._store.geometry.slot_bytes, VOLUME_SLOW)
            self._write_state()
            self._note_answer()
            self._saved_at = self._clock()
            self._try_blocks()
        except TierError as error:
            self.health.fail(error)
            return
        except OSError as error:
            self.health.fail(describe(error, f"the volume at {self._volume.root} cannot be used"))
            return
        finally:
            self._asked_since = None
        self.health.recover(Work.READ, Work.WRITE)
        self._writer.due()  # whatever has become due meanwhile was told once
        logger.info(
            "blocks are kept on a disk",
            extra={
                "stored_tokens": len(self._store) * self._block_size,
                "capacity_tokens": self._store.capacity * self._block_size,
                "direct": self._volume.is_direct,
            },
        )

    def _note_answer(self) -> None:
        """The volume has answered one of many questions. Raises TierError where it took too long for that: blocks would
        hang there too."""
        now, since = self._clock(), self._asked_since
        self._asked_since = now
        if since is not None and now - since > FROZEN_SECONDS:
            raise TierError(VOLUME_FROZEN, f"an answer from it took {now - since:.1f} s")

    def _try_blocks(self) -> None:
        """Do again what has failed with blocks: write one, of a name that nobody asks for; read those that could not be
        read. Where that fails again though all else is well, their place is at fault, and its segment goes.

        Raises TierError.
        """
        if self.health.owes(Work.WRITE):
            rows = self._slots.allocate(1)
            rows[:] = 0
            self._slots.write([secrets.token_bytes(NAME_BYTES)], rows)
            self._note_answer()
        if self.health.owes(Work.READ) and self._pool.failed is not None:
            places, names = self._pool.failed
            try:
                self._slots.read(places, names, self._slots.allocate(len(places)))
                self._note_answer()
            except TierError as error:
                if error.reason in (VOLUME_FAILED, VOLUME_FROZEN):
                    self._slots.discard(places[0], names[0])
                raise

    def _check_size(self) -> None:
        """Raises TierError."""
        if not self._store.capacity:
            raise TierError(
                VOLUME_TOO_SMALL,
                f"kv.disk.size is {self._limits.size_bytes} bytes, which has no room for a segment of "
                f"{self._store.geometry.segment_bytes}; raise it",
            )

    def _check_room(self) -> None:
        """Refuse a volume that was full and has only a few bytes free: it must not seem well. Raises TierError,
        OSError."""
        cause, free = self.health.cause, self._volume.free_bytes
        needed = PROBE_BYTES + self._store.geometry.segment_bytes
        if cause is not None and cause.reason == VOLUME_FULL and free < needed:
            raise TierError(VOLUME_FULL, f"{free} bytes are free on {self._volume.root}, and {needed} are needed")

    def _read_state(self) -> None:
        """What an earlier process has measured. A file that cannot be read is as good as none."""
        try:
            with (self._store.folder / _STATE_FILE).open("rb") as file:
                state = _State.model_validate_json(file.read(_MOST_STATE_BYTES))
        except FileNotFoundError:
            return
        except ValueError as error:
            logger.warning("what an earlier worker has measured cannot be read: %s", error)
            return
        self._pool.seconds_per_block = self._pool.seconds_per_block or state.seconds_per_block
        if not self._writer.budget.spent:
            self._writer.budget = WriteBudget(self._limits.max_daily_writes, state.written)

    def _save_state(self) -> None:
        self._asked_since = self._clock()
        try:
            self._write_state()
        except TierError as error:
            self.health.fail(error)
        finally:
            self._asked_since = None

    def _write_state(self) -> None:
        """For a next process. Without it that has to measure anew, and writes as if nothing had been written. Raises
        TierError."""
        state = _State(seconds_per_block=self._pool.seconds_per_block, written=self._writer.budget.spent)
        path = self._store.folder / _STATE_FILE
        try:
            self._volume.save(path, state.model_dump_json())
        except OSError as error:
            raise describe(error, f"{path} cannot be written") from error
