"""Blocks that other workers have computed: a source of the engine's. A gateway says who has them.

Whether that worker still has them shows when it is asked; what it has not is computed. A worker that cannot be reached,
sends what is damaged, or is late with everything is left alone for a while, longer each time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem_api.wording import name_some

from tandem_worker.engine.tiers import LoadOrder, Run, TierEngine
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.vitals import Vitals
from tandem_worker.tiers.book import Load, LoadBook
from tandem_worker.tiers.errors import PEERS_FAILING
from tandem_worker.tiers.peer_link import STALE_SECONDS, PeerLink, PeerRecord, PullTerms
from tandem_worker.tiers.policy import is_sooner
from tandem_worker.tiers.stats import Counters, TierStats
from tandem_worker.transfer.contract import BandwidthMeter

logger = logging.getLogger(__name__)

MAX_PEERS = 64
"""Workers that are asked at a time: each has a thread. A connection that nobody uses makes room for another."""
MAX_RECORDS = 1024
_IDLE_SECONDS = 0.5
_NAMED = 3


class PeerSource:
    """`engine.tiers.BlockSource`. Build it, `bind` it with the engine before the first request, `start` it."""

    def __init__(
        self,
        terms: PullTerms,
        block_size: int,
        vitals: Vitals | None = None,
        counters: Counters | None = None,
        own: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`block_size`: tokens per block. `own`: this worker's own KV port, `host:port`: it does not ask itself."""
        self._own = own
        self._terms, self._block_size, self._vitals, self._clock = terms, block_size, vitals or Vitals(), clock
        self._counters = counters or Counters(block_size, "peer")
        self._book: LoadBook[Load] = LoadBook(self._counters, clock)
        self._lock = threading.Lock()
        self._records: dict[str, PeerRecord] = {}
        """Records by endpoint, the last used at the end."""
        self._links: dict[str, PeerLink] = {}
        self._usual = BandwidthMeter()
        """The rate of all workers together."""
        self._seconds_per_block: float | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False

    def bind(self, engine: TierEngine) -> None:
        """Join with the engine."""
        self._book.engine = engine

    def start(self) -> None:
        """Raises ThreadStartError."""
        watch = self._vitals.start_thread("kv-peer-watch", self._run_watch, is_over=lambda: self._closed)
        self._threads.append(watch)

    def close(self, timeout: float = 2.0) -> None:
        """Loads end with what is there; threads end soon."""
        self._closed = True
        self._book.close()
        with self._lock:
            links, threads = list(self._links.values()), list(self._threads)
        for link in links:
            link.close()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def stats(self) -> TierStats:
        """Any thread. A message without a reason: of some workers nothing comes, of others all. A reason without a
        speed: nobody is to be asked now."""
        rate, now = self._usual.rate, self._clock()
        speed = None if rate is None else rate / self._terms.geometry.slot_bytes * self._block_size
        with self._lock:
            failing, retry_at = find_failing(self._records, now)
        if retry_at is not None:
            speed = None if now < retry_at else speed or 0.0
        return replace(
            self._counters.read(),
            tokens_per_second=speed,
            reason=None if retry_at is None else PEERS_FAILING,
            message=name_some([f"{endpoint}: {why}" for endpoint, why in failing.items()], _NAMED, "; "),
            failing=tuple(failing),
        )

    # -- the engine's thread ---------------------------------------------------------------------------------------

    def find(
        self, names: Sequence[bytes], seconds_per_block: float | None, holder: str = "", held: int | None = None
    ) -> Run | None:
        if seconds_per_block is not None:
            self._seconds_per_block = seconds_per_block
        if not holder or holder == self._own or not names or self._closed:
            return None
        now = self._clock()
        with self._lock:
            record = self._records.get(holder)
            link = self._links.get(holder)
            if link is None and len(self._links) >= MAX_PEERS and all(each.busy for each in self._links.values()):
                return None
        if record is not None and now < record.retry_at:
            return None
        num_bytes = len(names) * self._terms.geometry.slot_bytes
        seconds = (record or PeerRecord()).predict(num_bytes, self._usual.rate, now)
        if not is_sooner(seconds, len(names), self._seconds_per_block):
            return None
        return Run(count=len(names), seconds=seconds, hearsay=True)

    def start_load(self, order: LoadOrder) -> None:
        """As `BlockSource.start_load`."""
        if order.seconds_per_block is None:
            order = replace(order, seconds_per_block=self._seconds_per_block)
        load = Load(order, self._clock())
        self._book.add(load)
        try:
            taken = self._submit(order.holder, load)
        except ThreadStartError as error:
            logger.warning("blocks of other workers cannot be fetched: %s", error)
            taken = False
        if not taken:
            self._book.end(load)

    def cancel(self, load: int) -> None:
        """As `BlockSource.cancel`."""
        self._book.cancel(load)

    def _submit(self, endpoint: str, load: Load) -> bool:
        """False: nobody can be asked. Raises ThreadStartError."""
        with self._lock:
            if self._closed:
                return False
            link = self._links.get(endpoint)
            if link is not None and link.submit(load):
                return True
            if not self._make_room():
                return False
            record = self._records.pop(endpoint, None) or PeerRecord()
            self._records[endpoint] = record
            if len(self._records) > MAX_RECORDS:
                del self._records[next(iter(self._records))]
            link = PeerLink(
                endpoint,
                record,
                self._terms,
                self._book.end,
                self._note_read,
                self._counters.count_damage,
                self._clock,
            )
            link.submit(load)
            self._links[endpoint] = link
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            try:
                name = f"kv-peer-{endpoint}"
                self._threads.append(self._vitals.start_thread(name, self._run_link, link))
            except ThreadStartError:
                del self._links[endpoint]
                raise
            return True

    def _make_room(self) -> bool:
        """For one more link, under the lock. Whether there is some."""
        if len(self._links) < MAX_PEERS:
            return True
        idle = next((each for each in self._links.values() if not each.busy), None)
        if idle is None:
            return False
        idle.close()
        del self._links[idle.endpoint]
        return True

    # -- threads ---------------------------------------------------------------------------------------------------

    def _run_link(self, link: PeerLink) -> None:
        link.run()
        with self._lock:
            if self._links.get(link.endpoint) is link:
                del self._links[link.endpoint]

    def _run_watch(self) -> None:
        while not self._closed:
            self._book.cut_late(_IDLE_SECONDS)

    def _note_read(self, num_bytes: int, seconds: float) -> None:
        self._counters.count_read(num_bytes, seconds)
        self._usual.observe(num_bytes, seconds)


def find_failing(records: Mapping[str, PeerRecord], now: float) -> tuple[dict[str, str], float | None]:
    """Which workers have failed again and again, and why; and where nobody has given anything lately, nor since the
    first of them began to fail, when one that has not may be asked again.

    A failure is told until somebody gives something, however seldom anybody is asked, and whoever else is asked first
    and fails too. What was said before that, and long ago, says nothing: gateways name a worker that has gone no more.
    """

    def is_fresh(record: PeerRecord) -> bool:
        return now - max(record.tried_at, record.retry_at) <= STALE_SECONDS

    answered_at = max((record.answered_at for record in records.values()), default=now)
    failing = {
        endpoint: record
        for endpoint, record in sorted(records.items())
        if record.is_failing() and (is_fresh(record) or record.tried_at >= answered_at)
    }
    if not failing:
        return {}, None
    since = min(record.failed_at for record in failing.values())
    others = [record for endpoint, record in records.items() if endpoint not in failing]
    told = {endpoint: record.message for endpoint, record in failing.items()}
    lately = min(since, now - STALE_SECONDS)
    for record in others:
        if not record.faults and record.tried_at >= since:
            return told, None
        if is_fresh(record) and record.answered_at >= lately:  # a single failure may be that of a sound one
            return told, None
    asked = [*failing.values(), *(record for record in others if is_fresh(record))]
    return told, min(record.retry_at for record in asked)
