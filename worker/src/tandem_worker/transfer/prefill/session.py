"""Prefill side: the connection of one decode rank, its orders, and the orders of its group that it attached to.

One thread owns the connection. Others only append to `_reported` and wake it. Blocks are sent straight from the block
space when their turn comes, so what waits here is a few numbers per layer, never a copy of the data; the blocks stay
allocated until the peer has acknowledged the order, cancelled it, or is gone.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tandem_api.tracing import Tracer

from tandem_worker.engine.contract import PrefillEngine, RemotePrefill
from tandem_worker.host.errors import WorkerError
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer import protocol
from tandem_worker.transfer.blocks import BlockReader, BlockSpace
from tandem_worker.transfer.channel import Channel, Waker, configure
from tandem_worker.transfer.checksums import sum_blocks
from tandem_worker.transfer.choice import MOONCAKE, TCP
from tandem_worker.transfer.contract import Identity, Offer, TransferTimeouts
from tandem_worker.transfer.errors import IntegrityError, QuotaError, TransferError
from tandem_worker.transfer.fetches import BlockShelf, decode_fetch
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.fetching import FetchDesk
from tandem_worker.transfer.prefill.outbox import Outbox
from tandem_worker.transfer.prefill.outgoing import Ended, FlowWatch, Outgoing, SessionTotals, count_up
from tandem_worker.transfer.prefill.quotas import Account, Quota
from tandem_worker.transfer.prefill.tracing import OrderTrace
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind, Header
from tandem_worker.transfer.slicing import Piece, agree
from tandem_worker.transfer.transports import Transports

if TYPE_CHECKING:
    from tandem_worker.transfer.mooncake.departure import Departures
    from tandem_worker.transfer.mooncake.frames import Landed

logger = logging.getLogger(__name__)

_FROM_DECODE = frozenset(
    {
        FrameKind.GRANT, FrameKind.PREFILL, FrameKind.ATTACH, FrameKind.RESEND, FrameKind.RELEASE, FrameKind.CANCEL,
        FrameKind.FETCH,
    }
)  # fmt: skip
_HELLO = frozenset({FrameKind.HELLO})
_ACKNOWLEDGE_SECONDS = 30.0
"""A peer that was sent everything and does not answer for this long is hung: its connection is dropped."""
LOOK_SECONDS = 0.001
"""Between two looks at what is in flight through slots: polling without sleep costs a core."""
_LAST_FRAME_SECONDS = 1.0
"""In which a peer takes what is on its way when its time is over."""
_GATHERED_SECONDS = 0.004
_GATHERED_BYTES = 256 << 10
"""Layers that are done sooner after one another, and are no more than this, are sent together: of a short prompt each
would wake a thread here and one of the peer's."""
_MAX_STRAYS = 4096
"""Frames about orders that are not open, since the last good order: some are late, so many are a flood."""


class Session:
    """Implements `engine.contract.LayerListener` (engine thread), `outbox.Reader` and `channel.Events` (own thread)."""

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
        self._engine = engine
        self._outbox = outbox
        self._space = space
        self._last_layer = space.shard.layers[-1]
        self._identity = identity
        self._draining = draining
        self._totals = totals
        self._account = account
        self._timeouts = timeouts
        self._on_closed = on_closed
        self._tracer = tracer
        self._transports = transports
        self._departures: Departures | None = None
        """What goes through slots; None where one end has no Mooncake."""
        self._through_slots: int | None = None
        """The order that comes next, where it does."""
        self._clock = clock
        configure(sock)
        self._waker = Waker()
        self._max_body = protocol.bound_bodies(space.num_slots)
        self._flow = FlowWatch(timeouts.stall)
        self._num_strays = 0
        self._reported: deque[ReadyBlocks | Ended] = deque()
        self._gathered_since = 0.0
        self._gathered_bytes = 0
        """Bytes of blocks in `_reported` that nobody has woken this thread for."""
        self._to_send: deque[ReadyBlocks] = deque()
        self._to_finish: deque[Outgoing] = deque()
        self._orders: dict[int, Outgoing] = {}
        self._transfers: dict[str, int] = {}
        """Numbers by the engine's name of an order."""
        self._begun: set[int] = set()
        """Transfers whose prompts the engine has begun with, and nobody has told the peer."""
        self._pieces: dict[int, Piece] = {}
        self._reader: BlockReader | None = None
        self._peer: Identity | None = None
        self._stopping = False
        self._handshake_deadline: float | None = clock() + timeouts.handshake
        self._next_heartbeat = 0.0
        self._frame_started = 0.0
        self._frame_bytes = 0
        self._frame_of: Outgoing | None = None
        """Traced, and the one whose frame leaves."""
        self._last_frame: tuple[float, int] | None = None
        """Until when the peer has to have taken what waited as a fetch of its ended, and the bytes sent by then."""
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

    # engine.contract.LayerListener: called on the engine thread, must only enqueue.

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._outbox.report(transfer, layer, first_index, block_ids)

    def prefill_started(self, request_id: str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._begun.add(transfer)  # told with the next heartbeat, if no block has gone by then

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int, prompt_name: bytes) -> None:
        self._end_order(request_id, Done(num_cached_tokens, logits, prompt_name))

    def prefill_failed(self, request_id: str, message: str) -> None:
        self._end_order(request_id, message)

    def _end_order(self, request_id: str, outcome: Done | str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._post(Ended(transfer, outcome))

    # outbox.Reader

    def take(self, ready: ReadyBlocks) -> None:
        """Under the outbox's lock. Every report ends with the last layer, for which nothing waits."""
        self._reported.append(ready)
        layer, now = ready.blocks.layer, self._clock()
        if layer in self._pieces:
            self._gathered_bytes += ready.blocks.count * self._pieces[layer].num_bytes
        late = now - self._gathered_since >= _GATHERED_SECONDS
        if late or self._gathered_bytes >= _GATHERED_BYTES or layer == self._last_layer:
            self._gathered_since, self._gathered_bytes = now, 0
            self._waker.wake()

    def closed(self, transfer: int) -> None:
        self._post(Ended(transfer, "the order has ended at the first rank"))

    def _post(self, event: Ended) -> None:
        self._reported.append(event)
        self._waker.wake()

    # The owner's thread.

    def _run(self) -> None:
        try:
            self._shake_hands()
            while True:
                self._channel.service()
                header, body = self._read_frame(_FROM_DECODE)
                self._channel.rest(self._account.count_frame(header.length))
                self._take(header, body)
        except TransferError as error:
            if isinstance(error, IntegrityError):
                with self._totals.lock:
                    self._totals.damage[error.kind] += 1
            level = logging.INFO if self._orders or not self.established else logging.DEBUG
            logger.log(level, "KV connection from %s ended: %s", self._name, error)
        except Exception:  # a defect must not leave blocks allocated for ever
            logger.exception("the KV connection from %s failed", self._name)
        finally:
            self._end()

    def _read_frame(self, allowed: frozenset[FrameKind]) -> tuple[Header, bytes]:
        data = self._channel.read_header(protocol.HEADER_BYTES, self._timeouts.frame)
        header = protocol.decode_header(data, allowed, self._max_body)
        self._channel.extend_deadline(header.length)
        body = bytes(self._channel.read(header.length))
        protocol.check_body(header, body)
        return header, body

    def _shake_hands(self) -> None:
        _, body = self._read_frame(_HELLO)
        try:
            peer = protocol.decode_hello(body)
            refusal = self._identity.refusal(peer)
            if refusal is None:
                self._account.identify(peer.worker)
                self._agree(peer)
        except TransferError as error:
            peer, refusal = None, str(error)
        if peer is None or refusal is not None:
            self._channel.queue(protocol.encode_text(FrameKind.REFUSED, 0, refusal or ""))
            self._channel.service()
            raise TransferError(f"refused: {refusal}")
        offered = self._transports.sign(replace(self._identity, offers=self._prepare_offers(peer)))
        self._channel.queue(protocol.encode_hello(offered))
        self._peer, self._handshake_deadline = peer, None

    def _prepare_offers(self, peer: Identity) -> tuple[Offer, ...]:
        """What this peer is offered: with Mooncake an engine is put aside for it, or it is told that none is left."""
        ours = self._transports.offers
        if self._transports.stations is None or not self._pieces or not any(not each.obstacle for each in peer.offers):
            return ours
        from tandem_worker.transfer.mooncake.departure import Departures

        assert self._reader is not None, "both ends agree before"
        try:
            self._departures = Departures(self._transports.stations, self._reader, self._pieces)
        except TransferError as error:
            return tuple(replace(each, obstacle=str(error)) for each in ours)
        return ours

    def _agree(self, peer: Identity) -> None:
        """Find out what this connection moves. Raises TransferError."""
        layout, mine = self._space.layout, self._space.shard
        ranks = [rank.shard for rank in self._identity.ranks] or [mine]
        self._pieces = self._space.locate(agree(layout, ranks, mine, peer.shard or layout.whole_shard))
        self._reader = self._space.reader(self._pieces)

    def _take(self, header: Header, body: bytes) -> None:
        if header.kind is FrameKind.GRANT:
            self._take_grant(header.transfer, body)
            return
        if header.kind is FrameKind.PREFILL:
            self._take_order(header.transfer, protocol.decode_prefill(body))
            return
        if header.kind is FrameKind.ATTACH:
            self._take_attachment(header.transfer, protocol.decode_attach(body))
            return
        if header.kind is FrameKind.FETCH:
            refusal = self._fetches.take(decode_fetch(body, header.transfer))
            if refusal is not None:
                self._channel.say(refusal)
            return
        if header.kind is FrameKind.CANCEL and self._fetches.cancel(header.transfer):
            return
        outgoing = self._orders.get(header.transfer)
        if outgoing is None:
            self._num_strays += 1
            if self._num_strays > _MAX_STRAYS:
                raise TransferError(f"the peer sent {_MAX_STRAYS} frames about orders that are not open")
            return
        if header.kind is FrameKind.RESEND:
            self._resend(outgoing, protocol.decode_resend(body))
        else:
            self._give_up(outgoing, abort=header.kind is not FrameKind.RELEASE or outgoing.done is None)

    def _take_grant(self, transfer: int, body: bytes) -> None:
        from tandem_worker.transfer.mooncake.frames import decode_grant, is_same_host

        if self._departures is None:
            raise TransferError("the peer granted slots, and this worker has not offered Mooncake")
        grant = decode_grant(body)
        if not is_same_host(grant.engine, self._name):
            raise TransferError(
                f"the peer, {self._name}, granted slots of an engine at {grant.engine}, another address"
            )
        self._departures.take_grant(grant)
        if transfer:
            self._through_slots = transfer

    def _departures_of(self, transfer: int) -> Departures | None:
        """Through which an order goes that has just come; None: through this connection."""
        named, self._through_slots = self._through_slots, None
        return self._departures if named == transfer else None

    def _take_order(self, transfer: int, order: RemotePrefill) -> None:
        assert self._peer is not None, "orders come after the handshake"
        if transfer in self._orders:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if order.num_cached_tokens % self._space.layout.block_size:
            raise TransferError("the peer's order begins inside a block")
        refusal = "draining" if self._draining() else None
        priority = self._account.place(order.priority, len(order.token_ids))
        if self._engine is None:
            refusal = "this rank takes no orders: the first rank of its group does, where that is a prefill worker"
        elif refusal is None:
            refusal = self._open_order(transfer, len(order.token_ids))
        if self._engine is None or refusal is not None:
            self._refuse(transfer, refusal or "")
            return
        # Request ids are the clients': two decode workers may bring the same one, one worker may bring it again.
        engine_id = f"{order.request_id}/{self._name}/{transfer}"
        num_tokens = len(order.token_ids)
        outgoing = Outgoing(transfer, self._outbox.attach(transfer, self), engine_id, num_tokens, self._clock())
        outgoing.departures = self._departures_of(transfer)
        self._orders[transfer] = outgoing
        self._transfers[engine_id] = transfer
        self._num_strays = 0
        noted = None
        if order.hop is not None and order.hop.context.sampled and self._tracer is not None and self._tracer.active:
            outgoing.trace = OrderTrace(order, self._peer.worker)
            noted = outgoing.trace.request
        inside = replace(order, request_id=engine_id, priority=priority, trace=noted, hop=None)
        try:
            self._engine.submit_prefill(inside, self)
        except WorkerError as error:
            self._forget(outgoing)
            self._refuse(transfer, str(error))

    def _open_order(self, transfer: int, num_tokens: int) -> str | None:
        """Why it cannot be taken; None: it is in the account and in the outbox."""
        try:
            self._account.take_order(num_tokens)
        except QuotaError as error:
            return str(error)
        if not self._outbox.open(transfer):
            self._account.return_order(num_tokens)
            return f"transfer number {transfer} is in use"
        return None

    def _take_attachment(self, transfer: int, count: int) -> None:
        if transfer in self._orders:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if not self._pieces:
            raise TransferError("the peer attached to a rank that has nothing for it")
        try:
            self._account.take_attachment()
        except QuotaError as error:
            self._refuse(transfer, str(error))
            return
        shelf = self._outbox.attach(transfer, self)
        outgoing = Outgoing(transfer, shelf, None, since=self._clock(), num_unreported=count * len(self._pieces))
        outgoing.departures = self._departures_of(transfer)
        self._orders[transfer] = outgoing

    def _refuse(self, transfer: int, reason: str) -> None:
        self._channel.say(protocol.encode_text(FrameKind.FAILED, transfer, reason))

    def _resend(self, outgoing: Outgoing, ranges: Sequence[BlockRange]) -> None:
        outgoing.resends += 1
        if outgoing.resends > protocol.MAX_RESENDS:
            raise self._account.ledger.refuse(Quota.RESENDS, "the peer asked for blocks again too often")
        for ready in outgoing.find_again(ranges, tuple(self._pieces)):
            self._send(outgoing, ready)
        with self._totals.lock:
            self._totals.resends += 1
        outgoing.sent_at = None
        self._to_finish.append(outgoing)

    def _forget(self, outgoing: Outgoing) -> None:
        """Before the engine hears of it: no connection of the group reads the blocks when they are given back."""
        self._orders.pop(outgoing.transfer, None)
        self._outbox.detach(outgoing.transfer, self)
        if outgoing.engine_id is None:
            self._account.return_attachment()
            return
        self._transfers.pop(outgoing.engine_id, None)
        self._begun.discard(outgoing.transfer)
        self._outbox.close(outgoing.transfer)
        self._account.return_order(outgoing.num_tokens)

    def _give_up(self, outgoing: Outgoing, *, abort: bool) -> None:
        self._forget(outgoing)
        if outgoing.trace is not None and self._tracer is not None:
            failure = None if not abort and outgoing.done is not None else "not_wanted" if abort else "not_computed"
            self._tracer.add(outgoing.trace.build(failure))
        if outgoing.engine_id is not None and self._engine is not None:
            if abort:
                self._engine.abort(outgoing.engine_id)
            self._engine.release(outgoing.engine_id)

    def _end(self) -> None:
        self._channel.close()
        self._waker.close()
        with self._totals.lock:
            self._totals.failures += len(self._transfers)
        self._fetches.close()
        for outgoing in list(self._orders.values()):
            self._give_up(outgoing, abort=True)
        for queue in (self._reported, self._to_send, self._to_finish):
            queue.clear()  # session and channel name each other: Python looks for such cycles, but rarely
        if self._departures is not None:
            self._departures.close()
        self._account.close()
        self._on_closed(self)

    # channel.Events

    def on_posted(self) -> None:
        if self._stopping:
            raise TransferError("this worker is shutting down")
        while self._reported:
            event = self._reported.popleft()
            outgoing = self._orders.get(event.transfer)
            if outgoing is None:
                continue
            if isinstance(event, ReadyBlocks):
                self._take_report(outgoing, event)
            elif isinstance(event.outcome, Done):
                outgoing.done = event.outcome
                self._to_finish.append(outgoing)
            else:
                self._give_up(outgoing, abort=False)
                self._refuse(outgoing.transfer, event.outcome)

    def _take_report(self, outgoing: Outgoing, ready: ReadyBlocks) -> None:
        outgoing.block_ids.update(zip(count_up(ready.blocks), ready.block_ids, strict=True))
        if ready.blocks.layer not in self._pieces:
            return
        self._send(outgoing, ready)
        if outgoing.engine_id is None:
            outgoing.num_unreported -= ready.blocks.count
            if outgoing.num_unreported == 0:
                outgoing.done = Done(0, b"")
                self._to_finish.append(outgoing)

    def _send(self, outgoing: Outgoing, ready: ReadyBlocks) -> None:
        if outgoing.departures is None:
            self._to_send.append(ready)
        else:
            outgoing.departures.add(ready)

    def on_tick(self, now: float) -> float | None:
        """Checks deadlines, and what is in flight through slots: often, while something is."""
        delay = self._check_deadlines(now)
        if self._departures is None or not self._departures.busy:
            return delay
        self._tell_landed(self._departures.settle(now))
        # What waits for the socket goes first, and nothing is gathered meanwhile: no reason to look without a pause.
        look = 0.0 if self._departures.can_submit and not self._channel.has_output else LOOK_SECONDS
        return look if delay is None else min(delay, look)

    def _tell_landed(self, ended: Sequence[tuple[int, Landed, int]]) -> None:
        from tandem_worker.transfer.mooncake.frames import encode_landed

        for transfer, landed, num_bytes in ended:
            self._channel.queue(encode_landed(transfer, landed))
            if landed.lost:
                continue
            seconds = landed.micros / 1e6
            self._transports.note_moved(MOONCAKE, num_bytes, seconds)
            with self._totals.lock:
                self._totals.bytes_sent += num_bytes
                self._totals.meter.observe(num_bytes, seconds)
            outgoing = self._orders.get(transfer)
            if outgoing is not None and outgoing.trace is not None:
                outgoing.trace.sent.note_blocks(num_bytes, self._clock() - seconds, self._clock())

    def _check_deadlines(self, now: float) -> float | None:
        if self._handshake_deadline is not None:
            if now >= self._handshake_deadline:
                raise TransferError(f"no hello within {self._timeouts.handshake:g} s")
            return self._handshake_deadline - now
        soon = self._end_late_fetches(now)
        if not self._orders:
            return soon
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._timeouts.heartbeat
            self._check_orders(now)
            waits, sent = self._channel.has_output or bool(self._to_send), self._channel.bytes_sent
            if self._departures is not None:
                waits, sent = waits or self._departures.waits, sent + self._departures.bytes_landed
            self._flow.look(now, waits=waits, bytes_sent=sent)
            while self._begun:
                self._channel.say(protocol.encode_start(self._begun.pop()))
            steps = 0 if self._engine is None else self._engine.stats().steps_total
            self._channel.say(protocol.encode_heartbeat(steps))
        due = self._next_heartbeat - now
        return due if soon is None else min(due, soon)

    def _end_late_fetches(self, now: float) -> float | None:
        """Seconds until the next look; None: there is nothing to look at. A frame that is on its way keeps a buffer
        here, not for as long as the peer likes. Raises TransferError where it does not take that one either."""
        late = self._fetches.expire(now)
        if late and self._channel.has_output:
            until = now + _LAST_FRAME_SECONDS if self._last_frame is None else self._last_frame[0]
            self._last_frame = until, self._channel.bytes_sent + self._channel.bytes_waiting
        for frame in late:
            self._channel.say(frame)
        soon = self._fetches.next_check(now)
        if self._last_frame is None:
            return soon
        until, end = self._last_frame
        if self._channel.bytes_sent >= end:
            self._last_frame = None
        elif now >= until:
            raise TransferError("the peer does not take the blocks that it has asked for")
        return until - now if soon is None else min(soon, until - now)

    def _check_orders(self, now: float) -> None:
        for outgoing in list(self._orders.values()):
            if outgoing.sent_at is not None and now - outgoing.sent_at > _ACKNOWLEDGE_SECONDS:
                raise TransferError(f"the peer has not acknowledged an order for {_ACKNOWLEDGE_SECONDS:g} s")
            never_opened = outgoing.engine_id is None and not outgoing.shelf.is_open
            if never_opened and now - outgoing.since > self._timeouts.stall:
                self._forget(outgoing)
                self._refuse(outgoing.transfer, f"no order of this number came within {self._timeouts.stall:g} s")

    def next_frame(self) -> Sequence[bytes | memoryview] | None:
        """One frame at a time: its checksums are computed while the ones before it are on their way."""
        self._note_sent()
        if self._departures is not None:
            lost = self._departures.pump(self._clock(), self._read_guarded)
            if lost:
                self._tell_landed(lost)
                return []
        while self._to_send:
            ready = self._to_send[0]
            outgoing = self._orders.get(ready.transfer)
            if outgoing is not None:
                with outgoing.shelf.guard:
                    if outgoing.shelf.is_open:
                        return self._blocks_frame(ready)
            self._to_send.popleft()  # cancelled meanwhile
        for outgoing in tuple(self._to_finish):
            if outgoing.departures is not None and outgoing.departures.has_of(outgoing.transfer):
                continue  # DONE comes after the last of its blocks
            self._to_finish.remove(outgoing)
            if self._orders.get(outgoing.transfer) is outgoing and outgoing.done is not None:
                outgoing.sent_at = self._clock()
                return [protocol.encode_done(outgoing.transfer, outgoing.done)]
        return self._fetches.next_frame()

    def _read_guarded(self, ready: ReadyBlocks, read: Callable[[], None]) -> bool:
        """Run `read` while these blocks are what the engine computed; False where they may be another's by now."""
        outgoing = self._orders.get(ready.transfer)
        if outgoing is None:
            return False
        with outgoing.shelf.guard:
            if outgoing.shelf.is_open:
                read()
            return outgoing.shelf.is_open

    def _blocks_frame(self, ready: ReadyBlocks) -> Sequence[bytes | memoryview]:
        """The first blocks of `ready` that fit one frame; the rest stays at the head of the queue."""
        assert self._reader is not None, "blocks are sent after the handshake"
        blocks = ready.blocks
        size = self._pieces[blocks.layer].num_bytes
        fit = max(1, min(protocol.MAX_PAYLOAD_BYTES // size, protocol.MAX_BLOCKS_PER_FRAME))
        if blocks.count > fit:
            rest = BlockRange(blocks.layer, blocks.first + fit, blocks.count - fit)
            self._to_send[0] = replace(ready, blocks=rest, block_ids=ready.block_ids[fit:])
            blocks = BlockRange(blocks.layer, blocks.first, fit)
        else:
            self._to_send.popleft()
        views = self._reader.views(blocks.layer, ready.block_ids[: blocks.count], ready.fence)
        sums = sum_blocks(views.blocks, ready.transfer, blocks.layer, blocks.first)
        self._frame_bytes, self._frame_started = size * blocks.count, self._clock()
        outgoing = self._orders.get(ready.transfer)
        self._frame_of = outgoing if outgoing is not None and outgoing.trace is not None else None
        return [protocol.encode_blocks_head(ready.transfer, blocks, sums, self._frame_bytes), *views.spans]

    def _note_sent(self) -> None:
        """The frame before this call has left."""
        if self._frame_bytes:
            with self._totals.lock:
                self._totals.bytes_sent += self._frame_bytes
                self._totals.meter.observe(self._frame_bytes, self._clock() - self._frame_started)
            self._transports.note_moved(TCP, self._frame_bytes, self._clock() - self._frame_started)
            if self._frame_of is not None and self._frame_of.trace is not None:
                self._frame_of.trace.sent.note_blocks(self._frame_bytes, self._frame_started, self._clock())
            self._frame_bytes = 0
