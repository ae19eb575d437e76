"""Decode side: slots that prefill workers' engines write into, and the pool that they come from.

A landing belongs to one connection. Blocks leave its slots by copies whose sums were checked after copying; block space
itself is never registered. A slot is with the peer from GRANT until LANDED; one that was lost stays with it. When the
connection ends with slots out, the landing is held back: its memory is unregistered, so that no write begins, and
neither it nor the engine serves anybody until no connection to that engine is left that could bring a late one, or the
process at the other end has said on a new connection that nothing of it is on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.mooncake.engine import Engine, Memory
from tandem_worker.transfer.mooncake.frames import SLOT_BYTES, Grant, Landed, Slot

NUM_SLOTS = 32
MAX_LANDINGS = 32
"""Connections that have slots at a time, those held back included: 1 GiB at most, as far as they were written to."""
_MOST_LOST = 4


class Landing:
    """Slots of one connection; used by its thread."""

    def __init__(self, engine: Engine, slot_bytes: int, num_slots: int = NUM_SLOTS) -> None:
        """Raises TransferError where the engine does not take the memory."""
        self.engine = engine
        self.slot_bytes = slot_bytes
        self.memory = Memory(slot_bytes * num_slots)
        engine.register(self.memory)
        self._epochs = [0] * num_slots
        self._here = list(range(num_slots))
        """Slots that may be granted."""
        self._num_lost = 0

    @property
    def clean(self) -> bool:
        """Every slot is here: nobody writes into any."""
        return len(self._here) == len(self._epochs)

    def grant(self) -> Grant:
        """All slots that are here go to the peer."""
        slots: list[Slot] = []
        for number in self._here:
            self._epochs[number] += 1
            slots.append(Slot(number, self._epochs[number]))
        self._here.clear()
        return Grant(self.engine.address, self.memory.address, self.slot_bytes, tuple(slots))

    @property
    def enough_are_here(self) -> bool:
        """So many slots that telling the peer is worth a frame; with fewer it has enough to go on."""
        return 4 * len(self._here) >= len(self._epochs)

    def take_back(self, landed: Landed) -> memoryview | None:
        """What stands in the slot, valid until it is granted again; None where it was lost.

        Raises TransferError: the peer does not have it, or so many were lost that the engines do not reach each other.
        """
        number, epoch = landed.slot
        if number >= len(self._epochs) or epoch != self._epochs[number] or number in self._here:
            raise TransferError(f"the peer landed in slot {number} of epoch {epoch}, which it was not granted")
        self._epochs[number] += 1  # said once
        if landed.lost:
            self._num_lost += 1
            if self._num_lost >= _MOST_LOST:
                raise TransferError(
                    f"Mooncake's engine of the peer could not write to {self.engine.address} {self._num_lost} times: "
                    "is that port, and the one for data, open from there?"
                )
            return None
        self._here.append(number)
        return self.memory.view[number * self.slot_bytes : (number + 1) * self.slot_bytes]


class _Held(NamedTuple):
    engine: Engine
    memory: Memory
    instance: str
    """The peer whose engine may write to it."""


class LandingPool:
    """Any thread. Engines and landings are kept for the next connection, as far as they are safe."""

    def __init__(self, begin_engine: Callable[[], Engine], most: int = MAX_LANDINGS) -> None:
        self._begin_engine = begin_engine
        self._most = most
        self._lock = threading.Lock()
        self._free: list[Landing] = []
        self._idle: list[Engine] = []
        """Without memory that anybody may write to."""
        self._held: list[_Held] = []
        self._retired: list[Memory] = []
        """Memory whose addresses must never be another landing's: a write that comes late names an address, no slot."""
        self._num_engines = 0

    @property
    def num_held(self) -> int:
        """Landings that are held back. Where there are none it waits for nobody, and engines take their time to begin:
        it is asked where answers are written."""
        if not self._held:
            return 0
        with self._lock:
            self._free_held()
            return len(self._held)

    def take(self, slot_bytes: int) -> Landing:
        """Slots of at least so many bytes. Raises TransferError where there are no more."""
        with self._lock:
            for index, landing in enumerate(self._free):
                if landing.slot_bytes >= slot_bytes:
                    return self._free.pop(index)
            self._free_held()
            if self._free:  # of smaller slots: nobody has them, so the memory may go
                landing = self._free.pop()
                landing.engine.unregister(landing.memory)
                self._retire(landing.memory)
                self._idle.append(landing.engine)
            if not self._idle:
                if self._num_engines >= self._most:
                    raise TransferError(f"all {self._most} landings are in use, {len(self._held)} of them held back")
                self._idle.append(self._begin_engine())
                self._num_engines += 1
            landing = Landing(self._idle[-1], slot_bytes)
            self._idle.pop()
            return landing

    def give_back(self, landing: Landing, instance: str) -> None:
        """Its connection, to a process of that name, has ended."""
        with self._lock:
            if landing.clean:
                self._free.append(landing)
                return
            landing.engine.unregister(landing.memory)
            self._held.append(_Held(landing.engine, landing.memory, instance))

    def settle(self, instance: str, unsettled: Sequence[str]) -> None:
        """The process of that name has said, on a new connection, to which engines alone it may still write."""
        with self._lock:
            self._free_held(lambda held: held.instance == instance and held.engine.address not in unsettled)

    def _free_held(self, is_settled: Callable[[_Held], bool] = lambda held: False) -> None:
        """Under the lock: those that nobody can write to any more."""
        still: list[_Held] = []
        for held in self._held:
            if is_settled(held) or not held.engine.is_reached():
                self._retire(held.memory)
                self._idle.append(held.engine)
            else:
                still.append(held)
        self._held = still

    def _retire(self, memory: Memory) -> None:
        memory.discard()
        self._retired.append(memory)


def plan_slot_bytes(piece_bytes: Sequence[int]) -> int:
    """A slot holds the largest single block: `piece_bytes` are those of each layer's, as one connection moves them."""
    return max(SLOT_BYTES, *piece_bytes)
