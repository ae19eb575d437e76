"""Blocks that one peer asks for by name. Nothing is computed for them: they are copied out of memory and sent.

A fetch that takes longer than its peer wants to wait is ended, so that nobody keeps blocks here by reading slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.fetches import (
    BlockShelf,
    Fetch,
    FetchOrder,
    encode_fetched,
    encode_slots_head,
)
from tandem_worker.transfer.prefill.quotas import Account
from tandem_worker.transfer.protocol import FrameKind, encode_text


@dataclass(slots=True, eq=False)
class _Open:
    fetch: Fetch
    until: float


class FetchDesk:
    """On the thread of the session that it belongs to."""

    def __init__(
        self,
        shelf: BlockShelf | None,
        account: Account,
        block_size: int,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`shelf` None: this worker gives its blocks to nobody. `block_size`: tokens per block."""
        self._shelf, self._account, self._block_size = shelf, account, block_size
        self._wake, self._clock = wake, clock
        self._open: dict[int, _Open] = {}
        """Fetches by transfer, the oldest first."""

    def __len__(self) -> int:
        return len(self._open)

    def take(self, order: FetchOrder) -> bytes | None:
        """Begin. A frame says why not. Raises TransferError where the peer breaks a rule."""
        if order.transfer in self._open:
            raise TransferError(f"the peer used transfer number {order.transfer} twice")
        if self._shelf is None:
            return encode_text(FrameKind.FAILED, order.transfer, "this worker gives its blocks to no other worker")
        try:
            self._account.take_fetch(len(order.names) * self._block_size)
        except TransferError as error:
            return encode_text(FrameKind.FAILED, order.transfer, str(error))
        try:
            fetch = self._shelf.open(order, self._wake)
        except TransferError as error:
            self._account.return_fetch()
            return encode_text(FrameKind.FAILED, order.transfer, str(error))
        self._open[order.transfer] = _Open(fetch, self._clock() + order.seconds)
        return None

    def cancel(self, transfer: int) -> bool:
        """Whether there was such a fetch."""
        entry = self._open.pop(transfer, None)
        if entry is None:
            return False
        entry.fetch.close()
        self._account.return_fetch()
        return True

    def next_frame(self) -> Sequence[bytes | memoryview] | None:
        """One frame at a time: it is copied and summed when the ones before it have left."""
        for transfer, entry in list(self._open.items()):
            slots = entry.fetch.next_slots()
            if slots is not None:
                return [encode_slots_head(transfer, slots.first, slots.count, len(slots.data)), slots.data]
            if entry.fetch.ended:
                self.cancel(transfer)
                return [encode_fetched(transfer, entry.fetch.num_given)]
        return None

    def expire(self, now: float) -> list[bytes]:
        """End what nobody wants any more; what to tell the peer."""
        late = [transfer for transfer, entry in self._open.items() if entry.until <= now]
        for transfer in late:
            self.cancel(transfer)
        return [encode_text(FrameKind.FAILED, transfer, "it took longer than was asked for") for transfer in late]

    def next_check(self, now: float) -> float | None:
        """Seconds until something may be too late; None: nothing is open."""
        return min((max(0.0, entry.until - now) for entry in self._open.values()), default=None)

    def close(self) -> None:
        """The connection is over."""
        for transfer in list(self._open):
            self.cancel(transfer)
