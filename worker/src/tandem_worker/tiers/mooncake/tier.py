"""Mooncake's store as a tier of one worker: a source and a sink of the engine's, shared with other workers.

Two threads read, one writes, one asks what is there, one watches the clock. Whatever happens on the other side, the
engine computes: the tier switches itself off, says why, and tries a real write and read every `RETRY_SECONDS`.

While it is on and has written nothing for `PROBE_SECONDS` it tries one too, so that a store that has gone is told of
within those, a call's deadline and the way to the operator, whether or not anybody asks for anything.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem_worker.engine.tiers import LoadOrder, Run
from tandem_worker.host.vitals import Vitals
from tandem_worker.tiers.errors import (
    STORE_DISK_FULL,
    STORE_FAILED,
    STORE_FROZEN,
    STORE_SLOW,
    STORE_UNREACHABLE,
    TierError,
)
from tandem_worker.tiers.format import NAME_BYTES, TierKey, plan_geometry
from tandem_worker.tiers.health import TierHealth, Work
from tandem_worker.tiers.loads import FROZEN_SECONDS, LoadPool
from tandem_worker.tiers.memory import BlockMemory
from tandem_worker.tiers.mooncake.asking import Odds
from tandem_worker.tiers.mooncake.client import MooncakeClient
from tandem_worker.tiers.mooncake.notes import Notes
from tandem_worker.tiers.mooncake.objects import MOST_NAMES, ObjectSlots, plan_most_slots
from tandem_worker.tiers.policy import WriteBudget, cut_after, is_sooner
from tandem_worker.tiers.stats import Counters, TierStats
from tandem_worker.tiers.store import Place
from tandem_worker.tiers.writer import BlockWriter
from tandem_worker.tiers.written import WrittenTier

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
"""Between two probes while the tier is off: each starts a helper process."""
PROBE_SECONDS = 4.0
"""Between two probes while it is on, and nothing is written."""
RESTART_AFTER = 4
"""So many probes in a row that nobody answers, though there is a holder that takes connections, and it is to be started
again. What hangs because of another holder, or of the master, does so for less."""
NUM_READERS = 2
"""One waits for the helper while the other verifies; more than that only wait for each other."""
FILLED = 0.85
"""Share of the memory given that has blocks: Mooncake gives 5% of it up at a time, when 90% are in use."""
ASK_SHARE = 0.5
"""Share of the time after which a load that brings nothing is cut: looking up and loading together take no longer."""


class StoreTier(WrittenTier):
    """`engine.tiers.Tier`. Build it, `bind` it with the engine before the first request, `start` it."""

    def __init__(
        self,
        address: str,
        key: TierKey,
        memory: BlockMemory,
        block_size: int,
        vitals: Vitals | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        retry_seconds: float = RETRY_SECONDS,
        notes: Path | None = None,
        given_bytes: int = 0,
    ) -> None:
        """`address`: host:port of the node's `mooncake_client`; `block_size`: tokens per block; `environment`: of the
        helper process; `notes`: folder where that client's container says what is wrong with it; `given_bytes`: what
        that client gives to the store, 0 where it is not said."""
        geometry = plan_geometry(memory.layer_bytes, 0)
        piece = plan_most_slots(geometry)
        self._client = MooncakeClient(address, (NUM_READERS + 2) * piece * geometry.slot_bytes, environment)
        self._slots = ObjectSlots(self._client, key, memory.layer_bytes, clock)
        self._counters, health = Counters(block_size, tier="store"), TierHealth("store")
        pool = LoadPool(self._slots, key, memory, health, self._counters, clock, NUM_READERS)
        writer = BlockWriter(self._slots, memory, health, self._counters, WriteBudget(None), clock)
        super().__init__(pool, writer, health, vitals, clock, retry_seconds)
        self._block_size, self._probe_seconds = block_size, min(retry_seconds, PROBE_SECONDS)
        self._notes = None if notes is None else Notes(notes)
        self._unanswered = 0
        self._room_tokens = int(given_bytes * FILLED) // geometry.slot_bytes * block_size
        self._probe_rows = self._slots.allocate(piece)
        self._asks: queue.SimpleQueue[LoadOrder | None] = queue.SimpleQueue()
        self._asking: dict[int, tuple[LoadOrder, float]] = {}
        """Orders to look up, and when each is cut. Guarded by the lock."""
        self._odds = Odds()
        self._lock = threading.Lock()

    @property
    def helper_pid(self) -> int | None:
        """The process that calls Mooncake; None while there is none."""
        return self._client.pid

    def plan_cold_blocks(self, num_blocks: int) -> int:
        """How many of `num_blocks` in memory are to be in the store: all, for others want them now."""
        return num_blocks + 1

    def start(self) -> None:
        """Reach for the store, and serve. Returns at once; until it is reached the tier is off.

        Raises ThreadStartError.
        """
        for number in range(NUM_READERS):
            self._start_thread(f"kv-store-{number}", self._pool.run_reader)
        self._start_thread("kv-store-write", self._run_writer)
        self._start_thread("kv-store-ask", self._run_asks)
        self._start_thread("kv-store-watch", self._run_watch)

    def close(self, timeout: float = 2.0) -> None:
        """End the helper and the threads. Loads under way end with what is there."""
        self._end_work()
        self._asks.put(None)
        self._end_asks(self._take_asks(lambda _: True))
        self._client.close()
        self._join_threads(timeout)

    def stats(self) -> TierStats:
        """Any thread."""
        cause, rate = self.health.cause, self._pool.rate
        per_token = self._slots.geometry.slot_bytes / self._block_size
        return replace(
            self._counters.read(),
            capacity_tokens=self._room_tokens,
            tokens_per_second=None if rate is None else rate * NUM_READERS / per_token,
            reason=None if cause is None else cause.reason,
            message="" if cause is None else cause.describe(),
            stored_tokens=len(self._slots) * self._block_size,
        )

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        if seconds_per_block is not None:
            self._pool.seconds_per_block = seconds_per_block
        if not self.health.on or not names:
            return None
        count = self._slots.count_known(names)
        if count is None:
            count = self._slots.count_present(names)
            missing, per_block = len(names) - count, self._pool.seconds_per_block
            if self._odds.favour(missing, per_block, _wait_at_most(missing, per_block)):
                return Run(count=0, seconds=0.0)
        seconds = self._pool.predict(count, self._pool.count_pieces(_place(count)))
        if not count or not is_sooner(seconds, count, self._pool.seconds_per_block):
            return None
        return Run(count=count, seconds=seconds)

    def start_load(self, order: LoadOrder) -> None:
        """As `BlockSource.start`."""
        engine = self._pool.engine
        assert engine is not None, "the tier is joined with the engine before a load"
        if not self.health.on:
            engine.load_ended(order.load, 0)
        elif order.asks:
            most = _wait_at_most(len(order.asks), order.seconds_per_block or self._pool.seconds_per_block)
            with self._lock:
                self._asking[order.load] = order, self._clock() + most
            self._asks.put(order)
            self._pool.wake()
        else:
            if order.seconds_per_block is None:
                order = replace(order, seconds_per_block=self._pool.seconds_per_block)
            self._pool.start(order, _place(len(order.names)))

    def cancel(self, load: int) -> None:
        with self._lock:
            self._asking.pop(load, None)
        self._pool.cancel(load)

    # -- threads ---------------------------------------------------------------------------------------------------

    def _find_pause(self) -> float:
        return max(0.0, self._slots.answered_at + self._probe_seconds - self._clock())

    def _tend(self) -> None:
        is_due = self._slots.answered_at + self._probe_seconds <= self._clock()
        if is_due and self.health.on and not self._closed.is_set():
            self._probe(1)

    def _run_asks(self) -> None:
        """Look-ups that came while one was under way are made together: on busy cores each takes several turns of other
        processes, and requests that come back one by one are computed in as many steps."""
        last: LoadOrder | None = None
        while (order := last or self._asks.get()) is not None:
            together, last = self._take_waiting(order)
            together = [each for each in together if each.load in self._asking]
            # What another one's look-up has told meanwhile is not asked again, nor is it one more in vain.
            unknown = [each for each in together if self._slots.count_known(each.asks) is None]
            if unknown:
                self._look_up(unknown)
            loads = {each.load for each in together}
            self._end_asks(self._take_asks(lambda each, loads=loads: each.load in loads))

    def _look_up(self, together: Sequence[LoadOrder]) -> None:
        """In one call. Those that ask for the same are one look-up more, found or in vain."""
        known = {each.asks: self._slots.count_present(each.asks) for each in together}
        began = self._clock()
        try:
            self._slots.ask(list(dict.fromkeys(name for asks in known for name in asks)))
        except TierError as error:
            self.health.fail(error)
        else:
            for asks, before in known.items():
                self._odds.note_answer(found=self._slots.count_present(asks) > before)
        self._odds.note_seconds(self._clock() - began)

    def _take_waiting(self, order: LoadOrder) -> tuple[list[LoadOrder], LoadOrder | None]:
        """This one and those that wait behind it, as many as one call takes; and the first one beyond that."""
        together, count = [order], len(order.asks)
        while not self._asks.empty():
            another = self._asks.get()
            if another is None:  # the thread is to end, after these
                self._asks.put(None)
                break
            count += len(another.asks)
            if count > MOST_NAMES:
                return together, another
            together.append(another)
        return together, None

    def _run_watch(self) -> None:
        while not self._closed.is_set():
            self._pool.watch_once(self._find_ask_due)
            self._cut_late_asks()
            if self._writer.busy_seconds > FROZEN_SECONDS:
                error = TierError(STORE_FROZEN, f"a write has not returned for {FROZEN_SECONDS:g} s")
                self.health.fail(error, Work.WRITE)
            elif self.health.on:
                self._watch_speed(NUM_READERS, self._slots.geometry.slot_bytes, STORE_SLOW)

    def _find_ask_due(self) -> float | None:
        with self._lock:
            return min((until for _, until in self._asking.values()), default=None)

    def _cut_late_asks(self) -> None:
        """What is known of them can be loaded all the same; the first one of which nothing is known is not waited for
        again."""
        late = self._take_asks(lambda _: True, before=self._clock())
        for order in late:
            known = self._slots.count_present(order.asks)
            self._slots.note_absent(order.asks[known : known + 1])
        self._end_asks(late, cut=True)

    def _take_asks(self, which: Callable[[LoadOrder], bool], before: float = float("inf")) -> list[LoadOrder]:
        with self._lock:
            taken = [order for order, until in self._asking.values() if until <= before and which(order)]
            for order in taken:
                del self._asking[order.load]
        return taken

    def _end_asks(self, orders: Sequence[LoadOrder], *, cut: bool = False) -> None:
        engine = self._pool.engine
        for order in orders:
            assert engine is not None, "the tier is joined with the engine before a load"
            if cut:
                self._counters.count_cut()
            engine.load_ended(order.load, 0)

    def _go_off(self) -> None:
        self._end_asks(self._take_asks(lambda _: True))
        super()._go_off()

    def _open(self) -> None:
        """Start a helper, and write, read and ask; switch the tier on, or say why it stays off.

        One that runs is no good: a holder that was started again knows nothing of the memory that it shares.
        """
        self._client.close()
        try:
            self._client.start(lambda name, target: self._vitals.start_thread(name, target, is_over=lambda: True))
        except TierError as error:
            self._fail(error, hangs=error.reason == STORE_FROZEN)
            return
        self._slots.forget()
        if not self._probe(len(self._probe_rows)):
            return
        self._unanswered = 0
        try:
            self._slots.ask([secrets.token_bytes(NAME_BYTES)])  # a look-up may be what had failed
            self._check_speed(NUM_READERS, self._slots.geometry.slot_bytes, STORE_SLOW)
        except TierError as error:
            self.health.fail(error)
            return
        self.health.recover(Work.WRITE)  # blocks are put as the probe was; those that others hold may still fail
        self._writer.due()  # whatever has become due meanwhile was told once

    def _probe(self, count: int) -> bool:
        """Write and read `count` objects; whether that is possible, and nothing is said against the holder."""
        try:
            seconds = self._slots.probe(self._probe_rows[:count])
        except TierError as error:
            self._fail(error, hangs=error.reason in (STORE_FROZEN, STORE_FAILED))
            return False
        note = None if self._notes is None else self._notes.read()
        if note is not None and note.reason == STORE_DISK_FULL:
            self.health.fail(TierError(note.reason, note.message))
            return False
        if not self.health.on:
            self._pool.set_rate(count * self._slots.geometry.slot_bytes, seconds)
        return True

    def _fail(self, error: TierError, *, hangs: bool) -> None:
        """A probe has failed. The holder's container knows why where nobody answers; one that `hangs` is to be started
        again once that has lasted."""
        note = None if self._notes is None else self._notes.read()
        if error.reason == STORE_UNREACHABLE and note is not None:
            error = TierError(note.reason, f"{error}: {note.message}")
        self.health.fail(error)
        self._unanswered = self._unanswered + 1 if hangs else 0
        if self._unanswered < RESTART_AFTER or self._notes is None:
            return
        try:
            asked = self._notes.ask_restart()
        except OSError as failure:  # a full disk, say: the tier stays off, and asks again
            logger.warning("the holder of the store cannot be told to start again: %s", failure)
            return
        if asked:
            self._unanswered = 0
            logger.error("the holder of the store is to be started again: %s", error)


def _wait_at_most(num_blocks: int, seconds_per_block: float | None) -> float:
    """Seconds for which a request waits for a look-up."""
    return ASK_SHARE * cut_after(0, num_blocks, seconds_per_block)


def _place(count: int) -> list[Place]:
    return [Place(0, index) for index in range(count)]
