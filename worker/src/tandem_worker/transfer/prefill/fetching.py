"""Blocks that one peer asks for by name. Nothing is computed for them: they are copied out of memory and sent.

A fetch that takes longer than its peer wants to wait is ended, so that nobody keeps blocks here by reading slowly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_worker.transfer.channel import Channel
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

_LAST_FRAME_SECONDS = 1.0
"""In which a peer takes what is on its way when its time is over."""


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
        self._last_frame: tuple[float, int] | None = None
        """Until when the peer has to have taken what waited as a fetch of its ended, and the bytes sent by then."""

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

    def end_late(self, now: float, channel: Channel) -> float | None:
        """Seconds until the next look; None: there is nothing to look at. A frame that is on its way keeps a buffer
        here, not for as long as the peer likes. Raises TransferError where it does not take that one either."""
        late = self.expire(now)
        if late and channel.has_output:
            until = now + _LAST_FRAME_SECONDS if self._last_frame is None else self._last_frame[0]
            self._last_frame = until, channel.bytes_sent + channel.bytes_waiting
        for frame in late:
            channel.say(frame)
        soon = self.next_check(now)
        if self._last_frame is None:
            return soon
        until, end = self._last_frame
        if channel.bytes_sent >= end:
            self._last_frame = None
        elif now >= until:
            raise TransferError("the peer does not take the blocks that it has asked for")
        return until - now if soon is None else min(soon, until - now)

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
