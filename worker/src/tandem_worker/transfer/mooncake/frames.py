"""What is said on the authenticated connection while Mooncake's engine moves the bytes. Pure.

    decode ── GRANT ──▶ prefill     these slots are yours; this order goes through them
    decode ◀─ LANDED ── prefill     a slot was written, or will not be: these blocks, in this order, with these sums

A slot is granted under an epoch that grows each time. Who was granted a slot has it until it says LANDED for that slot
and epoch, or until its connection is gone.
"""

from __future__ import annotations

import struct
import sys
from array import array
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from tandem_worker.transfer import protocol
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.protocol import BlockRange, FrameKind

SLOT_BYTES = 1 << 20
"""Pieces are no larger, but for blocks that are."""
MAX_SLOTS = 256
MAX_RANGES = 512
MAX_BLOCKS = 4096
_GRANT = struct.Struct("<QIHH")  # base address, bytes of a slot, bytes of the engine's address, slots
_SLOT = struct.Struct("<II")  # slot, epoch
_LANDED = struct.Struct("<IIIHH")  # slot, epoch, microseconds of moving, outcome, ranges
_RANGE = struct.Struct("<HHII")  # layer, spare, first index, count
_MAX_ENGINE_BYTES = 256
MAX_GRANT_BYTES = _GRANT.size + _MAX_ENGINE_BYTES + MAX_SLOTS * _SLOT.size
MAX_LANDED_BYTES = _LANDED.size + MAX_RANGES * _RANGE.size + 8 * MAX_BLOCKS
_WRITTEN, _LOST = 0, 1


class Slot(NamedTuple):
    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Grant:
    """Slots of one landing. With a transfer number in its header, the order that follows goes through them."""

    engine: str
    """`host:port` under which the engine that owns the slots is found."""
    base: int
    """Address of slot 0 in the memory of the decode worker; slot n lies n slots behind it."""
    slot_bytes: int
    slots: tuple[Slot, ...]


@dataclass(frozen=True, slots=True)
class Landed:
    """What became of one slot: the blocks of `ranges` stand in it one after another, or nothing is sure to."""

    slot: Slot
    ranges: tuple[BlockRange, ...]
    sums: array[int]
    """One for each block, over its runs, seeded as those of BLOCKS are."""
    micros: int
    """Time in which pieces of this connection moved since the LANDED before."""
    lost: bool = False
    """The engine reported a failure, or nothing for too long: bytes may still arrive, so the slot is not used again."""


def encode_grant(transfer: int, grant: Grant) -> bytes:
    """GRANT; `transfer` 0 where it only brings slots."""
    engine = grant.engine.encode()
    body = _GRANT.pack(grant.base, grant.slot_bytes, len(engine), len(grant.slots)) + engine
    return _frame(FrameKind.GRANT, transfer, body + b"".join(_SLOT.pack(*slot) for slot in grant.slots))


def decode_grant(body: bytes) -> Grant:
    """Raises TransferError."""
    try:
        base, slot_bytes, engine_bytes, count = _GRANT.unpack_from(body)
        start = _GRANT.size + engine_bytes
        engine = body[_GRANT.size : start].decode()
        slots = tuple(Slot(*fields) for fields in _SLOT.iter_unpack(body[start:]))
    except (struct.error, UnicodeDecodeError) as error:
        raise TransferError("the peer sent a GRANT frame that cannot be read") from error
    if len(slots) != count or count > MAX_SLOTS or not slot_bytes:
        raise TransferError("the peer sent a GRANT frame whose length contradicts its contents")
    return Grant(engine, base, slot_bytes, slots)


def encode_landed(transfer: int, landed: Landed) -> bytes:
    """LANDED of one slot."""
    head = _LANDED.pack(*landed.slot, landed.micros, _LOST if landed.lost else _WRITTEN, len(landed.ranges))
    ranges = b"".join(_RANGE.pack(each.layer, 0, each.first, each.count) for each in landed.ranges)
    return _frame(FrameKind.LANDED, transfer, head + ranges + _little_endian(landed.sums).tobytes())


def decode_landed(body: bytes) -> Landed:
    """Raises TransferError."""
    try:
        number, epoch, micros, outcome, count = _LANDED.unpack_from(body)
        end = _LANDED.size + count * _RANGE.size
        ranges = tuple(
            BlockRange(layer, first, length) for layer, _, first, length in _RANGE.iter_unpack(body[_LANDED.size : end])
        )
        sums = array("Q")
        sums.frombytes(body[end:])
    except (struct.error, ValueError) as error:
        raise TransferError("the peer sent a LANDED frame that cannot be read") from error
    total = sum(each.count for each in ranges)
    if len(ranges) != count or total != len(sums) or outcome not in (_WRITTEN, _LOST):
        raise TransferError("the peer sent a LANDED frame whose length contradicts its contents")
    if not all(each.count for each in ranges):
        raise TransferError("the peer sent a LANDED frame of no blocks")
    return Landed(Slot(number, epoch), ranges, _little_endian(sums), micros, outcome == _LOST)


def append_blocks(ranges: list[BlockRange], blocks: BlockRange) -> None:
    """Neighbours of one layer become one range: what is reported block by block is said shortly."""
    last = ranges[-1] if ranges else None
    if last is not None and last.layer == blocks.layer and last.first + last.count == blocks.first:
        ranges[-1] = BlockRange(last.layer, last.first, last.count + blocks.count)
    else:
        ranges.append(blocks)


def is_same_host(one: str, other: str) -> bool:
    """Whether two `host:port`, the hosts being addresses, name one host: a peer's engine is where the peer is."""
    hosts = [_read_host(each) for each in (one, other)]
    return hosts[0] is not None and hosts[0] == hosts[1]


def _read_host(endpoint: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(endpoint.rpartition(":")[0].strip("[]").partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def _frame(kind: FrameKind, transfer: int, body: bytes) -> bytes:
    return protocol.encode_header(kind, transfer, len(body), body) + body


def _little_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values = array("Q", values)
        values.byteswap()
    return values
