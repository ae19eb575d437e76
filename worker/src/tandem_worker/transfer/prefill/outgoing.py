"""Prefill side: what a connection knows of an order that it serves, and the figures that all of them share."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_worker.transfer.checksums import Damage
from tandem_worker.transfer.contract import BandwidthMeter
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.outbox import Shelf
from tandem_worker.transfer.prefill.tracing import OrderTrace
from tandem_worker.transfer.protocol import MAX_BLOCKS_PER_FRAME, BlockRange, Done

if TYPE_CHECKING:
    from tandem_worker.transfer.mooncake.departure import Departures

_MIN_RATE = 1e6
"""Bytes per second that a peer takes at least."""


@dataclass(slots=True, eq=False)
class Outgoing:
    transfer: int
    shelf: Shelf
    engine_id: str | None
    """The engine's request for the order that this connection brought; None where it attached to one."""
    num_tokens: int = 0
    """Length of the order's prompt."""
    since: float = 0.0
    """When the peer asked for it."""
    num_unreported: int = 0
    """Slices of blocks that are still to be computed, for an attached order."""
    block_ids: dict[int, int] = field(default_factory=dict)
    """Our block of each reported block of the prompt; the same in every layer."""
    done: Done | None = None
    sent_at: float | None = None
    resends: int = 0
    trace: OrderTrace | None = None
    departures: Departures | None = None
    """Through which its blocks go; None: through the connection."""

    def find_again(self, ranges: Sequence[BlockRange], layers: Sequence[int]) -> list[ReadyBlocks]:
        """What a peer asks for once more. Raises TransferError for what it cannot lack, however often it asks."""
        if self.done is None or self.sent_at is None:
            raise TransferError("the peer asked for blocks again before all of them were sent")
        if sum(blocks.count for blocks in ranges) > len(self.block_ids) * len(layers):
            raise TransferError("the peer asked for more blocks again than it was sent")
        found: list[ReadyBlocks] = []
        for blocks in ranges:
            if blocks.layer not in layers or not 0 < blocks.count <= MAX_BLOCKS_PER_FRAME:
                raise TransferError("the peer asked for blocks that there are not")
            known = [self.block_ids.get(index) for index in count_up(blocks)]
            ids = tuple(block for block in known if block is not None)
            if len(ids) != len(known):
                raise TransferError("the peer asked for blocks that were never sent")
            found.append(ReadyBlocks(self.transfer, blocks, ids, None))
        return found


def count_up(blocks: BlockRange) -> range:
    """Numbers of these blocks of the prompt."""
    return range(blocks.first, blocks.first + blocks.count)


@dataclass(frozen=True, slots=True)
class Ended:
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
    damage: Counter[str] = field(default_factory=lambda: Counter({kind.value: 0 for kind in Damage}))
    lock: threading.Lock = field(default_factory=threading.Lock)


class FlowWatch:
    """Whether a peer takes what is sent: for what it does not take, blocks stay allocated here."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._mark: tuple[float, int] | None = None
        """Since when something has waited without a pause, and the bytes sent until then."""
        self._last_look = 0.0

    def look(self, now: float, *, waits: bool, bytes_sent: int) -> None:
        """To be called about once a second. Raises TransferError when it took less than 1 MB/s for all the time."""
        late = now - self._last_look > self._seconds / 2  # this process may have stood still
        self._last_look = now
        if not waits or late or self._mark is None:
            self._mark = (now, bytes_sent) if waits else None
            return
        since, sent = self._mark
        if now - since < self._seconds:
            return
        if bytes_sent - sent < _MIN_RATE * (now - since):
            raise TransferError(f"the peer takes less than {_MIN_RATE / 1e6:g} MB/s of what it ordered")
        self._mark = (now, bytes_sent)
