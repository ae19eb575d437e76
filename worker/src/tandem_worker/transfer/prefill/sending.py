"""Prefill side: what one connection sends of its orders, over itself or through slots of the peer.

Blocks are sent straight from the block space when their turn comes: what waits here is a few numbers per layer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tandem_worker.transfer import protocol
from tandem_worker.transfer.blocks import BlockReader
from tandem_worker.transfer.channel import Channel
from tandem_worker.transfer.checksums import sum_blocks
from tandem_worker.transfer.choice import MOONCAKE, TCP
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.outgoing import Outgoing, SessionTotals, count_up
from tandem_worker.transfer.prefill.quotas import Account, Quota
from tandem_worker.transfer.prefill.slots import LOOK_SECONDS, Moved, Slots
from tandem_worker.transfer.protocol import BlockRange, Done
from tandem_worker.transfer.slicing import Piece
from tandem_worker.transfer.transports import Transports


class Sending:
    """For the connection's thread, once both ends have agreed what moves."""

    def __init__(
        self,
        pieces: Mapping[int, Piece],
        reader: BlockReader,
        find: Callable[[int], Outgoing | None],
        *,
        transports: Transports,
        totals: SessionTotals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`find`: the open order of a number."""
        self.pieces = pieces
        """What of a block of each layer goes to this peer."""
        self._reader, self._find = reader, find
        self._transports, self._totals, self._clock = transports, totals, clock
        self.slots = Slots(transports, pieces, reader)
        self._to_send: deque[ReadyBlocks] = deque()
        self._to_finish: deque[Outgoing] = deque()
        self._frame_started = 0.0
        self._frame_bytes = 0
        self._frame_of: Outgoing | None = None
        """Traced, and the one whose frame leaves."""

    def take_report(self, outgoing: Outgoing, ready: ReadyBlocks) -> None:
        """Blocks of an order are computed."""
        outgoing.block_ids.update(zip(count_up(ready.blocks), ready.block_ids, strict=True))
        if ready.blocks.layer not in self.pieces:
            return
        self._add(outgoing, ready)
        if outgoing.engine_id is None:
            outgoing.num_unreported -= ready.blocks.count
            if outgoing.num_unreported == 0:
                self.finish(outgoing, Done(0, b""))

    def finish(self, outgoing: Outgoing, done: Done) -> None:
        """DONE goes after the last of its blocks."""
        outgoing.done = done
        self._to_finish.append(outgoing)

    def resend(self, outgoing: Outgoing, ranges: Sequence[BlockRange], account: Account) -> None:
        """Send blocks once more, and DONE after them. Raises TransferError for what the peer cannot lack."""
        outgoing.resends += 1
        if outgoing.resends > protocol.MAX_RESENDS:
            raise account.ledger.refuse(Quota.RESENDS, "the peer asked for blocks again too often")
        for ready in outgoing.find_again(ranges, tuple(self.pieces)):
            self._add(outgoing, ready)
        with self._totals.lock:
            self._totals.resends += 1
        outgoing.sent_at = None
        self._to_finish.append(outgoing)

    def _add(self, outgoing: Outgoing, ready: ReadyBlocks) -> None:
        if outgoing.departures is None:
            self._to_send.append(ready)
        else:
            outgoing.departures.add(ready)

    def measure_flow(self, channel: Channel) -> tuple[bool, int]:
        """Whether something waits to be taken by the peer, and the bytes that it has taken."""
        waits, landed = self.slots.flow
        return channel.has_output or bool(self._to_send) or waits, channel.bytes_sent + landed

    def settle(self, now: float, channel: Channel) -> float | None:
        """Tell what has landed in slots. Seconds until the next look, where something is in flight."""
        moved, look = self.slots.settle(now)
        self._tell_moved(moved, channel)
        # What waits for the socket goes first, and nothing is gathered meanwhile: no reason to look without a pause.
        return LOOK_SECONDS if look is not None and channel.has_output else look

    def _tell_moved(self, moved: Sequence[Moved], channel: Channel) -> None:
        for each in moved:
            channel.queue(each.frame)
            if each.seconds is not None:
                started = self._clock() - each.seconds
                self._note_moved(MOONCAKE, each.num_bytes, started, each.seconds, self._find(each.transfer))

    def _note_moved(
        self, transport: str, num_bytes: int, started: float, seconds: float, outgoing: Outgoing | None
    ) -> None:
        self._transports.note_moved(transport, num_bytes, seconds)
        with self._totals.lock:
            self._totals.bytes_sent += num_bytes
            self._totals.meter.observe(num_bytes, seconds)
        if outgoing is not None and outgoing.trace is not None:
            outgoing.trace.sent.note_blocks(num_bytes, started, self._clock())

    def next_frame(self, channel: Channel) -> Sequence[bytes | memoryview] | None:
        """One frame at a time: its checksums are computed while the ones before it are on their way."""
        self._note_sent()
        if lost := self.slots.pump(self._clock(), self._read_guarded):
            self._tell_moved(lost, channel)
            return []
        while self._to_send:
            ready = self._to_send[0]
            outgoing = self._find(ready.transfer)
            if outgoing is not None:
                with outgoing.shelf.guard:
                    if outgoing.shelf.is_open:
                        return self._blocks_frame(ready)
            self._to_send.popleft()  # cancelled meanwhile
        for outgoing in tuple(self._to_finish):
            if outgoing.departures is not None and outgoing.departures.has_of(outgoing.transfer):
                continue  # DONE comes after the last of its blocks
            self._to_finish.remove(outgoing)
            if self._find(outgoing.transfer) is outgoing and outgoing.done is not None:
                outgoing.sent_at = self._clock()
                return [protocol.encode_done(outgoing.transfer, outgoing.done)]
        return None

    def _read_guarded(self, ready: ReadyBlocks, read: Callable[[], None]) -> bool:
        """Run `read` while these blocks are what the engine computed; False where they may be another's by now."""
        outgoing = self._find(ready.transfer)
        if outgoing is None:
            return False
        with outgoing.shelf.guard:
            if outgoing.shelf.is_open:
                read()
            return outgoing.shelf.is_open

    def _blocks_frame(self, ready: ReadyBlocks) -> Sequence[bytes | memoryview]:
        """The first blocks of `ready` that fit one frame; the rest stays at the head of the queue."""
        blocks = ready.blocks
        size = self.pieces[blocks.layer].num_bytes
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
        self._frame_of = self._find(ready.transfer)
        return [protocol.encode_blocks_head(ready.transfer, blocks, sums, self._frame_bytes), *views.spans]

    def _note_sent(self) -> None:
        """The frame before this call has left."""
        if self._frame_bytes:
            seconds = self._clock() - self._frame_started
            self._note_moved(TCP, self._frame_bytes, self._frame_started, seconds, self._frame_of)
            self._frame_bytes = 0

    def close(self) -> None:
        """The connection has ended."""
        self._to_send.clear()
        self._to_finish.clear()
        self.slots.close()
