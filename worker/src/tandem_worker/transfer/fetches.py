"""Blocks by name: what is asked of a worker that has computed them before, and how that is written.

A holder sends slots: a block with sums seeded with its name, its layer and its place in the fetch, as a disk tier has
them. What belongs to another model, revision, layout, shard or format has another key, and is not sent.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.protocol import (
    BLOCK_NAME_BYTES,
    MAX_FETCH_SECONDS,
    MAX_NAMES,
    FrameKind,
    encode_frame,
    encode_header,
)

_FETCH = struct.Struct("<I16s")  # milliseconds, key of the blocks; names follow
_SLOTS = struct.Struct("<I")  # number of the first block, as it was asked for
_FETCHED = struct.Struct("<I")  # blocks that were sent


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOrder:
    """What a peer asks for."""

    transfer: int
    """Its number, part of what every sum is seeded with."""
    key: bytes
    """What has to be equal for a block to be used again, 16 bytes that stand for it."""
    names: tuple[bytes, ...]
    seconds: float
    """Nobody wants what has not been sent by then."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Consecutive blocks of a fetch, ready to be sent."""

    first: int
    count: int
    data: memoryview
    """Valid until the next piece is asked for."""


class Fetch(Protocol):
    """A fetch under way. Used by one thread, but for what `BlockShelf.open` is given to call."""

    def next_slots(self) -> Slots | None:
        """The next piece; None: there is none yet, or, where `ended`, none any more."""
        ...

    @property
    def ended(self) -> bool:
        """All that there is was given out."""
        ...

    @property
    def num_given(self) -> int:
        """Blocks that were given out."""
        ...

    def close(self) -> None:
        """Nobody wants more. May be called again."""
        ...


class BlockShelf(Protocol):
    """What a worker has computed, by name. Any thread."""

    slot_bytes: int

    def open(self, order: FetchOrder, wake: Callable[[], None]) -> Fetch:
        """`wake` is called, on whatever thread, when there is a piece where there was none. Raises TransferError where
        the blocks wanted are of another key."""
        ...


def encode_fetch(order: FetchOrder) -> bytes:
    """FETCH: send the leading ones of these blocks that there are. Beyond MAX_NAMES the rest is not asked for."""
    milliseconds = max(1, int(min(order.seconds, MAX_FETCH_SECONDS) * 1000))
    body = _FETCH.pack(milliseconds, order.key) + b"".join(order.names[:MAX_NAMES])
    return encode_frame(FrameKind.FETCH, order.transfer, body)


def decode_fetch(body: bytes, transfer: int) -> FetchOrder:
    """Raises TransferError."""
    count, rest = divmod(len(body) - _FETCH.size, BLOCK_NAME_BYTES)
    if count < 1 or rest:
        raise TransferError("the peer sent a FETCH frame that cannot be read")
    milliseconds, key = _FETCH.unpack_from(body)
    starts = range(_FETCH.size, len(body), BLOCK_NAME_BYTES)
    names = tuple(body[start : start + BLOCK_NAME_BYTES] for start in starts)
    return FetchOrder(transfer=transfer, key=key, names=names, seconds=min(milliseconds / 1000, MAX_FETCH_SECONDS))


def encode_slots_head(transfer: int, first: int, count: int, payload_bytes: int) -> bytes:
    """Everything of a SLOTS frame but the payload: blocks `first` on of those that were asked for, with their sums."""
    head = _SLOTS.pack(first)
    return encode_header(FrameKind.SLOTS, transfer, len(head) + payload_bytes, head, count) + head


def decode_slots_head(head: bytes | bytearray) -> int:
    """Number of the first block, of what stands before the payload and was checked."""
    return _SLOTS.unpack(head)[0]


def encode_fetched(transfer: int, count: int) -> bytes:
    """FETCHED: there are no more than these, or no more are sent."""
    return encode_frame(FrameKind.FETCHED, transfer, _FETCHED.pack(count))


def decode_fetched(body: bytes) -> int:
    """How many blocks were sent. Raises TransferError."""
    if len(body) != _FETCHED.size:
        raise TransferError("the peer sent a FETCHED frame that cannot be read")
    return _FETCHED.unpack(body)[0]
