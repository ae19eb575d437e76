"""Decode side: the connection of one decode rank to one prefill rank, shared by all orders that go there.

One thread owns the connection. It connects, agrees with the peer, sends orders and writes what arrives into the
reserved blocks. `Attempt.landing` guards those blocks: it is held during each write and by whoever withdraws the
attempt, and a write first looks whether the attempt is still open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tandem_api.keys import KeyRing

from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer import protocol
from tandem_worker.transfer.blocks import BlockSpace, BlockWriter, Views
from tandem_worker.transfer.channel import Channel, Waker, advance, configure
from tandem_worker.transfer.checksums import Damage, sum_blocks
from tandem_worker.transfer.choice import MOONCAKE
from tandem_worker.transfer.contract import Identity, TransferTimeouts
from tandem_worker.transfer.decode.attempt import Attempt, LinkListener, wipe
from tandem_worker.transfer.decode.reception import Reception
from tandem_worker.transfer.decode.watch import PrefillPace, judge_order, waited
from tandem_worker.transfer.errors import IntegrityError, TransferError
from tandem_worker.transfer.layout import RankAddress
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind, Header
from tandem_worker.transfer.slicing import Piece, agree
from tandem_worker.transfer.transports import Transports

if TYPE_CHECKING:
    from tandem_worker.transfer.decode.landed import LandedBlocks

logger = logging.getLogger(__name__)

_FROM_PREFILL = frozenset(
    {FrameKind.START, FrameKind.BLOCKS, FrameKind.LANDED, FrameKind.DONE, FrameKind.FAILED, FrameKind.HEARTBEAT}
)
_HELLO = frozenset({FrameKind.HELLO, FrameKind.REFUSED})


class PrefillLink:
    """Implements `channel.Events`."""

    def __init__(
        self,
        endpoint: str,
        *,
        identity: Identity,
        space: BlockSpace,
        listener: LinkListener,
        verify: bool,
        timeouts: TransferTimeouts,
        ring: Callable[[], KeyRing],
        vitals: Vitals,
        transports: Transports,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises OSError where the system has no descriptor for it."""
        self.endpoint = endpoint
        self._identity = identity
        self._space = space
        self._listener = listener
        self._verify = verify
        self._timeouts = timeouts
        self._ring, self._vitals = ring, vitals
        self._transports = transports
        self._landed: LandedBlocks | None = None
        """The slots that this peer's engine may write to; None until the first order that goes through it."""
        self._clock = clock
        self._lock = threading.Lock()
        """Guards `_closed`, and that nothing is posted after closing."""
        self._closed = False
        self._close_reason: str | None = None
        self._ordered: deque[Attempt] = deque()
        self._withdrawn: deque[Attempt] = deque()
        self._released: deque[Attempt] = deque()
        self._waker = Waker()
        self._active: dict[int, Attempt] = {}
        self._peer: Identity | None = None
        self._ranks: tuple[RankAddress, ...] = ()
        self._mine = 0
        self._pieces: dict[int, Piece] = {}
        self._peer_progress = -1
        self._progressed_at = 0.0
        self._watching_since: float | None = None
        """Since when this thread has looked after its orders, without a long sleep in between."""
        self._next_check = 0.0
        self._handshake_deadline: float | None = None
        self._channel: Channel | None = None
        self._pace = PrefillPace()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises ThreadStartError; the link is then over, and has reported nothing."""
        try:
            self._thread = self._vitals.start_thread(f"kv-link-{self.endpoint}", self._run)
        except BaseException:
            self._closed = True
            self._waker.close()
            raise

    @property
    def established(self) -> bool:
        """Whether the peer was ever reached and agreed with."""
        return self._peer is not None

    @property
    def connected(self) -> bool:
        """Whether the handshake is done and the connection has not ended."""
        return self.established and not self._closed

    def submit(self, attempt: Attempt) -> bool:
        """Send the order of `attempt` when the connection stands. False when this link is closed. Any thread."""
        return self._post(self._ordered, attempt)

    def withdraw(self, attempt: Attempt) -> None:
        """Nothing of `attempt` is written any more when this returns; the peer is told later. Any thread."""
        if attempt.close():
            self._post(self._withdrawn, attempt)

    def release(self, attempt: Attempt) -> None:
        """The peer may give the blocks of this order back: all of it has arrived, everywhere. Any thread."""
        if attempt.close():
            self._post(self._released, attempt)

    def close(self, reason: str) -> None:
        """End the connection; open attempts fail with `reason`. Any thread."""
        self._close_reason = reason
        self._waker.wake()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the link's thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def _post(self, queue: deque[Attempt], attempt: Attempt) -> bool:
        with self._lock:
            if self._closed:
                return False
            queue.append(attempt)
        self._waker.wake()
        return True

    # The owner's thread.

    def _run(self) -> None:
        reason = "the link was closed"
        try:
            channel = self._connect()
            writer = self._space.writer(self._pieces)
            while True:
                self._take(channel, self._read_header(channel, _FROM_PREFILL), writer)
                channel.service()
        except IntegrityError as error:
            self._listener.damaged(error.kind)
            reason = f"{self.endpoint}: {error}"
        except TransferError as error:
            reason = f"{self.endpoint}: {error}"
        except Exception as error:  # a defect must not leave requests waiting for ever
            logger.exception("the KV link to %s failed", self.endpoint)
            reason = f"{self.endpoint}: internal error: {error!r}"
        finally:
            self._end(reason)

    def _connect(self) -> Channel:
        host, _, port = self.endpoint.rpartition(":")
        try:
            sock = dial(
                host.strip("[]"), int(port), self._ring(), Purpose.KV, seconds=self._timeouts.connect, clock=self._clock
            )
        except (OSError, ValueError, OverflowError, AuthenticationError) as error:
            raise TransferError(f"cannot connect: {error}") from error
        configure(sock)
        channel = self._channel = Channel(sock, self._waker, self, self._clock)
        channel.queue(protocol.encode_hello(self._identity))
        self._handshake_deadline = self._clock() + self._timeouts.handshake
        header = self._read_header(channel, _HELLO)
        body = self._read_body(channel, header)
        if header.kind is FrameKind.REFUSED:
            raise TransferError(f"refused: {protocol.decode_text(body)}")
        peer = protocol.decode_hello(body)
        if refusal := self._identity.refusal(peer):
            raise TransferError(refusal)
        self._agree(peer)
        self._transports.greet(peer)
        self._peer, self._handshake_deadline = peer, None
        self._take_posted(channel)
        return channel

    def _read_header(self, channel: Channel, allowed: frozenset[FrameKind]) -> Header:
        data = channel.read_header(protocol.HEADER_BYTES, self._timeouts.frame)
        header = protocol.decode_header(data, allowed)
        channel.extend_deadline(header.length)
        return header

    @staticmethod
    def _read_body(channel: Channel, header: Header) -> bytes:
        body = bytes(channel.read(header.length))
        protocol.check_body(header, body)
        return body

    def _agree(self, peer: Identity) -> None:
        """Find out what this connection moves. Raises TransferError."""
        layout = self._space.layout
        theirs = peer.shard or layout.whole_shard
        self._ranks = peer.ranks or (RankAddress(endpoint=self.endpoint, shard=theirs),)
        slices = agree(layout, [rank.shard for rank in self._ranks], theirs, self._space.shard)
        self._pieces = self._space.locate(slices)
        self._mine = next(index for index, rank in enumerate(self._ranks) if rank.shard == theirs)

    def _take(self, channel: Channel, header: Header, writer: BlockWriter) -> None:
        if header.kind is FrameKind.BLOCKS:
            self._take_blocks(channel, header, writer)
            return
        body = self._read_body(channel, header)
        if header.kind is FrameKind.LANDED:
            self._take_landed(channel, header.transfer, body, writer)
            return
        if header.kind is FrameKind.HEARTBEAT:
            if (progress := protocol.decode_heartbeat(body)) != self._peer_progress:
                self._peer_progress, self._progressed_at = progress, self._clock()
            return
        attempt = self._active.get(header.transfer)
        if attempt is None:
            return
        if header.kind is FrameKind.START:
            self._note_start(attempt)
        elif header.kind is FrameKind.FAILED:
            self._fail(attempt, f"{self.endpoint}: {protocol.decode_text(body)}")
        else:
            self._take_done(channel, attempt, protocol.decode_done(body, header.transfer))

    def _note_start(self, attempt: Attempt) -> None:
        if attempt.started_at is None:
            attempt.started_at = attempt.last_progress = self._clock()
            if attempt.order is not None:
                self._listener.attempt_started(attempt)

    def _take_blocks(self, channel: Channel, header: Header, writer: BlockWriter) -> None:
        head = channel.read(protocol.blocks_head_bytes(header.num_blocks))
        protocol.check_body(header, head)
        blocks, sums = protocol.decode_blocks_head(head, header)
        payload_bytes = header.length - len(head)
        attempt = self._active.get(header.transfer)
        reception = None if attempt is None else attempt.reception
        block_ids = None if reception is None else reception.expected(blocks)
        if attempt is None or block_ids is None:
            channel.discard(payload_bytes)
            return
        if payload_bytes != blocks.count * self._pieces[blocks.layer].num_bytes:
            raise TransferError(f"the peer sent a BLOCKS frame of {header.length} bytes, which {blocks} does not take")
        if attempt.started_at is None:
            self._note_start(attempt)
        started = self._clock()
        landed = self._land(channel, attempt, blocks, block_ids, sums, writer)
        ended = self._clock()
        if landed:
            attempt.last_progress = ended
            if attempt.order is not None and attempt.order.hop is not None:
                attempt.order.hop.note_blocks(payload_bytes, started, ended)
        self._listener.received(payload_bytes, ended - started)

    def _take_landed(self, channel: Channel, transfer: int, body: bytes, writer: BlockWriter) -> None:
        """Blocks stand in a slot, or were lost on the way to it."""
        if self._landed is None:
            raise TransferError("the peer landed in a slot, and was granted none")
        attempt = self._active.get(transfer)
        if attempt is not None and attempt.started_at is None:
            self._note_start(attempt)
        started = self._clock()
        taken = self._landed.take(body, attempt, writer)
        channel.queue(taken.grant)
        ended = self._clock()
        if attempt is not None and taken.num_bytes:
            attempt.last_progress = ended
            if attempt.order is not None and attempt.order.hop is not None:
                attempt.order.hop.note_blocks(taken.num_bytes, started, ended)
        if taken.num_bytes:
            self._listener.received(taken.num_bytes, taken.seconds, MOONCAKE)

    def _land(
        self,
        channel: Channel,
        attempt: Attempt,
        blocks: BlockRange,
        block_ids: tuple[int, ...],
        sums: Sequence[int],
        writer: BlockWriter,
    ) -> bool:
        """Receive a payload into the reserved blocks. False when the attempt was withdrawn meanwhile."""
        views = writer.views(blocks.layer, block_ids)
        pending = list(views.spans)
        while pending:
            with attempt.landing:
                if not attempt.is_open:
                    break
                attempt.unverified = views.spans
                received = channel.read_some(pending)
            if received:
                advance(pending, received)
            else:
                channel.wait()
        if pending:
            channel.discard(sum(len(view) for view in pending))
            return False
        good = [True] * len(block_ids)
        if self._verify:
            found = sum_blocks(views.blocks, attempt.transfer, blocks.layer, blocks.first)
            good = [ours == theirs for ours, theirs in zip(found, sums, strict=True)]
        with attempt.landing:
            if not attempt.is_open:
                return False
            self._settle(attempt, blocks, block_ids, views, good, writer)
        return True

    def _settle(
        self,
        attempt: Attempt,
        blocks: BlockRange,
        block_ids: tuple[int, ...],
        views: Views,
        good: Sequence[bool],
        writer: BlockWriter,
    ) -> None:
        """Under `landing`, with an open attempt: what is good stays, what is not is wiped."""
        for runs, intact in zip(views.blocks, good, strict=True):
            if not intact:
                wipe(runs)
                self._listener.damaged(Damage.BLOCK)
        attempt.unverified = ()
        writer.commit(blocks.layer, block_ids, good)
        assert attempt.reception is not None, "it said what is expected"
        attempt.reception.record(blocks, good)

    def _take_done(self, channel: Channel, attempt: Attempt, done: Done) -> None:
        assert self._peer is not None, "frames come after the handshake"
        if attempt.arrived or attempt.reception is None:
            return
        if not attempt.reception.complete:
            if attempt.resends == protocol.MAX_RESENDS:
                self._fail(attempt, f"{self.endpoint}: blocks arrived damaged {protocol.MAX_RESENDS + 1} times")
                return
            attempt.resends += 1
            self._listener.attempt_resent(attempt)
            channel.queue(protocol.encode_resend(attempt.transfer, attempt.reception.missing()))
            return
        if attempt.order is not None and (mismatch := _find_mismatch(attempt.order, done)) is not None:
            kind, message = mismatch
            self._listener.damaged(kind)
            self._fail(attempt, f"{self.endpoint}: {message}")
            return
        attempt.arrived, attempt.last_progress = True, self._clock()
        if attempt.order is not None and attempt.started_at is not None:
            num_computed = len(attempt.order.token_ids) - attempt.order.num_cached_tokens
            self._pace.observe(num_computed, attempt.last_progress - attempt.started_at)
        if attempt.order is None:  # the order itself keeps the blocks
            del self._active[attempt.transfer]
            channel.queue(protocol.encode_release(attempt.transfer))
            if not attempt.close():
                return
        self._listener.attempt_done(attempt, done, self._peer.worker)

    def _fail(self, attempt: Attempt, reason: str) -> None:
        self._active.pop(attempt.transfer, None)
        if self._channel is not None:
            self._channel.queue(protocol.encode_cancel(attempt.transfer))
        if attempt.close():
            self._listener.attempt_failed(attempt, reason)

    def _take_posted(self, channel: Channel) -> None:
        while self._ordered:
            self._order(channel, self._ordered.popleft())
        # After the orders: nobody withdraws or releases what was not submitted before.
        for queue, encode in ((self._withdrawn, protocol.encode_cancel), (self._released, protocol.encode_release)):
            while queue:
                transfer = queue.popleft().transfer
                if self._active.pop(transfer, None) is not None:
                    channel.queue(encode(transfer))

    def _order(self, channel: Channel, attempt: Attempt) -> None:
        if not attempt.is_open:
            return
        attempt.reception = Reception(attempt.block_ids, attempt.first, tuple(self._pieces))
        attempt.ordered_at = attempt.last_progress = self._clock()
        self._active[attempt.transfer] = attempt
        if (refusal := self._choose_transport(channel, attempt)) is not None:
            self._fail(attempt, f"{self.endpoint}: {refusal}")
            return
        if attempt.order is None:
            channel.queue(protocol.encode_attach(attempt.transfer, len(attempt.block_ids) - attempt.first))
            return
        try:
            channel.queue(protocol.encode_prefill(attempt.transfer, attempt.order))
        except TransferError as error:
            self._fail(attempt, str(error))
            return
        self._listener.attempt_ordered(attempt, self._ranks, self._mine)

    def _choose_transport(self, channel: Channel, attempt: Attempt) -> str | None:
        """Tell the peer by what this order moves, before the order. Returns why it cannot be given."""
        assert self._peer is not None, "orders come after the handshake"
        obstacle = self._transports.find_obstacle(self._peer, self.endpoint)
        if obstacle is None and self._landed is None:
            from tandem_worker.transfer.decode.landed import LandedBlocks

            try:
                self._landed = LandedBlocks(self._transports, self._pieces, self._settle)
            except TransferError as error:
                obstacle = str(error)
        choice = self._transports.choose(obstacle)
        if choice.transport is None:
            return f"{self._transports.policy.wanted} is asked for (spec.kv.transport), and {choice.fallback}"
        if choice.transport == MOONCAKE:
            assert self._landed is not None, "there is no obstacle"
            channel.queue(self._landed.grant(attempt.transfer))
        return None

    def _end(self, reason: str) -> None:
        with self._lock:
            self._closed = True
        self._waker.close()
        if self._channel is not None:
            self._channel.close()
        if self._landed is not None and self._peer is not None:
            if self._landed.unreached is not None:
                self._transports.note_unreached(self.endpoint, self._landed.unreached)
            self._landed.close(self._peer)
        self._listener.link_closed(self, reason)
        lost = [attempt for attempt in (*self._active.values(), *self._ordered) if attempt.close()]
        self._active.clear()
        for attempt in lost:
            self._listener.attempt_failed(attempt, reason)

    # channel.Events

    def on_posted(self) -> None:
        if self._close_reason is not None:
            raise TransferError(self._close_reason)
        if self._peer is not None and self._channel is not None:  # before the handshake orders wait
            self._take_posted(self._channel)

    def on_tick(self, now: float) -> float | None:
        if self._handshake_deadline is not None:
            if now >= self._handshake_deadline:
                raise TransferError(f"no hello from the peer within {self._timeouts.handshake:g} s")
            return self._handshake_deadline - now
        if not self._active:
            self._watching_since = None
            return None
        timeouts = self._timeouts
        period = min(timeouts.heartbeat, timeouts.silence / 4, timeouts.stall / 4)
        if self._watching_since is None:
            self._watching_since, self._next_check = now, now + period
        if now >= self._next_check:  # `wait` comes here many times a second while blocks arrive
            if now - self._next_check > timeouts.heartbeat:
                self._watching_since = now  # the whole process may have stood still: that is not the peer's silence
            self._next_check = now + period
            self._check_progress(now, self._watching_since)
        return self._next_check - now

    def _check_progress(self, now: float, watching_since: float) -> None:
        assert self._channel is not None, "orders are active on a connection that stands"
        if now - max(self._channel.last_received, watching_since) > self._timeouts.silence:
            raise TransferError(f"the peer has been silent for {self._timeouts.silence:g} s")
        for attempt in list(self._active.values()):
            if attempt.order is None:
                continue  # its order, on another connection, is watched
            reason = judge_order(
                attempt,
                now,
                watching_since=watching_since,
                engine_progressed_at=self._progressed_at,
                timeouts=self._timeouts,
                pace=self._pace,
            )
            if reason is not None:
                self._fail(attempt, f"{self.endpoint}: {reason}")
            elif not attempt.overdue and waited(attempt, now, watching_since) > self._timeouts.patience:
                attempt.overdue = True
                self._listener.attempt_overdue(attempt)

    def next_frame(self) -> None:
        return None


def _find_mismatch(order: RemotePrefill, done: Done) -> tuple[Damage, str] | None:
    """What of `done` cannot be an answer to `order`."""
    if done.prompt_name != order.prompt_name:
        return Damage.PROMPT, "the peer computed another prompt than was ordered"
    if done.num_cached_tokens > len(order.token_ids):
        return Damage.CACHED, f"{done.num_cached_tokens} of {len(order.token_ids)} tokens are said to have been cached"
    return None
