"""Decode side: blocks that an engine has written into the slots of a connection, on their way into the block space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tandem_worker.transfer.blocks import BlockWriter, Views
from tandem_worker.transfer.checksums import copy_in
from tandem_worker.transfer.contract import Identity
from tandem_worker.transfer.decode.attempt import Attempt
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.mooncake.frames import Landed, decode_landed, encode_grant
from tandem_worker.transfer.protocol import BlockRange
from tandem_worker.transfer.slicing import Piece

if TYPE_CHECKING:
    from tandem_worker.transfer.transports import Transports

Settle = Callable[[Attempt, BlockRange, tuple[int, ...], Views, Sequence[bool], BlockWriter], None]
"""Commits the good blocks of a range and wipes the others; under the attempt's lock."""


class Taken(NamedTuple):
    grant: bytes
    """Slots for the peer again; empty where it has enough."""
    num_bytes: int
    """Those of the blocks that were wanted."""
    seconds: float
    """In which pieces of this connection moved, as the peer says."""


class LandedBlocks:
    """Slots of one connection; for its thread. Blocks leave them by a copy whose sums are those that the peer told over
    the authenticated connection, whether or not `spec.kv.verify` is on: whoever reaches the engine can write."""

    def __init__(self, transports: Transports, pieces: Mapping[int, Piece], settle: Settle) -> None:
        """Raises TransferError where there are no slots."""
        self._transports, self._pieces, self._settle = transports, pieces, settle
        self._landing = transports.land([piece.num_bytes for piece in pieces.values()])
        self.unreached: str | None = None
        """Why the peer's engine is given up."""

    def grant(self, transfer: int) -> bytes:
        """GRANT: the order `transfer`, which comes next, goes through these slots."""
        return encode_grant(transfer, self._landing.grant())

    def take(self, body: bytes, attempt: Attempt | None, writer: BlockWriter) -> Taken:
        """Commit what a LANDED frame tells of. Raises TransferError: the connection is of no more use."""
        landed = decode_landed(body)
        try:
            slot = self._landing.take_back(landed)
        except TransferError as error:
            if landed.lost:
                self.unreached = str(error)
            raise
        if slot is None:
            return Taken(b"", 0, 0.0)
        num_bytes = 0
        if attempt is not None and attempt.reception is not None:
            num_bytes = self._commit(slot, landed, attempt, writer)
        grant = encode_grant(0, self._landing.grant()) if self._landing.enough_are_here else b""
        return Taken(grant, num_bytes, landed.micros / 1e6)

    def _commit(self, slot: memoryview, landed: Landed, attempt: Attempt, writer: BlockWriter) -> int:
        assert attempt.reception is not None
        known = [each for each in landed.ranges if each.layer in self._pieces]  # others are refused in their turn
        if sum(each.count * self._pieces[each.layer].num_bytes for each in known) > len(slot):
            raise TransferError("the peer said that more landed in a slot than it holds")
        start = first_sum = 0
        for blocks in landed.ranges:
            block_ids = attempt.reception.expected(blocks)  # raises for what was not ordered
            size = blocks.count * self._pieces[blocks.layer].num_bytes
            sums = landed.sums[first_sum : first_sum + blocks.count]
            source = slot[start : start + size]
            if block_ids is not None and not self._copy(source, blocks, block_ids, sums, attempt, writer):
                break
            start += size
            first_sum += blocks.count
        return start

    def _copy(
        self,
        source: memoryview,
        blocks: BlockRange,
        block_ids: tuple[int, ...],
        sums: Sequence[int],
        attempt: Attempt,
        writer: BlockWriter,
    ) -> bool:
        """False where the attempt was withdrawn. What is summed is the copy: the slot may change under it."""
        views = writer.views(blocks.layer, block_ids)
        with attempt.landing:
            if not attempt.is_open:
                return False
            attempt.unverified = views.spans
            found = copy_in(source, views.blocks, attempt.transfer, blocks.layer, blocks.first)
            good = [ours == theirs for ours, theirs in zip(found, sums, strict=True)]
            self._settle(attempt, blocks, block_ids, views, good, writer)
        return True

    def close(self, peer: Identity) -> None:
        """The connection has ended."""
        self._transports.leave(self._landing, peer)
