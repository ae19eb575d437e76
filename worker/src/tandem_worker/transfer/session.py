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
from dataclasses import dataclass, field, replace

from tandem_worker.engine.base import RemotePrefill
from tandem_worker.errors import TransferError, WorkerError
from tandem_worker.transfer import protocol
from tandem_worker.transfer.base import BandwidthMeter, Identity, PrefillEngine, TransferTimeouts
from tandem_worker.transfer.blocks import BlockReader, BlockSpace, checksum
from tandem_worker.transfer.channel import Channel, Waker, configure
from tandem_worker.transfer.outbox import Outbox, ReadyBlocks, Shelf
from tandem_worker.transfer.protocol import BlockRange, Done, Header, Kind
from tandem_worker.transfer.slicing import Piece, agree

logger = logging.getLogger(__name__)

_FROM_DECODE = frozenset({Kind.PREFILL, Kind.ATTACH, Kind.RESEND, Kind.RELEASE, Kind.CANCEL})
_HELLO = frozenset({Kind.HELLO})
_ACKNOWLEDGE_SECONDS = 30.0
"""A peer that was sent everything and does not answer for this long is hung: its connection is dropped."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    transfer: int
    shelf: Shelf
    engine_id: str | None
    """Of an order that this connection brought; None where it attached to one."""
    num_unreported: int = 0
    """Of an attached order: slices of blocks that are still to be computed."""
    block_ids: dict[int, int] = field(default_factory=dict)
    """Our block of each reported block of the prompt; the same in every layer."""
    done: Done | None = None
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    transfer: int
    outcome: Done | str
    """A result, or why there is none."""


@dataclass(slots=True)
class SessionTotals:
    """Shared by the sessions of a server."""

    bytes_sent: int = 0
    failures: int = 0
    resends: int = 0
    meter: BandwidthMeter = field(default_factory=BandwidthMeter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Session:
    """Implements `engine.base.LayerListener` (engine thread), `outbox.Reader` and `channel.Events` (own thread)."""

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
        timeouts: TransferTimeouts,
        on_closed: Callable[[Session], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`engine` is the one that takes orders; ranks that follow have none and are attached to."""
        self._name = name
        self._engine = engine
        self._outbox = outbox
        self._space = space
        self._identity = identity
        self._draining = draining
        self._totals = totals
        self._timeouts = timeouts
        self._on_closed = on_closed
        self._clock = clock
        self._waker = Waker()
        self._reported: deque[ReadyBlocks | _Ended] = deque()
        self._to_send: deque[ReadyBlocks] = deque()
        self._to_finish: deque[_Outgoing] = deque()
        self._orders: dict[int, _Outgoing] = {}
        self._transfers: dict[str, int] = {}
        """By the engine's name of an order."""
        self._pieces: dict[int, Piece] = {}
        self._reader: BlockReader | None = None
        self._peer: Identity | None = None
        self._stopping = False
        self._handshake_deadline: float | None = clock() + timeouts.handshake
        self._next_heartbeat = 0.0
        self._frame_started = 0.0
        self._frame_bytes = 0
        configure(sock)
        self._channel = Channel(sock, self._waker, self, clock)
        self._thread = threading.Thread(target=self._run, name=f"kv-session-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def established(self) -> bool:
        return self._peer is not None

    def stop(self) -> None:
        """Any thread."""
        self._stopping = True
        self._waker.wake()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    # engine.base.LayerListener: called on the engine thread, must only enqueue.

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: Sequence[int]) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._outbox.report(transfer, layer, first_index, block_ids)

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int) -> None:
        self._end_order(request_id, Done(num_cached_tokens, logits))

    def prefill_failed(self, request_id: str, message: str) -> None:
        self._end_order(request_id, message)

    def _end_order(self, request_id: str, outcome: Done | str) -> None:
        transfer = self._transfers.get(request_id)
        if transfer is not None:
            self._post(_Ended(transfer, outcome))

    # outbox.Reader

    def take(self, ready: ReadyBlocks) -> None:
        self._post(ready)

    def closed(self, transfer: int) -> None:
        self._post(_Ended(transfer, "the order has ended at the first rank"))

    def _post(self, event: ReadyBlocks | _Ended) -> None:
        self._reported.append(event)
        self._waker.wake()

    # The owner's thread.

    def _run(self) -> None:
        try:
            self._shake_hands()
            while True:
                self._channel.service()
                header = protocol.decode_header(self._channel.read(protocol.HEADER_BYTES), _FROM_DECODE)
                self._take(header, bytes(self._channel.read(header.length)))
        except TransferError as error:
            level = logging.INFO if self._orders or not self.established else logging.DEBUG
            logger.log(level, "KV connection from %s ended: %s", self._name, error)
        except Exception:  # a defect must not leave blocks allocated for ever
            logger.exception("the KV connection from %s failed", self._name)
        finally:
            self._end()

    def _shake_hands(self) -> None:
        header = protocol.decode_header(self._channel.read(protocol.HEADER_BYTES), _HELLO)
        body = bytes(self._channel.read(header.length))
        try:
            peer = protocol.decode_hello(body)
            refusal = self._identity.refusal(peer)
            if refusal is None:
                self._agree(peer)
        except TransferError as error:
            peer, refusal = None, str(error)
        if peer is None or refusal is not None:
            self._channel.queue(protocol.encode_text(Kind.REFUSED, 0, refusal or ""))
            self._channel.service()
            raise TransferError(f"refused: {refusal}")
        self._channel.queue(protocol.encode_hello(self._identity))
        self._peer, self._handshake_deadline = peer, None

    def _agree(self, peer: Identity) -> None:
        """Find out what this connection moves. Raises TransferError."""
        layout, mine = self._space.layout, self._space.shard
        ranks = [rank.shard for rank in self._identity.ranks] or [mine]
        self._pieces = self._space.locate(agree(layout, ranks, mine, peer.shard or layout.whole_shard))
        self._reader = self._space.reader(self._pieces)

    def _take(self, header: Header, body: bytes) -> None:
        if header.kind is Kind.PREFILL:
            self._take_order(header.transfer, protocol.decode_prefill(body))
            return
        if header.kind is Kind.ATTACH:
            self._take_attachment(header.transfer, protocol.decode_attach(body))
            return
        outgoing = self._orders.get(header.transfer)
        if outgoing is None:
            return
        if header.kind is Kind.RESEND:
            self._resend(outgoing, protocol.decode_resend(body))
        else:
            self._give_up(outgoing, abort=header.kind is not Kind.RELEASE or outgoing.done is None)

    def _take_order(self, transfer: int, order: RemotePrefill) -> None:
        assert self._peer is not None, "orders come after the handshake"
        if transfer in self._orders:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if order.num_cached_tokens % self._space.layout.block_size:
            raise TransferError("the peer's order begins inside a block")
        refusal = "draining" if self._draining() else None
        if self._engine is None:
            refusal = "this rank takes no orders: the first rank of its group does"
        elif refusal is None and not self._outbox.open(transfer):
            refusal = f"transfer number {transfer} is in use"
        if self._engine is None or refusal is not None:
            self._channel.queue(protocol.encode_text(Kind.FAILED, transfer, refusal or ""))
            return
        # Request ids are the clients': two decode workers may bring the same one, one worker may bring it again.
        engine_id = f"{order.request_id}/{self._name}/{transfer}"
        outgoing = _Outgoing(transfer, self._outbox.attach(transfer, self), engine_id)
        self._orders[transfer] = outgoing
        self._transfers[engine_id] = transfer
        try:
            self._engine.submit_prefill(replace(order, request_id=engine_id), self)
        except WorkerError as error:
            self._forget(outgoing)
            self._channel.queue(protocol.encode_text(Kind.FAILED, transfer, str(error)))

    def _take_attachment(self, transfer: int, count: int) -> None:
        if transfer in self._orders:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if not self._pieces:
            raise TransferError("the peer attached to a rank that has nothing for it")
        shelf = self._outbox.attach(transfer, self)
        self._orders[transfer] = _Outgoing(transfer, shelf, None, num_unreported=count * len(self._pieces))

    def _resend(self, outgoing: _Outgoing, ranges: Sequence[BlockRange]) -> None:
        if outgoing.done is None or outgoing.sent_at is None:
            raise TransferError("the peer asked for blocks again before all of them were sent")
        for blocks in ranges:
            if blocks.layer not in self._pieces or not 0 < blocks.count <= protocol.MAX_BLOCKS_PER_FRAME:
                raise TransferError("the peer asked for blocks that there are not")
            known = [outgoing.block_ids.get(index) for index in _indices(blocks)]
            ids = tuple(block for block in known if block is not None)
            if len(ids) != len(known):
                raise TransferError("the peer asked for blocks that were never sent")
            self._to_send.append(ReadyBlocks(outgoing.transfer, blocks, ids, None))
        with self._totals.lock:
            self._totals.resends += 1
        outgoing.sent_at = None
        self._to_finish.append(outgoing)

    def _forget(self, outgoing: _Outgoing) -> None:
        """Before the engine hears of it: no connection of the group reads the blocks when they are given back."""
        self._orders.pop(outgoing.transfer, None)
        self._outbox.detach(outgoing.transfer, self)
        if outgoing.engine_id is not None:
            self._transfers.pop(outgoing.engine_id, None)
            self._outbox.close(outgoing.transfer)

    def _give_up(self, outgoing: _Outgoing, *, abort: bool) -> None:
        self._forget(outgoing)
        if outgoing.engine_id is not None and self._engine is not None:
            if abort:
                self._engine.abort(outgoing.engine_id)
            self._engine.release(outgoing.engine_id)

    def _end(self) -> None:
        self._channel.close()
        self._waker.close()
        with self._totals.lock:
            self._totals.failures += len(self._transfers)
        for outgoing in list(self._orders.values()):
            self._give_up(outgoing, abort=True)
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
                self._channel.queue(protocol.encode_text(Kind.FAILED, outgoing.transfer, event.outcome))

    def _take_report(self, outgoing: _Outgoing, ready: ReadyBlocks) -> None:
        outgoing.block_ids.update(zip(_indices(ready.blocks), ready.block_ids, strict=True))
        if ready.blocks.layer not in self._pieces:
            return
        self._to_send.append(ready)
        if outgoing.engine_id is None:
            outgoing.num_unreported -= ready.blocks.count
            if outgoing.num_unreported == 0:
                outgoing.done = Done(0, b"")
                self._to_finish.append(outgoing)

    def on_tick(self, now: float) -> float | None:
        if self._handshake_deadline is not None:
            if now >= self._handshake_deadline:
                raise TransferError(f"no hello within {self._timeouts.handshake:g} s")
            return self._handshake_deadline - now
        if not self._orders:
            return None
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._timeouts.heartbeat
            self._check_acknowledgements(now)
            steps = 0 if self._engine is None else self._engine.stats().steps_total
            self._channel.queue(protocol.encode_heartbeat(steps))
        return self._next_heartbeat - now

    def _check_acknowledgements(self, now: float) -> None:
        for outgoing in self._orders.values():
            if outgoing.sent_at is not None and now - outgoing.sent_at > _ACKNOWLEDGE_SECONDS:
                raise TransferError(f"the peer has not acknowledged an order for {_ACKNOWLEDGE_SECONDS:g} s")

    def next_frame(self) -> Sequence[bytes | memoryview] | None:
        """One frame at a time: its checksums are computed while the ones before it are on their way."""
        self._account()
        while self._to_send:
            ready = self._to_send[0]
            outgoing = self._orders.get(ready.transfer)
            if outgoing is not None:
                with outgoing.shelf.guard:
                    if outgoing.shelf.is_open:
                        return self._blocks_frame(ready)
            self._to_send.popleft()  # cancelled meanwhile
        while self._to_finish:
            outgoing = self._to_finish.popleft()
            if self._orders.get(outgoing.transfer) is outgoing and outgoing.done is not None:
                outgoing.sent_at = self._clock()
                return [protocol.encode_done(outgoing.transfer, outgoing.done)]
        return None

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
        sums = [checksum(runs) for runs in views.blocks]
        self._frame_bytes, self._frame_started = size * blocks.count, self._clock()
        return [protocol.encode_blocks_head(ready.transfer, blocks, sums, self._frame_bytes), *views.spans]

    def _account(self) -> None:
        """The frame before this call has left."""
        if self._frame_bytes:
            with self._totals.lock:
                self._totals.bytes_sent += self._frame_bytes
                self._totals.meter.observe(self._frame_bytes, self._clock() - self._frame_started)
            self._frame_bytes = 0


def _indices(blocks: BlockRange) -> range:
    return range(blocks.first, blocks.first + blocks.count)
