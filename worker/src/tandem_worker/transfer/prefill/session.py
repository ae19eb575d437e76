"""Prefill side: the connection of one decode rank, its orders, and the orders of its group that it attached to.

One thread owns the connection. Others only tell it something (`reports`) and wake it. What waits here to be sent is a
few numbers per layer (`sending`), never a copy of the data; the blocks stay allocated until the peer has acknowledged
the order, cancelled it, or is gone (`orders`).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem_api.tracing import Tracer

from tandem_worker.engine.contract import PrefillEngine
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer import protocol
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.channel import Channel, Waker, configure
from tandem_worker.transfer.contract import Identity, TransferTimeouts
from tandem_worker.transfer.errors import IntegrityError, TransferError
from tandem_worker.transfer.fetches import BlockShelf, decode_fetch
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.fetching import FetchDesk
from tandem_worker.transfer.prefill.orders import Orders
from tandem_worker.transfer.prefill.outbox import Outbox
from tandem_worker.transfer.prefill.outgoing import FlowWatch, SessionTotals
from tandem_worker.transfer.prefill.quotas import Account
from tandem_worker.transfer.prefill.reports import Reports
from tandem_worker.transfer.prefill.sending import Sending
from tandem_worker.transfer.protocol import Done, FrameKind, Header
from tandem_worker.transfer.slicing import agree
from tandem_worker.transfer.transports import Transports

logger = logging.getLogger(__name__)

_FROM_DECODE = frozenset(
    {
        FrameKind.GRANT, FrameKind.PREFILL, FrameKind.ATTACH, FrameKind.RESEND, FrameKind.RELEASE, FrameKind.CANCEL,
        FrameKind.FETCH,
    }
)  # fmt: skip
_HELLO = frozenset({FrameKind.HELLO})


class Session:
    """Implements `channel.Events`, on the session's own thread."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        engine: PrefillEngine | None,
        outbox: Outbox,
        space: BlockSpace,
        identity: Identity,
        draining: Callable[[], bool],
        totals: SessionTotals,
        account: Account,
        timeouts: TransferTimeouts,
        on_closed: Callable[[Session], None],
        transports: Transports,
        shelf: BlockShelf | None = None,
        tracer: Tracer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine` is the one that takes orders; ranks that follow have none and are attached to, and neither have
        workers that only give away what is on their `shelf`.

        Raises OSError where the system has no descriptor for it, TransferError when the peer is gone already.
        """
        self._name = name
        self._space = space
        self._identity = identity
        self._totals = totals
        self._account = account
        self._timeouts = timeouts
        self._on_closed = on_closed
        self._transports = transports
        self._clock = clock
        configure(sock)
        self._waker = Waker()
        self._max_body = protocol.bound_bodies(space.num_slots)
        self._flow = FlowWatch(timeouts.stall)
        self._reports = Reports(outbox, self._waker, last_layer=space.shard.layers[-1], clock=clock)
        self._orders = Orders(
            name,
            engine=engine,
            outbox=outbox,
            reports=self._reports,
            account=account,
            block_size=space.layout.block_size,
            draining=draining,
            refuse=self._refuse,
            tracer=tracer,
            clock=clock,
        )
        self._sending: Sending | None = None
        """None before the handshake."""
        self._peer: Identity | None = None
        self._stopping = False
        self._handshake_deadline: float | None = clock() + timeouts.handshake
        self._next_heartbeat = 0.0
        self._fetches = FetchDesk(shelf, account, space.layout.block_size, self._waker.wake, clock)
        self._channel = Channel(sock, self._waker, self, clock)
        self._thread: threading.Thread | None = None

    def start(self, vitals: Vitals) -> None:
        """Raises ThreadStartError; nothing is left open then."""
        try:
            self._thread = vitals.start_thread(f"kv-session-{self._name}", self._run)
        except BaseException:
            self._channel.close()
            self._waker.close()
            raise

    @property
    def established(self) -> bool:
        """Whether the handshake is done: the peer has said who it is and what it holds."""
        return self._peer is not None

    def stop(self) -> None:
        """Any thread."""
        self._stopping = True
        self._waker.wake()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the session's thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    # The owner's thread.

    def _run(self) -> None:
        try:
            self._shake_hands()
            while True:
                self._channel.service()
                header, body = _read_frame(self._channel, _FROM_DECODE, self._timeouts, self._max_body)
                self._channel.rest(self._account.count_frame(header.length))
                self._take(header, body)
        except TransferError as error:
            if isinstance(error, IntegrityError):
                with self._totals.lock:
                    self._totals.damage[error.kind] += 1
            level = logging.INFO if len(self._orders) or not self.established else logging.DEBUG
            logger.log(level, "KV connection from %s ended: %s", self._name, error)
        except Exception:  # a defect must not leave blocks allocated for ever
            logger.exception("the KV connection from %s failed", self._name)
        finally:
            self._end()

    def _shake_hands(self) -> None:
        _, body = _read_frame(self._channel, _HELLO, self._timeouts, self._max_body)
        try:
            peer = protocol.decode_hello(body)
            refusal = self._identity.refusal(peer)
            if refusal is None:
                self._account.identify(peer.worker)
                self._sending = self._agree(peer)
        except TransferError as error:
            peer, refusal = None, str(error)
        if peer is None or refusal is not None or self._sending is None:
            self._channel.queue(protocol.encode_text(FrameKind.REFUSED, 0, refusal or ""))
            self._channel.service()
            raise TransferError(f"refused: {refusal}")
        offers = self._sending.slots.prepare_offers(peer)
        self._channel.queue(protocol.encode_hello(self._transports.sign(replace(self._identity, offers=offers))))
        self._peer, self._handshake_deadline = peer, None

    def _agree(self, peer: Identity) -> Sending:
        """Find out what this connection moves. Raises TransferError."""
        layout, mine = self._space.layout, self._space.shard
        ranks = [rank.shard for rank in self._identity.ranks] or [mine]
        pieces = self._space.locate(agree(layout, ranks, mine, peer.shard or layout.whole_shard))
        self._reports.agree(pieces)
        return Sending(
            pieces,
            self._space.reader(pieces),
            self._orders.find,
            transports=self._transports,
            totals=self._totals,
            clock=self._clock,
        )

    def _take(self, header: Header, body: bytes) -> None:
        assert self._peer is not None, "frames come after the handshake"
        assert self._sending is not None, "it is made by the handshake"
        transfer, sending = header.transfer, self._sending
        if header.kind is FrameKind.GRANT:
            sending.slots.take_grant(transfer, body, self._name)
            return
        if header.kind is FrameKind.PREFILL:
            order = protocol.decode_prefill(body)
            self._orders.take(transfer, order, self._peer.worker, sending.slots.prepare)
            return
        if header.kind is FrameKind.ATTACH:
            count = protocol.decode_attach(body)
            if not sending.pieces:
                raise TransferError("the peer attached to a rank that has nothing for it")
            self._orders.attach(transfer, count * len(sending.pieces), sending.slots.prepare)
            return
        if header.kind is FrameKind.FETCH:
            refusal = self._fetches.take(decode_fetch(body, transfer))
            if refusal is not None:
                self._channel.say(refusal)
            return
        if header.kind is FrameKind.CANCEL and self._fetches.cancel(transfer):
            return
        outgoing = self._orders.find(transfer)
        if outgoing is None:
            self._orders.count_stray()
        elif header.kind is FrameKind.RESEND:
            sending.resend(outgoing, protocol.decode_resend(body), self._account)
        else:
            self._orders.give_up(outgoing, abort=header.kind is not FrameKind.RELEASE or outgoing.done is None)

    def _refuse(self, transfer: int, reason: str) -> None:
        self._channel.say(protocol.encode_text(FrameKind.FAILED, transfer, reason))

    def _end(self) -> None:
        self._channel.close()
        self._waker.close()
        self._fetches.close()
        num_open = self._orders.close()
        with self._totals.lock:
            self._totals.failures += num_open
        self._reports.clear()  # session and channel name each other: Python looks for such cycles, but rarely
        if self._sending is not None:
            self._sending.close()
        self._account.close()
        self._on_closed(self)

    # channel.Events

    def on_posted(self) -> None:
        if self._stopping:
            raise TransferError("this worker is shutting down")
        while (event := self._reports.pop()) is not None:
            outgoing = self._orders.find(event.transfer)
            if outgoing is None or self._sending is None:
                continue
            if isinstance(event, ReadyBlocks):
                self._sending.take_report(outgoing, event)
            elif isinstance(event.outcome, Done):
                self._sending.finish(outgoing, event.outcome)
            else:
                self._orders.give_up(outgoing, abort=False)
                self._refuse(outgoing.transfer, event.outcome)

    def on_tick(self, now: float) -> float | None:
        """Checks deadlines, and what is in flight through slots: often, while something is."""
        delay = self._check_deadlines(now)
        look = None if self._sending is None else self._sending.settle(now, self._channel)
        return min((each for each in (delay, look) if each is not None), default=None)

    def _check_deadlines(self, now: float) -> float | None:
        if self._handshake_deadline is not None:
            if now >= self._handshake_deadline:
                raise TransferError(f"no hello within {self._timeouts.handshake:g} s")
            return self._handshake_deadline - now
        soon = self._fetches.end_late(now, self._channel)
        if not len(self._orders) or self._sending is None:
            return soon
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._timeouts.heartbeat
            self._orders.check(now, self._timeouts.stall)
            waits, sent = self._sending.measure_flow(self._channel)
            self._flow.look(now, waits=waits, bytes_sent=sent)
            for transfer in self._orders.take_begun():
                self._channel.say(protocol.encode_start(transfer))
            self._channel.say(protocol.encode_heartbeat(self._orders.num_steps))
        due = self._next_heartbeat - now
        return due if soon is None else min(due, soon)

    def next_frame(self) -> Sequence[bytes | memoryview] | None:
        """One frame at a time: blocks and the ends of orders, then what is fetched."""
        frame = None if self._sending is None else self._sending.next_frame(self._channel)
        return self._fetches.next_frame() if frame is None else frame


def _read_frame(
    channel: Channel, allowed: frozenset[FrameKind], timeouts: TransferTimeouts, max_body: Mapping[FrameKind, int]
) -> tuple[Header, bytes]:
    data = channel.read_header(protocol.HEADER_BYTES, timeouts.frame)
    header = protocol.decode_header(data, allowed, max_body)
    channel.extend_deadline(header.length)
    body = bytes(channel.read(header.length))
    protocol.check_body(header, body)
    return header, body
