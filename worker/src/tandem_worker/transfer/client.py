"""Decode end of the TCP transport: `engine.base.PrefillClient` over one `Link` per prefill worker."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_worker.engine.base import RemotePrefill, RemotePrefillResult
from tandem_worker.transfer.base import BandwidthMeter, DecodeEngine, Identity, TransferStats, TransferTimeouts
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.link import Attempt, Link, LinkListener
from tandem_worker.transfer.protocol import Done
from tandem_worker.transfer.reception import Reception

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Order:
    """An order on its way through its endpoints."""

    order: RemotePrefill
    remaining: list[str]
    """Endpoints not tried yet, the next one last."""
    reasons: list[str] = field(default_factory=list)
    attempt: Attempt | None = None
    link: Link | None = None
    cancelled: bool = False


class TcpPrefillClient(LinkListener):
    """Fills reserved blocks from prefill workers.

    An order goes to its endpoints one after another until one of them delivers; when none is left the engine is told to
    prefill itself. Locks are taken in the order client, link, attempt.
    """

    def __init__(
        self,
        *,
        verify: bool = True,
        timeouts: TransferTimeouts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verify = verify
        self._timeouts = timeouts or TransferTimeouts()
        self._clock = clock
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, int], _Order] = {}
        self._by_attempt: dict[Attempt, _Order] = {}
        self._links: dict[str, Link] = {}
        self._down_until: dict[str, tuple[float, str]] = {}
        self._engine: DecodeEngine | None = None
        self._space: BlockSpace | None = None
        self._identity: Identity | None = None
        self._closed = False
        self._bytes_received = 0
        self._failures = 0
        self._resends = 0
        self._meter = BandwidthMeter()

    def bind(self, engine: DecodeEngine, space: BlockSpace, identity: Identity) -> None:
        """Join with the engine, which is built with this client and owns the block space. Before the first `start`."""
        self._engine, self._space, self._identity = engine, space, identity

    def start(self, order: RemotePrefill) -> None:
        entry = _Order(order, list(reversed(order.endpoints)))
        with self._lock:
            self._orders[(order.request_id, order.generation)] = entry
        self._try_next(entry)

    def cancel(self, request_id: str, generation: int) -> None:
        with self._lock:
            entry = self._orders.pop((request_id, generation), None)
            if entry is None:
                return
            entry.cancelled = True
            attempt, link = entry.attempt, entry.link
            if attempt is not None:
                self._by_attempt.pop(attempt, None)
        if attempt is not None and link is not None:
            link.withdraw(attempt)

    def stats(self) -> TransferStats:
        with self._lock:
            return TransferStats(
                bytes_received=self._bytes_received,
                failures=self._failures,
                resends=self._resends,
                connections=sum(link.connected for link in self._links.values()),
                bytes_per_second=self._meter.rate,
            )

    def close(self) -> None:
        """Drop every connection; what is open fails and no order is taken any more."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close("this worker is shutting down")
        for link in links:
            link.join(timeout=2.0)

    def _try_next(self, entry: _Order) -> None:
        """Hand the order to the next endpoint that can be tried, or give up."""
        while True:
            with self._lock:
                if entry.cancelled:
                    return
                if not entry.remaining or self._closed:
                    self._orders.pop((entry.order.request_id, entry.order.generation), None)
                    self._failures += 1
                    break
                if self._submit(entry, entry.remaining.pop()):
                    return
        reason = "; ".join(entry.reasons) or "no prefill worker was named"
        logger.warning(
            "remote prefill failed, prefilling here: %s", reason, extra={"request_id": entry.order.request_id}
        )
        assert self._engine is not None, "bind comes before start"
        self._engine.remote_prefill_failed(entry.order.request_id, entry.order.generation, reason)

    def _submit(self, entry: _Order, endpoint: str) -> bool:
        """Under the lock."""
        until, reason = self._down_until.get(endpoint, (0.0, ""))
        if self._clock() < until:
            entry.reasons.append(reason)
            return False
        assert self._space is not None, "bind comes before start"
        layout = self._space.layout
        attempt = Attempt(
            entry.order, Reception(entry.order, num_layers=layout.num_layers, block_size=layout.block_size)
        )
        link = self._links.get(endpoint)
        if link is None or not link.submit(attempt):
            link = self._links[endpoint] = self._build_link(endpoint)
            link.submit(attempt)  # before it starts, for it may end at once
            link.start()
        entry.attempt, entry.link = attempt, link
        self._by_attempt[attempt] = entry
        return True

    def _build_link(self, endpoint: str) -> Link:
        assert self._space is not None, "bind comes before start"
        assert self._identity is not None, "bind comes before start"
        return Link(
            endpoint,
            identity=self._identity,
            space=self._space,
            listener=self,
            verify=self._verify,
            timeouts=self._timeouts,
            clock=self._clock,
        )

    # LinkListener

    def attempt_done(self, attempt: Attempt, done: Done, worker: str) -> None:
        with self._lock:
            entry = self._by_attempt.pop(attempt, None)
            if entry is None or entry.cancelled:
                return
            del self._orders[(entry.order.request_id, entry.order.generation)]
        assert self._engine is not None, "bind comes before start"
        self._engine.remote_prefill_done(
            RemotePrefillResult(
                request_id=entry.order.request_id,
                generation=entry.order.generation,
                logits=done.logits,
                num_cached_tokens=done.num_cached_tokens,
                worker=worker,
            )
        )

    def attempt_failed(self, attempt: Attempt, reason: str) -> None:
        with self._lock:
            entry = self._by_attempt.pop(attempt, None)
        if entry is not None:
            entry.reasons.append(reason)
            self._try_next(entry)

    def attempt_resent(self, attempt: Attempt) -> None:
        logger.warning("received damaged blocks, asking for them again", extra={"request_id": attempt.order.request_id})
        with self._lock:
            self._resends += 1

    def received(self, num_bytes: int, seconds: float) -> None:
        with self._lock:
            self._bytes_received += num_bytes
            self._meter.observe(num_bytes, seconds)

    def link_closed(self, link: Link, reason: str) -> None:
        with self._lock:
            if self._links.get(link.endpoint) is link:
                del self._links[link.endpoint]
            if not link.established:
                self._down_until[link.endpoint] = (self._clock() + self._timeouts.retry_after, reason)
            if len(self._down_until) > 1024:  # endpoints come and go with their pods
                now = self._clock()
                self._down_until = {e: entry for e, entry in self._down_until.items() if entry[0] > now}
