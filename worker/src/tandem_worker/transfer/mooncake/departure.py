"""Prefill side: finished blocks are gathered into pieces, which one connection's engine writes into granted slots.

A piece is copied out of the block space before it moves: what is given back there is not read by the engine. The thread
of the connection does it all: it submits, sleeps between looks at what is in flight, and says what has landed.
"""

from __future__ import annotations

import secrets
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from tandem_worker.transfer.blocks import BlockReader
from tandem_worker.transfer.checksums import copy_out
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.mooncake.engine import Engine, Memory
from tandem_worker.transfer.mooncake.frames import (
    MAX_BLOCKS,
    MAX_RANGES,
    SLOT_BYTES,
    Grant,
    Landed,
    Slot,
    append_blocks,
)
from tandem_worker.transfer.protocol import BlockRange
from tandem_worker.transfer.slicing import Piece

NUM_PIECES = 32
"""In flight at a time."""
_PIECES_AT_ONCE = 4
"""So many are gathered before what has landed meanwhile is told."""
PIECE_SECONDS = 5.0
"""After which a piece that has not ended counts as lost."""
MAX_DEPARTURES = 32
"""Connections that have an engine at a time."""


Guard = Callable[[ReadyBlocks, Callable[[], None]], bool]
"""Calls the function while these blocks may be read; False, without a call, where they may not any more."""


@dataclass(slots=True)
class _Flight:
    target: str
    """The engine that it goes to."""
    number: int
    """The engine's, asked for until it has told an end, and not again."""
    row: int
    """Address of the staging memory."""
    transfer: int
    landed: Landed
    num_bytes: int
    since: float
    overdue: bool = False
    """Said to be lost; its end is only waited for because of its row."""


class Station:
    """An engine with its staging memory, and what it has in flight: all that outlives a connection."""

    def __init__(self, engine: Engine, piece_bytes: int) -> None:
        """Raises TransferError."""
        self.engine = engine
        self.piece_bytes = piece_bytes
        self.memory = Memory(piece_bytes * NUM_PIECES)
        if engine.protocol != "tcp":  # there the device reads, and must know the pages
            engine.register(self.memory)
        self.rows = list(range(NUM_PIECES))
        self.flights: list[_Flight] = []
        self.lost: set[str] = set()
        """Engines that were written to without success: it may come late."""

    def settle(self) -> list[tuple[_Flight, bool]]:
        """What has ended, and whether it was written."""
        ended: list[tuple[_Flight, bool]] = []
        still: list[_Flight] = []
        for flight in self.flights:
            outcome = self.engine.check(flight.number)
            if outcome is None:
                still.append(flight)
                continue
            self.rows.append(flight.row)
            if not outcome:
                self.lost.add(flight.target)
            ended.append((flight, outcome))
        self.flights = still
        return ended


class StationPool:
    """Any thread. A station whose connection ended serves the next one when nothing of it is in flight."""

    def __init__(self, begin_engine: Callable[[], Engine], most: int = MAX_DEPARTURES) -> None:
        self._begin_engine, self._most = begin_engine, most
        self._lock = threading.Lock()
        self.instance = secrets.token_hex(8)
        """Names this pool to peers."""
        self._all: list[Station] = []
        self._resting: list[Station] = []

    def take(self, piece_bytes: int) -> Station:
        """A station for pieces of so many bytes. Raises TransferError where there are no more."""
        with self._lock:
            for station in self._resting:
                station.settle()
                if not station.flights and station.piece_bytes >= piece_bytes:
                    self._resting.remove(station)
                    return station
            if len(self._all) >= self._most:
                raise TransferError(f"all {self._most} of this worker's Mooncake engines are in use")
            station = Station(self._begin_engine(), piece_bytes)
            self._all.append(station)
            return station

    def find_unsettled(self) -> tuple[str, ...]:
        """Engines that something which was submitted before this call may still write to."""
        with self._lock:
            for station in self._resting:
                station.settle()
            found: set[str] = set()
            for station in self._all:
                found |= station.lost
                found |= {flight.target for flight in tuple(station.flights)}
            return tuple(sorted(found))

    def give_back(self, station: Station) -> None:
        """Its connection has ended."""
        with self._lock:
            self._resting.append(station)


class Departures:
    """What one connection sends through slots. All methods are for the connection's thread."""

    def __init__(self, pool: StationPool, reader: BlockReader, pieces: Mapping[int, Piece]) -> None:
        """Raises TransferError where no engine is left."""
        self._pool, self._reader, self._pieces = pool, reader, pieces
        self._largest = max(piece.num_bytes for piece in pieces.values())
        self._station: Station | None = pool.take(max(self._largest, SLOT_BYTES))
        self._target: Grant | None = None
        self._slots: deque[Slot] = deque()
        self._waiting: deque[ReadyBlocks] = deque()
        self._num_gathered = 0
        """Blocks of the first report that wait no more."""
        self._pending: Counter[int] = Counter()
        """Reports that wait and pieces in flight, by transfer."""
        self._moving_since: float | None = None
        self.bytes_landed = 0

    @property
    def busy(self) -> bool:
        """Something is in flight whose end is to be told."""
        return self._moving_since is not None

    @property
    def waits(self) -> bool:
        """Blocks wait for a slot, or for a piece to end."""
        return bool(self._waiting)

    @property
    def can_submit(self) -> bool:
        """There is something to send, a slot for it, and room to gather it."""
        return bool(self._waiting and self._slots and self._station is not None and self._station.rows)

    def take_grant(self, grant: Grant) -> None:
        """Slots that may be written. Raises TransferError for what does not fit."""
        if not grant.slots and self._target is None:
            raise TransferError("the peer ordered through slots that it has not granted")
        if grant.slot_bytes < self._largest:
            sizes = f"slots of {grant.slot_bytes} bytes, and a block takes {self._largest}"
            raise TransferError(f"the peer granted {sizes}")
        known = self._target
        if known is not None and (known.engine, known.base, known.slot_bytes) != (
            grant.engine, grant.base, grant.slot_bytes,
        ):  # fmt: skip
            raise TransferError("the peer granted slots of two landings on one connection")
        self._target = replace(grant, slots=())
        self._slots.extend(grant.slots)
        if len(self._slots) > 4096:
            raise TransferError("the peer granted more slots than a landing has")

    def add(self, ready: ReadyBlocks) -> None:
        """To be sent in its turn."""
        self._waiting.append(ready)
        self._pending[ready.transfer] += 1

    def has_of(self, transfer: int) -> bool:
        """Something of this transfer waits or is in flight."""
        return transfer in self._pending

    def pump(self, now: float, guard: Guard) -> list[tuple[int, Landed, int]]:
        """Submit what there are slots for.

        Returns what could not even begin: transfer, what to tell the peer, and the bytes.
        """
        refused: list[tuple[int, Landed, int]] = []
        station = self._station
        for _ in range(_PIECES_AT_ONCE):
            if station is None or not self.can_submit:
                break
            row = station.rows[-1]
            assert self._target is not None, "slots come with their address"
            most = min(station.piece_bytes, self._target.slot_bytes)
            gathered = self._gather(station.memory.view[row * station.piece_bytes :], most, guard)
            if gathered is None:
                break
            transfer, ranges, sums, num_bytes = gathered
            slot = self._slots.popleft()
            landed = Landed(slot, tuple(ranges), sums, 0)
            number = station.engine.submit(
                self._target.engine,
                station.memory.address + row * station.piece_bytes,
                self._target.base + slot.number * self._target.slot_bytes,
                num_bytes,
            )
            if number is None:
                refused.append((transfer, replace(landed, lost=True), num_bytes))
                continue
            station.rows.pop()
            station.flights.append(_Flight(self._target.engine, number, row, transfer, landed, num_bytes, now))
            self._pending[transfer] += 1
            if self._moving_since is None:
                self._moving_since = now
        return refused

    def _gather(
        self, room: memoryview, size: int, guard: Guard
    ) -> tuple[int, list[BlockRange], array[int], int] | None:
        """Copy blocks of one transfer, as many as fit; None where nothing may be sent any more."""
        transfer: int | None = None
        ranges: list[BlockRange] = []
        sums = array("Q")
        used = 0
        while self._waiting and len(ranges) < MAX_RANGES:
            ready, done = self._waiting[0], self._num_gathered
            blocks = ready.blocks
            num_bytes = self._pieces[blocks.layer].num_bytes
            fit = min((size - used) // num_bytes, MAX_BLOCKS - len(sums), blocks.count - done)
            if fit == 0 or transfer not in (None, ready.transfer):
                break
            part = BlockRange(blocks.layer, blocks.first + done, fit)
            if not self._copy(ready, part, ready.block_ids[done : done + fit], room[used:], sums, guard):
                self._drop_first()  # cancelled meanwhile
                continue
            transfer = ready.transfer
            append_blocks(ranges, part)
            used += num_bytes * fit
            self._num_gathered += fit
            if self._num_gathered == blocks.count:
                self._drop_first()
        return None if transfer is None else (transfer, ranges, sums, used)

    def _drop_first(self) -> None:
        """Nothing of the first report waits any more."""
        self._num_gathered = 0
        self._leave(self._waiting.popleft().transfer)

    def _copy(
        self,
        ready: ReadyBlocks,
        part: BlockRange,
        block_ids: tuple[int, ...],
        room: memoryview,
        sums: array[int],
        guard: Guard,
    ) -> bool:
        def copy() -> None:
            views = self._reader.views(part.layer, block_ids, ready.fence)
            sums.extend(copy_out(views.blocks, room, ready.transfer, part.layer, part.first))

        return guard(ready, copy)

    def settle(self, now: float) -> list[tuple[int, Landed, int]]:
        """What has landed or is lost since the last call: transfer, what to tell the peer, and its bytes."""
        station = self._station
        if station is None or self._moving_since is None:
            return []
        told = [self._end(flight, now, lost=not written) for flight, written in station.settle() if not flight.overdue]
        for flight in station.flights:
            if not flight.overdue and now - flight.since > PIECE_SECONDS:
                flight.overdue = True
                told.append(self._end(flight, now, lost=True))
        if all(flight.overdue for flight in station.flights):
            self._moving_since = None
        return told

    def _end(self, flight: _Flight, now: float, *, lost: bool) -> tuple[int, Landed, int]:
        self._leave(flight.transfer)
        if not lost:
            self.bytes_landed += flight.num_bytes
        since, self._moving_since = self._moving_since, now
        assert since is not None, "something was in flight"
        micros = min(round(1e6 * (now - since)), 2**32 - 1)
        landed = flight.landed
        return flight.transfer, Landed(landed.slot, landed.ranges, landed.sums, micros, lost), flight.num_bytes

    def _leave(self, transfer: int) -> None:
        self._pending[transfer] -= 1
        if not self._pending[transfer]:
            del self._pending[transfer]

    def close(self) -> None:
        """The connection has ended: what is in flight is left to the pool."""
        self._waiting.clear()
        if self._station is not None:
            for flight in self._station.flights:
                flight.overdue = True
            self._pool.give_back(self._station)
            self._station = None
