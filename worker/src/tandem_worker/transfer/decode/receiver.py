"""Decode side: everything that one rank receives, over its links to the prefill ranks that hold a part of its share.

An `Intake` is one order as far as this rank is concerned. Where it carries the order itself (on the first rank of a
decode worker), the peer answers with its group's ranks, and the others that have something for this rank are attached
to. Locks are taken in the order client, receiver, link, attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem_api.keys import KeyRing

from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.checksums import Damage
from tandem_worker.transfer.choice import TCP
from tandem_worker.transfer.contract import BandwidthMeter, CoveredTime, Identity, TransferStats, TransferTimeouts
from tandem_worker.transfer.decode.attempt import Attempt, Connection, LinkListener
from tandem_worker.transfer.decode.link import PrefillLink
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.layout import RankAddress
from tandem_worker.transfer.protocol import Done
from tandem_worker.transfer.slicing import plan_slices
from tandem_worker.transfer.transports import Transports

logger = logging.getLogger(__name__)

_SOURCE = "KV links"


@dataclass(slots=True, eq=False)
class Intake:
    """One order at one prefill worker, as far as one rank receives it."""

    transfer: int
    parts: dict[Attempt, PrefillLink] = field(default_factory=dict)
    num_missing: int = 0
    """Parts that have not arrived."""
    done: Done | None = None
    worker: str = ""
    ended: bool = False
    """Withdrawn, failed or released."""


class IntakeListener:
    """What a receiver reports, without holding a lock. An intake that arrived may still fail until it is released."""

    def intake_ordered(self, intake: Intake, ranks: Sequence[RankAddress]) -> None:
        """The order is on its way to a worker of these ranks."""
        raise NotImplementedError

    def intake_started(self, intake: Intake) -> None:
        """The prefill worker computes the prompt."""

    def intake_overdue(self, intake: Intake) -> None:
        """The prefill worker has not begun for long."""

    def intake_arrived(self, intake: Intake) -> None:
        """Everything that this rank takes of the prompt is written."""
        raise NotImplementedError

    def intake_failed(self, intake: Intake, reason: str) -> None:
        """Nothing of it is written any more."""
        raise NotImplementedError


class RankReceiver(LinkListener):
    def __init__(
        self,
        listener: IntakeListener,
        *,
        verify: bool,
        timeouts: TransferTimeouts,
        ring: Callable[[], KeyRing],
        vitals: Vitals,
        transports: Transports | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._transports = transports or Transports()
        self._verify = verify
        self._timeouts = timeouts
        self._ring, self._vitals = ring, vitals
        self._clock = clock
        self._lock = threading.Lock()
        self._by_attempt: dict[Attempt, Intake] = {}
        self._links: dict[str, PrefillLink] = {}
        self._down_until: dict[str, tuple[float, str]] = {}
        self._space: BlockSpace | None = None
        self._identity: Identity | None = None
        self._closed = False
        self._bytes_received = 0
        self._resends = 0
        self._damage: Counter[str] = Counter({kind.value: 0 for kind in Damage})
        self._meter = BandwidthMeter()
        self._arriving = CoveredTime()

    def bind(self, space: BlockSpace, identity: Identity) -> None:
        """Say where blocks are written, and as whom peers are greeted. Comes before the first order."""
        self._space, self._identity = space, replace(identity, offers=self._transports.offers)

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        assert self._space is not None, "bind comes before orders"
        return self._space.layout.block_size

    def order(self, transfer: int, order: RemotePrefill, endpoint: str) -> Intake:
        """Give `order` to the prefill worker at `endpoint`. Raises TransferError where that cannot even be tried."""
        first = order.num_cached_tokens // self.block_size
        num_blocks = -(-len(order.token_ids) // self.block_size)
        assert order.num_cached_tokens % self.block_size == 0, "the cached part of a prompt ends at a block boundary"
        assert len(order.block_ids) >= num_blocks, "the whole prompt is reserved"
        intake = Intake(transfer)
        attempt = Attempt(transfer, order.request_id, order.block_ids[:num_blocks], first, order)
        with self._lock:
            until, reason = self._down_until.get(endpoint, (0.0, ""))
            if self._clock() < until:
                raise TransferError(reason)
            self._submit(intake, attempt, endpoint)
        return intake

    def attach(
        self, transfer: int, request_id: str, block_ids: Sequence[int], first: int, ranks: Sequence[RankAddress]
    ) -> Intake:
        """Receive this rank's share of what another one ordered. Raises TransferError when `ranks` do not hold it."""
        intake = Intake(transfer)
        attempt = Attempt(transfer, request_id, tuple(block_ids), first, None)
        try:
            self._attach(intake, attempt, ranks, {})
        except TransferError:
            self.withdraw(intake)  # what could be attached to
            raise
        return intake

    def withdraw(self, intake: Intake) -> None:
        """When this returns nothing of `intake` is written any more."""
        self._leave(intake, PrefillLink.withdraw)

    def release(self, intake: Intake) -> None:
        """It has arrived on every rank: the prefill worker may give the blocks back."""
        self._leave(intake, PrefillLink.release)

    def _leave(self, intake: Intake, leave: Callable[[PrefillLink, Attempt], None]) -> None:
        with self._lock:
            intake.ended = True
            parts = list(intake.parts.items())
            for attempt, _ in parts:
                self._by_attempt.pop(attempt, None)
        for attempt, link in parts:
            leave(link, attempt)

    def stats(self) -> TransferStats:
        with self._lock:
            return TransferStats(
                bytes_received=self._bytes_received,
                resends=self._resends,
                connections=sum(link.connected for link in self._links.values()),
                bytes_per_second=self._meter.rate,
                seconds_receiving=self._arriving.seconds,
                integrity_failures=dict(self._damage),
                wanted=self._transports.policy.wanted,
                transport=self._transports.last,
                protocol=self._transports.protocol,
                transports=self._transports.stats(),
                fallback=self._transports.fallback,
                held_slots=self._transports.num_held,
            )

    def close(self) -> None:
        """Drop every connection; what is open fails and nothing is taken any more."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        for link in links:
            link.close("this worker is shutting down")
        for link in links:
            link.join(timeout=2.0)

    def _attach(self, intake: Intake, like: Attempt, ranks: Sequence[RankAddress], served: dict[int, Attempt]) -> None:
        """Attach to every rank that has something for this one, but for those that are `served` already."""
        if len(ranks) == len(served):
            return
        assert self._space is not None, "bind comes before orders"
        plan = plan_slices(self._space.layout, [rank.shard for rank in ranks], self._space.shard)
        with self._lock:
            for index, (rank, slices) in enumerate(zip(ranks, plan, strict=True)):
                if slices and index not in served and not intake.ended:
                    attempt = Attempt(like.transfer, like.request_id, like.block_ids, like.first, None)
                    self._submit(intake, attempt, rank.endpoint)

    def _submit(self, intake: Intake, attempt: Attempt, endpoint: str) -> None:
        """Under the lock. Raises TransferError."""
        if self._closed:
            raise TransferError("this worker is shutting down")
        link = self._links.get(endpoint)
        fresh = link is None or not link.submit(attempt)
        if link is None or fresh:
            link = self._start_link(endpoint, attempt)
        intake.parts[attempt] = link
        intake.num_missing += 1
        self._by_attempt[attempt] = intake

    def _start_link(self, endpoint: str, attempt: Attempt) -> PrefillLink:
        """Under the lock, without which the link reports nothing: it may end at once. Raises TransferError."""
        try:
            link = self._build_link(endpoint)
            link.submit(attempt)
            link.start()
        except (OSError, ThreadStartError) as error:
            self._links.pop(endpoint, None)
            self._vitals.note(_SOURCE, f"no connection to a prefill worker can be made: {error}")
            raise TransferError(f"{endpoint}: {error}") from error
        self._vitals.clear(_SOURCE)
        self._links[endpoint] = link
        return link

    def _build_link(self, endpoint: str) -> PrefillLink:
        assert self._space is not None, "bind comes before orders"
        assert self._identity is not None, "bind comes before orders"
        return PrefillLink(
            endpoint,
            identity=self._identity,
            space=self._space,
            listener=self,
            verify=self._verify,
            timeouts=self._timeouts,
            ring=self._ring,
            vitals=self._vitals,
            transports=self._transports,
            clock=self._clock,
        )

    # LinkListener

    def attempt_ordered(self, attempt: Attempt, ranks: Sequence[RankAddress], mine: int) -> None:
        intake = self._find(attempt)
        if intake is None:
            return
        try:
            self._attach(intake, attempt, ranks, {mine: attempt})
        except TransferError as error:
            self.attempt_failed(attempt, str(error))
            return
        self._listener.intake_ordered(intake, ranks)

    def attempt_started(self, attempt: Attempt) -> None:
        if (intake := self._find(attempt)) is not None:
            self._listener.intake_started(intake)

    def attempt_overdue(self, attempt: Attempt) -> None:
        if (intake := self._find(attempt)) is not None:
            self._listener.intake_overdue(intake)

    def _find(self, attempt: Attempt) -> Intake | None:
        with self._lock:
            return self._by_attempt.get(attempt)

    def attempt_done(self, attempt: Attempt, done: Done, worker: str) -> None:
        """Report the intake when the last of its attempts is done: one for each rank that holds a part of it."""
        with self._lock:
            intake = self._by_attempt.get(attempt)
            if intake is None:
                return
            if attempt.order is not None:
                intake.done, intake.worker = done, worker
            intake.num_missing -= 1
            arrived = intake.num_missing == 0
        if arrived:
            self._listener.intake_arrived(intake)

    def attempt_failed(self, attempt: Attempt, reason: str) -> None:
        """Withdraw the other attempts of the intake and report that it failed, once."""
        with self._lock:
            intake = self._by_attempt.get(attempt)
            if intake is None or intake.ended:
                return
            intake.ended = True
        self.withdraw(intake)
        self._listener.intake_failed(intake, reason)

    def attempt_resent(self, attempt: Attempt) -> None:
        """Count it for the metrics and log it."""
        logger.warning("received damaged blocks, asking for them again", extra={"request_id": attempt.request_id})
        with self._lock:
            self._resends += 1

    def damaged(self, kind: str) -> None:
        with self._lock:
            self._damage[kind] += 1

    def received(self, num_bytes: int, seconds: float, transport: str = TCP) -> None:
        """Count the bytes, which arrived in the last `seconds`, and their rate."""
        self._transports.note_moved(transport, num_bytes, seconds)
        with self._lock:
            now = self._clock()
            self._arriving.add(now - seconds, now)
            self._bytes_received += num_bytes
            self._meter.observe(num_bytes, seconds)

    def link_closed(self, link: Connection, reason: str) -> None:
        """Forget the link. An endpoint that did not complete the handshake is left alone for `retry_after` seconds."""
        with self._lock:
            if self._links.get(link.endpoint) is link:
                del self._links[link.endpoint]
            if not link.established:
                self._down_until[link.endpoint] = (self._clock() + self._timeouts.retry_after, reason)
            if len(self._down_until) > 1024:  # endpoints come and go with their pods
                now = self._clock()
                self._down_until = {e: entry for e, entry in self._down_until.items() if entry[0] > now}
