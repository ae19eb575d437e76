"""What workers tell about themselves, read again and again from their metrics ports: for the operator, and for the
gateway's own choices.

Reads are spread over the period, at most so many at a time and a second, by one timer and without a task each: a
thousand workers are asked more seldom and never all at once. A worker that does not answer keeps its last sample, whose
age grows, until it says nothing any more about now.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import count

from pydantic import ValidationError
from tandem_api.telemetry import MOST, WorkerTelemetry

from tandem_gateway.scheduling import Share, Worker
from tandem_gateway.scheduling.pulling import NOTHING_COMES
from tandem_gateway.upstream.asking import Asker
from tandem_gateway.upstream.base import Failure

PERIOD_SECONDS = 1.0
"""Between two reads of a worker, unless there are many."""
MAX_PER_SECOND = 100
"""Reads of all workers together: a thousand are asked every ten seconds."""
AT_ONCE = 32
MAX_KEPT = 128
"""With more workers a connection is closed after each read: descriptors are for clients."""
ANSWER_SECONDS = 2.0
"""From the request to the end of the answer, connecting included."""
KEEP_SECONDS = 60.0
"""An older sample is none."""
MAX_BYTES = 64 * 1024
"""Bytes of an answer. A sample takes about a thousand, and 256 for each rank of a replica besides."""
LONGEST_PAUSE = 10.0
"""Between reads of a worker that does not answer, unless all are asked more seldom."""
MISSED_AFTER = 3
"""Failures in a row: what it last told says nothing any more of its queue."""
COMPLAIN_AFTER = 5
"""Failures in a row: the log names the worker, once."""
TICK_SECONDS = 0.05
_SPREAD = 0.6180339887498949
"""Multiples of the golden ratio's fraction leave no large gap, however many there are."""
_OK = "ok"
_REASONS = {Failure.CONNECT: "refused", Failure.LOCAL: "local", Failure.RESET: "reset", Failure.PROTOCOL: "protocol"}

log = logging.getLogger(__name__)


def describe_cache(sample: WorkerTelemetry) -> tuple[float, int | None]:
    """When what a worker has forgotten was last used (unix seconds; 0: it has forgotten nothing), and how many tokens'
    blocks it has room for; None: it does not tell.

    What memory gives up stays in a tier of its own that is in use, until that gives it up too.
    """
    if not sample.kv_block_size:
        return sample.kv_eviction_horizon, None
    tokens = min(MOST, sample.kv_blocks_total * sample.kv_block_size)
    tiers = [tier for tier in sample.kv_tiers if tier.reason is None and tier.capacity_tokens and tier.tier != "store"]
    if not tiers:
        return sample.kv_eviction_horizon, tokens
    horizon = min(sample.kv_eviction_horizon, *(tier.horizon for tier in tiers))
    return horizon, min(MOST, tokens + sum(tier.capacity_tokens for tier in tiers))


def describe_pulls(sample: WorkerTelemetry) -> float | None:
    """At how many tokens per second a worker brings other workers' blocks, 0 until it knows; None: it brings none, and
    gives none away. One that gets nothing of those whom it asks gives as before, and has a speed as soon as it may ask
    one of them again."""
    for tier in sample.kv_tiers:
        if tier.tier == "peer":
            rests = tier.reason is not None and tier.tokens_per_second is None
            return NOTHING_COMES if rests else tier.tokens_per_second or 0.0
    return None


def describe_share(sample: WorkerTelemetry) -> Share | None:
    """A worker's part in the store that it shares with others; None: it uses none now."""
    for tier in sample.kv_tiers:
        if tier.tier == "store" and tier.reason is None:
            computed = sample.computed_prompt_tokens_total or 0
            return Share(tier.tokens_per_second or 0.0, tier.capacity_tokens, computed)
    return None


class TelemetryPoller:
    """Owned by one event loop. `take` is discovery's. With a `period` of 0 nothing is read."""

    def __init__(
        self,
        *,
        connect_seconds: float,
        period: float = PERIOD_SECONDS,
        on_sample: Callable[[Worker, WorkerTelemetry | None], None],
    ) -> None:
        """`on_sample`: called with each new sample of a worker, and with None when it has missed several."""
        self.reads: Counter[str] = Counter()
        """Reads that have ended, by how: `ok`, or the reason why there was no sample."""
        self._on_sample = on_sample
        self._connect_seconds = connect_seconds
        self._period = period
        self._targets: dict[Worker, _Target] = {}
        self._due: list[tuple[float, int, _Target]] = []
        """A heap. Those that are being read, and those that have gone, are not in it or are passed over."""
        self._reading: dict[_Target, None] = {}
        self._serials = count(1)

    def take(self, workers: Iterable[Worker]) -> None:
        """The model's workers are now these. Samples of those that stay are kept."""
        told = (worker for worker in workers if worker.status_address)
        known = list(told) if self._period else []
        before, self._targets = self._targets, {}
        now = asyncio.get_running_loop().time()
        period = self._pause_for(len(known))
        for worker in known:
            target = before.pop(worker, None)
            if target is None:
                serial = next(self._serials)
                target = _Target(self, worker, serial, self._connect_seconds)
                heappush(self._due, (now + period * (serial * _SPREAD % 1), serial, target))
            self._targets[worker] = target
        for target in before.values():
            self._drop(target)

    def sample(self, worker: Worker) -> tuple[WorkerTelemetry, float] | None:
        """A worker's last sample and its age in seconds. None: there is none, or it is older than KEEP_SECONDS."""
        target = self._targets.get(worker)
        if target is None or target.sample is None:
            return None
        age = asyncio.get_running_loop().time() - target.read_at
        if age > KEEP_SECONDS:
            target.sample = None
            return None
        return target.sample, age

    async def run(self) -> None:
        """Read whoever is due. Never returns."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await asyncio.sleep(TICK_SECONDS)
                self._tick(loop.time())
        finally:
            for target in tuple(self._targets.values()):
                self._drop(target)

    def _pause_for(self, workers: int) -> float:
        """Seconds between two reads of one of so many workers."""
        return max(self._period, workers / MAX_PER_SECOND)

    def _tick(self, now: float) -> None:
        for target in [target for target in self._reading if now >= target.deadline]:
            target.fail("timeout")
        while self._due and self._due[0][0] <= now and len(self._reading) < AT_ONCE:
            due, _, target = heappop(self._due)
            if target.gone:
                continue
            # Its place within the period stays, unless it had to wait for long.
            target.due = due if now - due < self._pause_for(len(self._targets)) else now
            self._reading[target] = None
            target.read(now + ANSWER_SECONDS)

    def on_end(self, target: _Target, result: str) -> None:
        """A read has ended."""
        self._reading.pop(target, None)
        self.reads[result] += 1
        pause = self._pause_for(len(self._targets))
        if result == _OK:
            target.failures = 0
            target.read_at = asyncio.get_running_loop().time()
            self._on_sample(target.worker, target.sample)
        else:
            target.failures += 1
            if target.failures == MISSED_AFTER:
                self._on_sample(target.worker, None)
            if target.failures == COMPLAIN_AFTER:
                log.warning(
                    "a worker's telemetry cannot be read",
                    extra={"worker": target.worker.name, "address": target.worker.status_address, "reason": result},
                )
            pause = min(max(pause, LONGEST_PAUSE), pause * 2 ** min(target.failures - 1, 10))
        if len(self._targets) > MAX_KEPT:
            target.link.discard()
        if not target.gone:
            heappush(self._due, (target.due + pause, target.serial, target))

    def _drop(self, target: _Target) -> None:
        target.gone = True
        self._reading.pop(target, None)
        target.stop()


class _Target(Asker):
    """One worker."""

    def __init__(self, owner: TelemetryPoller, worker: Worker, serial: int, connect_seconds: float) -> None:
        super().__init__(worker.status_address, connect_seconds=connect_seconds, most_bytes=MAX_BYTES)
        self.worker = worker
        self.serial = serial
        self.sample: WorkerTelemetry | None = None
        self.read_at = 0.0
        self.due = 0.0
        """When its last read was to begin."""
        self.deadline = 0.0
        self.failures = 0
        """In a row."""
        self.gone = False
        self._owner = owner
        self._head = f"GET /telemetry HTTP/1.1\r\nhost: {worker.status_address}\r\n\r\n".encode()

    def read(self, deadline: float) -> None:
        """Ask it. Ends in one call of `TelemetryPoller.on_end`."""
        self.deadline = deadline
        self.send(self._head)

    def fail(self, reason: str) -> None:
        """Give the read up."""
        self.give_up()
        self._owner.on_end(self, reason)

    def on_answer(self, status: int, body: bytes) -> None:
        if status != 200:
            self._owner.on_end(self, "status")
            return
        try:
            self.sample = WorkerTelemetry.model_validate_json(body)
        except ValidationError:
            self._owner.on_end(self, "garbage")
        else:
            self._owner.on_end(self, _OK)

    def on_too_large(self) -> None:
        self._owner.on_end(self, "size")

    def on_failure(self, failure: Failure) -> None:
        self._owner.on_end(self, _REASONS[failure])
