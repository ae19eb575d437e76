"""Decode end of the TCP transport: `engine.contract.PrefillClient` on the first rank, and what its followers do."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tandem_api.keys import KeyRing, open_ring

from tandem_worker.engine.contract import DecodeEngine, RemotePrefill, RemotePrefillResult
from tandem_worker.engine.trace import Hop
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.contract import GroupChannel, Identity, TransferStats, TransferTimeouts
from tandem_worker.transfer.decode.receiver import Intake, IntakeListener, RankReceiver
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.layout import RankAddress
from tandem_worker.transfer.messages import Arrived, Failed, Receive, Withdraw, decode_message, encode_message
from tandem_worker.transfer.transports import Transports

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Order:
    """An order on its way through its endpoints."""

    order: RemotePrefill
    remaining: list[str]
    """Endpoints not tried yet, the next one last."""
    reasons: list[str] = field(default_factory=list)
    intake: Intake | None = None
    """What arrives from the endpoint that is being tried."""
    hop: Hop | None = None
    """Takes its times, if the request is traced."""
    begun: bool = False
    """Whether that endpoint computes the prompt."""
    told_followers: bool = False
    """They receive from that endpoint too."""
    num_receiving: int = 0
    """Ranks that do not have everything yet."""
    cancelled: bool = False

    def end_hop(self, failure: str | None = None) -> None:
        if self.hop is not None:
            self.hop.end(failure)


class TcpPrefillClient(IntakeListener):
    """Fills reserved blocks from prefill workers, on this rank and on those that follow it.

    An order goes to its endpoints one after another until one of them delivers to every rank; when none is left the
    engine is told to prefill itself.
    """

    def __init__(
        self,
        *,
        verify: bool = True,
        timeouts: TransferTimeouts | None = None,
        ring: Callable[[], KeyRing] = open_ring,
        vitals: Vitals | None = None,
        transports: Transports | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ring` gives the keys that are good now: peers that do not prove one get no orders."""
        self._receiver = RankReceiver(
            self,
            verify=verify,
            timeouts=timeouts or TransferTimeouts(),
            ring=ring,
            vitals=vitals or Vitals(),
            transports=transports,
            clock=clock,
        )
        self._lock = threading.Lock()
        self._orders: dict[tuple[str, int], _Order] = {}
        self._by_transfer: dict[int, _Order] = {}
        self._engine: DecodeEngine | None = None
        self._group: GroupChannel | None = None
        self._failures = 0

    def bind(
        self, engine: DecodeEngine, space: BlockSpace, identity: Identity, group: GroupChannel | None = None
    ) -> None:
        """Join with the engine, which is built with this client and owns the block space. Before the first `start`.

        `group` is the way to the ranks that follow this one; what they answer is for `handle`.
        """
        self._engine, self._group = engine, group
        self._receiver.bind(space, replace(identity, shard=space.shard))

    def start(self, order: RemotePrefill) -> None:
        entry = _Order(order, list(reversed(order.endpoints)))
        with self._lock:
            self._orders[(order.request_id, order.generation)] = entry
        self._try_next(entry)

    def has_begun(self, request_id: str, generation: int) -> bool:
        with self._lock:
            entry = self._orders.get((request_id, generation))
            return entry is None or entry.begun

    def cancel(self, request_id: str, generation: int) -> None:
        with self._lock:
            entry = self._orders.pop((request_id, generation), None)
            if entry is None:
                return
            entry.cancelled = True
        entry.end_hop("cancelled")
        self._leave(entry)

    def stats(self) -> TransferStats:
        return replace(self._receiver.stats(), failures=self._failures)

    def close(self) -> None:
        """Drop every connection; what is open fails and no order is taken any more."""
        self._receiver.close()

    def handle(self, message: bytes) -> None:
        """What a follower answered. Raises TransferError."""
        answer = decode_message(message)
        if not isinstance(answer, Arrived | Failed):
            raise TransferError(f"{type(answer).__name__} is not for the first rank")
        with self._lock:
            entry = self._by_transfer.get(answer.transfer)
            intake = None if entry is None else entry.intake
        if intake is None:
            return
        if isinstance(answer, Arrived):
            self.intake_arrived(intake)
        else:
            self._receiver.withdraw(intake)
            self.intake_failed(intake, answer.reason)

    def _try_next(self, entry: _Order) -> None:
        """Hand the order to the next endpoint that can be tried, or give up."""
        while True:
            with self._lock:
                if entry.cancelled:
                    return
                if not entry.remaining:
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
        transfer = secrets.randbits(64)
        entry.begun = False
        order = entry.order
        if order.trace is not None:
            entry.hop = order.trace.begin_hop(endpoint)
            order = replace(order, hop=entry.hop)
        try:
            entry.intake = self._receiver.order(transfer, order, endpoint)
        except TransferError as error:
            entry.reasons.append(str(error))
            entry.end_hop(str(error))
            return False
        entry.told_followers = False
        entry.num_receiving = 1 + (0 if self._group is None else self._group.num_followers)
        self._by_transfer[transfer] = entry
        return True

    def _leave(self, entry: _Order) -> None:
        """Nothing of the endpoint that was tried is written any more, on any rank, by what runs after this."""
        intake = entry.intake
        if intake is None:
            return
        self._receiver.withdraw(intake)
        with self._lock:
            self._by_transfer.pop(intake.transfer, None)
            if entry.told_followers and self._group is not None:
                entry.told_followers = False
                self._group.post(encode_message(Withdraw(intake.transfer)))

    # IntakeListener

    def intake_ordered(self, intake: Intake, ranks: Sequence[RankAddress]) -> None:
        if self._group is None:
            return
        with self._lock:
            entry = self._by_transfer.get(intake.transfer)
            if entry is None or entry.cancelled:
                return
            order = entry.order
            block_size = self._receiver.block_size
            block_ids = order.block_ids[: -(-len(order.token_ids) // block_size)]
            first = order.num_cached_tokens // block_size
            message = Receive(intake.transfer, order.request_id, block_ids, first, tuple(ranks))
            self._group.post(encode_message(message))
            entry.told_followers = True

    def intake_started(self, intake: Intake) -> None:
        with self._lock:
            if (entry := self._by_transfer.get(intake.transfer)) is not None:
                entry.begun = True

    def intake_overdue(self, intake: Intake) -> None:
        with self._lock:
            entry = self._by_transfer.get(intake.transfer)
        if entry is not None and not entry.cancelled and self._engine is not None:
            self._engine.remote_prefill_overdue(entry.order.request_id, entry.order.generation)

    def intake_arrived(self, intake: Intake) -> None:
        """Here or on a follower."""
        with self._lock:
            entry = self._by_transfer.get(intake.transfer)
            if entry is None or entry.cancelled:
                return
            entry.num_receiving -= 1
            if entry.num_receiving:
                return
            del self._by_transfer[intake.transfer]
            del self._orders[(entry.order.request_id, entry.order.generation)]
        assert self._engine is not None, "bind comes before start"
        assert intake.done is not None, "this rank's own intake has arrived"
        self._receiver.release(intake)
        if entry.hop is not None:
            entry.hop.worker = intake.worker
            entry.hop.end()
        self._engine.remote_prefill_done(
            RemotePrefillResult(
                request_id=entry.order.request_id,
                generation=entry.order.generation,
                logits=intake.done.logits,
                num_cached_tokens=intake.done.num_cached_tokens,
                worker=intake.worker,
            )
        )

    def intake_failed(self, intake: Intake, reason: str) -> None:
        """Here or on a follower."""
        with self._lock:
            entry = self._by_transfer.pop(intake.transfer, None)
        if entry is not None:
            entry.reasons.append(reason)
            entry.end_hop(reason)
            self._leave(entry)
            self._try_next(entry)


class FollowingReceiver(IntakeListener):
    """The decode end on a rank that follows: does what the first rank's `TcpPrefillClient` posts, and answers."""

    def __init__(
        self,
        space: BlockSpace,
        identity: Identity,
        answer: Callable[[bytes], None],
        *,
        verify: bool = True,
        timeouts: TransferTimeouts | None = None,
        ring: Callable[[], KeyRing] = open_ring,
        vitals: Vitals | None = None,
        transports: Transports | None = None,
    ) -> None:
        """`answer` brings a message to the first rank's `TcpPrefillClient.handle`; called on any thread."""
        self._answer = answer
        self._receiver = RankReceiver(
            self,
            verify=verify,
            timeouts=timeouts or TransferTimeouts(),
            ring=ring,
            vitals=vitals or Vitals(),
            transports=transports,
        )
        self._receiver.bind(space, replace(identity, shard=space.shard))
        self._lock = threading.Lock()
        self._intakes: dict[int, Intake] = {}

    def handle(self, message: bytes) -> None:
        """What the first rank posted, in its place among the steps. Raises TransferError.

        After a withdrawal nothing of that transfer is written any more.
        """
        order = decode_message(message)
        if isinstance(order, Receive):
            self._receive(order)
        elif isinstance(order, Withdraw):
            with self._lock:
                intake = self._intakes.pop(order.transfer, None)
            if intake is not None:
                self._receiver.withdraw(intake)
        else:
            raise TransferError(f"{type(order).__name__} is not for a rank that receives")

    def stats(self) -> TransferStats:
        return self._receiver.stats()

    def close(self) -> None:
        """End every connection to prefill workers."""
        self._receiver.close()

    def _receive(self, order: Receive) -> None:
        with self._lock:  # it may end before it is noted
            try:
                intake = self._receiver.attach(
                    order.transfer, order.request_id, order.block_ids, order.first, order.ranks
                )
            except TransferError as error:
                self._answer(encode_message(Failed(order.transfer, str(error))))
                return
            self._intakes[order.transfer] = intake

    def intake_arrived(self, intake: Intake) -> None:
        """Tell the first rank that this rank has its part."""
        self._end(intake, Arrived(intake.transfer))

    def intake_failed(self, intake: Intake, reason: str) -> None:
        self._end(intake, Failed(intake.transfer, reason))

    def _end(self, intake: Intake, message: Arrived | Failed) -> None:
        with self._lock:
            if self._intakes.pop(intake.transfer, None) is None:
                return  # withdrawn meanwhile
        self._answer(encode_message(message))
