"""Prefill side: the connection of one decode worker and its orders.

One thread owns the connection. The engine thread only appends to `_reported` and wakes it. Blocks are sent straight
from the block space when their turn comes, so what waits here is a few numbers per layer, never a copy of the data; the
blocks stay allocated until the peer has acknowledged the order, cancelled it, or is gone.
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
from tandem_worker.transfer.blocks import BlockSpace, checksum
from tandem_worker.transfer.channel import Channel, Waker, configure
from tandem_worker.transfer.protocol import BlockRange, Done, Header, Kind

logger = logging.getLogger(__name__)

_FROM_DECODE = frozenset({Kind.PREFILL, Kind.RESEND, Kind.RELEASE, Kind.CANCEL})
_HELLO = frozenset({Kind.HELLO})
_ACKNOWLEDGE_SECONDS = 30.0
"""A peer that was sent everything and does not answer for this long is hung: its connection is dropped."""


@dataclass(frozen=True, slots=True)
class _Ready:
    engine_id: str
    blocks: BlockRange
    block_ids: tuple[int, ...]
    fence: object


@dataclass(slots=True, eq=False)
class _Outgoing:
    transfer: int
    engine_id: str
    block_ids: dict[int, int] = field(default_factory=dict)
    """Our block of each reported block of the prompt; the same in every layer."""
    done: Done | None = None
    sent_at: float | None = None


@dataclass(frozen=True, slots=True)
class _Ended:
    engine_id: str
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
    """Implements `engine.base.LayerListener` (engine thread) and `channel.Events` (own thread)."""

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        *,
        engine: PrefillEngine,
        space: BlockSpace,
        identity: Identity,
        draining: Callable[[], bool],
        totals: SessionTotals,
        timeouts: TransferTimeouts,
        on_closed: Callable[[Session], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._engine = engine
        self._space = space
        self._identity = identity
        self._draining = draining
        self._totals = totals
        self._timeouts = timeouts
        self._on_closed = on_closed
        self._clock = clock
        self._waker = Waker()
        self._reported: deque[_Ready | _Ended] = deque()
        self._to_send: deque[_Ready] = deque()
        self._to_finish: deque[_Outgoing] = deque()
        self._orders: dict[int, _Outgoing] = {}
        self._by_engine_id: dict[str, _Outgoing] = {}
        self._reader = space.reader()
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
        if block_ids:
            blocks = BlockRange(layer, first_index, len(block_ids))
            self._reported.append(_Ready(request_id, blocks, tuple(block_ids), self._space.fence()))
            self._waker.wake()

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int) -> None:
        self._reported.append(_Ended(request_id, Done(num_cached_tokens, logits)))
        self._waker.wake()

    def prefill_failed(self, request_id: str, message: str) -> None:
        self._reported.append(_Ended(request_id, message))
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
        except TransferError as error:
            peer, refusal = None, str(error)
        if peer is None or refusal is not None:
            self._channel.queue(protocol.encode_text(Kind.REFUSED, 0, refusal or ""))
            self._channel.service()
            raise TransferError(f"refused: {refusal}")
        self._channel.queue(protocol.encode_hello(self._identity))
        self._peer, self._handshake_deadline = peer, None

    def _take(self, header: Header, body: bytes) -> None:
        if header.kind is Kind.PREFILL:
            self._take_order(header.transfer, protocol.decode_prefill(body))
            return
        outgoing = self._orders.get(header.transfer)
        if outgoing is None:
            return
        if header.kind is Kind.RESEND:
            self._resend(outgoing, protocol.decode_resend(body))
        elif header.kind is Kind.RELEASE and outgoing.done is not None:
            self._forget(outgoing)
            self._engine.release(outgoing.engine_id)
        else:
            self._abandon(outgoing)

    def _take_order(self, transfer: int, order: RemotePrefill) -> None:
        assert self._peer is not None, "orders come after the handshake"
        if transfer in self._orders:
            raise TransferError(f"the peer used transfer number {transfer} twice")
        if order.num_cached_tokens % self._space.layout.block_size:
            raise TransferError("the peer's order begins inside a block")
        if self._draining():
            self._channel.queue(protocol.encode_text(Kind.FAILED, transfer, "draining"))
            return
        # Request ids are the clients': two decode workers may bring the same one, one worker may bring it again.
        engine_id = f"{order.request_id}/{self._name}/{transfer}"
        outgoing = _Outgoing(transfer, engine_id)
        self._orders[transfer] = self._by_engine_id[engine_id] = outgoing
        try:
            self._engine.submit_prefill(replace(order, request_id=engine_id), self)
        except WorkerError as error:
            self._forget(outgoing)
            self._channel.queue(protocol.encode_text(Kind.FAILED, transfer, str(error)))

    def _resend(self, outgoing: _Outgoing, ranges: Sequence[BlockRange]) -> None:
        if outgoing.done is None or outgoing.sent_at is None:
            raise TransferError("the peer asked for blocks again before all of them were sent")
        for blocks in ranges:
            known = [outgoing.block_ids.get(index) for index in range(blocks.first, blocks.first + blocks.count)]
            if blocks.layer >= self._space.layout.num_layers or not 0 < blocks.count <= protocol.MAX_BLOCKS_PER_FRAME:
                raise TransferError("the peer asked for blocks that there are not")
            ids = tuple(block for block in known if block is not None)
            if len(ids) != len(known):
                raise TransferError("the peer asked for blocks that were never sent")
            self._to_send.append(_Ready(outgoing.engine_id, blocks, ids, None))
        with self._totals.lock:
            self._totals.resends += 1
        outgoing.sent_at = None
        self._to_finish.append(outgoing)

    def _forget(self, outgoing: _Outgoing) -> None:
        self._orders.pop(outgoing.transfer, None)
        self._by_engine_id.pop(outgoing.engine_id, None)

    def _abandon(self, outgoing: _Outgoing) -> None:
        self._forget(outgoing)
        self._engine.abort(outgoing.engine_id)
        self._engine.release(outgoing.engine_id)

    def _end(self) -> None:
        self._channel.close()
        self._waker.close()
        if self._orders:
            with self._totals.lock:
                self._totals.failures += len(self._orders)
        for outgoing in list(self._orders.values()):
            self._abandon(outgoing)
        self._on_closed(self)

    # channel.Events

    def on_posted(self) -> None:
        if self._stopping:
            raise TransferError("this worker is shutting down")
        while self._reported:
            event = self._reported.popleft()
            outgoing = self._by_engine_id.get(event.engine_id)
            if outgoing is None:
                continue
            if isinstance(event, _Ready):
                outgoing.block_ids.update(zip(_indices(event.blocks), event.block_ids, strict=True))
                self._to_send.append(event)
            elif isinstance(event.outcome, Done):
                outgoing.done = event.outcome
                self._to_finish.append(outgoing)
            else:
                self._forget(outgoing)
                self._engine.release(outgoing.engine_id)
                self._channel.queue(protocol.encode_text(Kind.FAILED, outgoing.transfer, event.outcome))

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
            self._channel.queue(protocol.encode_heartbeat(self._engine.stats().steps_total))
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
            outgoing = self._by_engine_id.get(ready.engine_id)
            if outgoing is None:  # cancelled meanwhile
                self._to_send.popleft()
                continue
            return self._blocks_frame(outgoing, ready)
        while self._to_finish:
            outgoing = self._to_finish.popleft()
            if self._orders.get(outgoing.transfer) is outgoing and outgoing.done is not None:
                outgoing.sent_at = self._clock()
                return [protocol.encode_done(outgoing.transfer, outgoing.done)]
        return None

    def _blocks_frame(self, outgoing: _Outgoing, ready: _Ready) -> Sequence[bytes | memoryview]:
        """The first blocks of `ready` that fit one frame; the rest stays at the head of the queue."""
        blocks = ready.blocks
        size = self._space.layout.block_bytes[blocks.layer]
        fit = max(1, min(protocol.MAX_PAYLOAD_BYTES // size, protocol.MAX_BLOCKS_PER_FRAME))
        if blocks.count > fit:
            rest = BlockRange(blocks.layer, blocks.first + fit, blocks.count - fit)
            self._to_send[0] = replace(ready, blocks=rest, block_ids=ready.block_ids[fit:])
            blocks = BlockRange(blocks.layer, blocks.first, fit)
        else:
            self._to_send.popleft()
        views = self._reader.views(blocks.layer, ready.block_ids[: blocks.count], ready.fence)
        sums = [checksum(view) for view in views.blocks]
        self._frame_bytes, self._frame_started = size * blocks.count, self._clock()
        return [protocol.encode_blocks_head(outgoing.transfer, blocks, sums, self._frame_bytes), *views.spans]

    def _account(self) -> None:
        """The frame before this call has left."""
        if self._frame_bytes:
            with self._totals.lock:
                self._totals.bytes_sent += self._frame_bytes
                self._totals.meter.observe(self._frame_bytes, self._clock() - self._frame_started)
            self._frame_bytes = 0


def _indices(blocks: BlockRange) -> range:
    return range(blocks.first, blocks.first + blocks.count)
