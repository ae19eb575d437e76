"""Prefill side: which finished blocks of which transfers this rank may send, and who is told of them.

The engine reports here, connections take from here. A transfer is open from its order until its blocks are given back;
before they are, `close` takes them from every connection: what a connection reads under `Shelf.guard` while the shelf
is open is what the engine computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.messages import Closed, Message, Opened, Ready, ReadyBlocks
from tandem_worker.transfer.protocol import BlockRange


class Reader(Protocol):
    """A connection that sends blocks of a transfer. Both methods may be called on any thread and only enqueue."""

    def take(self, ready: ReadyBlocks) -> None:
        """These blocks may be read once `fence` is reached."""
        ...

    def closed(self, transfer: int) -> None:
        """There will be nothing more."""
        ...


@dataclass(slots=True, eq=False)
class Shelf:
    """What there is of one transfer."""

    is_open: bool = False
    """Written under `guard`."""
    guard: threading.Lock = field(default_factory=threading.Lock)
    reported: list[ReadyBlocks] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)


class Outbox:
    """Which blocks of its transfers one rank has ready, and who waits for them. Methods may be called on any thread."""

    def __init__(self, space: BlockSpace, tell_followers: Callable[[Message], None] | None = None) -> None:
        """`tell_followers` is there on the first rank of a group, whose reports stand for those of all ranks."""
        self._space = space
        self._tell_followers = tell_followers
        self._lock = threading.Lock()
        self._shelves: dict[int, Shelf] = {}

    def open(self, transfer: int) -> bool:
        """Take reports of this transfer from now on. False: its number is in use."""
        with self._lock:
            shelf = self._shelves.setdefault(transfer, Shelf())
            if shelf.is_open:
                return False
            shelf.is_open = True
        if self._tell_followers is not None:
            self._tell_followers(Opened(transfer))
        return True

    def report(self, transfer: int, layer: int, first: int, block_ids: Sequence[int]) -> None:
        """Engine thread: this rank's layer number `layer` of these blocks is complete."""
        if not block_ids:
            return
        blocks = BlockRange(self._space.shard.first_layer + layer, first, len(block_ids))
        ready = ReadyBlocks(transfer, blocks, tuple(block_ids), self._space.fence())
        with self._lock:
            shelf = self._shelves.get(transfer)
            if shelf is None or not shelf.is_open:
                return
            shelf.reported.append(ready)
            for reader in shelf.readers:
                reader.take(ready)
        if self._tell_followers is not None and layer == 0:
            self._tell_followers(Ready(transfer, first, ready.block_ids))

    def close(self, transfer: int) -> None:
        """The blocks are about to be given back. When this returns no connection reads them any more."""
        with self._lock:
            shelf = self._shelves.get(transfer)
            if shelf is None or not shelf.is_open:
                return
            with shelf.guard:
                shelf.is_open = False
            shelf.reported.clear()
            readers = tuple(shelf.readers)
            if not readers:
                del self._shelves[transfer]
        for reader in readers:
            reader.closed(transfer)
        if self._tell_followers is not None:
            self._tell_followers(Closed(transfer))

    def attach(self, transfer: int, reader: Reader) -> Shelf:
        """Tell `reader` what there is and what comes. It may come before `open`: ranks do not wait for each other."""
        with self._lock:
            shelf = self._shelves.setdefault(transfer, Shelf())
            shelf.readers.append(reader)
            for ready in shelf.reported:
                reader.take(ready)
            return shelf

    def detach(self, transfer: int, reader: Reader) -> None:
        """Tell `reader` no more of this transfer. What is not attached is ignored."""
        with self._lock:
            shelf = self._shelves.get(transfer)
            if shelf is None:
                return
            if reader in shelf.readers:
                shelf.readers.remove(reader)
            if not shelf.readers and not shelf.is_open:
                del self._shelves[transfer]

    def handle(self, message: Message) -> None:
        """On a follower: what the first rank said, after the steps before it are computed. Raises TransferError."""
        if isinstance(message, Opened):
            self.open(message.transfer)
        elif isinstance(message, Ready):
            for layer in range(self._space.shard.num_layers):
                self.report(message.transfer, layer, message.first, message.block_ids)
        elif isinstance(message, Closed):
            self.close(message.transfer)
        else:
            raise TransferError(f"{type(message).__name__} is not for a rank that sends")
