"""Slots and engines outlive connections, and are nobody's while something may still come."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from tandem_worker.transfer.blocks import Views
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.mooncake import departure
from tandem_worker.transfer.mooncake.departure import Departures, StationPool
from tandem_worker.transfer.mooncake.engine import Memory
from tandem_worker.transfer.mooncake.frames import SLOT_BYTES, Grant, Landed, Slot
from tandem_worker.transfer.mooncake.landing import Landing, LandingPool, plan_slot_bytes
from tandem_worker.transfer.protocol import BlockRange
from tandem_worker.transfer.slicing import Piece

NUMBERS = count(1)
BLOCK = 1000


@dataclass
class NotedEngine:
    """Remembers what it is told; a test says what becomes of a piece."""

    protocol: str = "tcp"
    address: str = field(default_factory=lambda: f"10.0.0.1:{next(NUMBERS)}")
    registered: set[int] = field(default_factory=set)
    reached: bool = False
    outcomes: dict[int, bool | None] = field(default_factory=dict)
    submitted: list[tuple[str, int, int, int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    refuses: bool = False

    def register(self, memory: Memory) -> None:
        self.registered.add(memory.address)

    def unregister(self, memory: Memory) -> bool:
        self.registered.discard(memory.address)
        return True

    def is_reached(self) -> bool:
        return self.reached

    def submit(self, target: str, source: int, destination: int, num_bytes: int) -> int | None:
        if self.refuses:
            return None
        self.submitted.append((target, source, destination, num_bytes))
        self.outcomes[len(self.submitted)] = None
        return len(self.submitted)

    def check(self, number: int) -> bool | None:
        assert number not in self.asked, "a number is not asked for again once it has ended"
        if self.outcomes[number] is not None:
            self.asked.append(number)
        return self.outcomes[number]


def landed(slot: Slot, *, lost: bool = False) -> Landed:
    return Landed(slot, (BlockRange(0, 0, 1),), array("Q", [0]), 0, lost)


def test_a_slot_is_taken_back_once_and_only_from_who_has_it() -> None:
    landing = Landing(NotedEngine(), SLOT_BYTES, num_slots=2)  # type: ignore[arg-type]
    one, other = landing.grant().slots
    assert not landing.clean
    landing.memory.view[SLOT_BYTES] = 7
    view = landing.take_back(landed(other))
    assert view is not None
    assert (len(view), view[0]) == (SLOT_BYTES, 7)
    for wrong in (other, Slot(one.number, one.epoch + 1), Slot(2, 1), Slot(2**32 - 1, 1)):
        with pytest.raises(TransferError, match="was not granted"):
            landing.take_back(landed(wrong))
    (again,) = landing.grant().slots
    assert (again.number, again.epoch > other.epoch) == (other.number, True)
    with pytest.raises(TransferError, match="was not granted"):
        landing.take_back(landed(other))


def test_a_lost_slot_is_not_granted_again_and_four_are_too_many() -> None:
    landing = Landing(NotedEngine(), SLOT_BYTES, num_slots=6)  # type: ignore[arg-type]
    slots = landing.grant().slots
    for slot in slots[:3]:
        assert landing.take_back(landed(slot, lost=True)) is None
    assert landing.grant().slots == ()
    with pytest.raises(TransferError, match=r"could not write to .* 4 times"):
        landing.take_back(landed(slots[3], lost=True))
    assert not landing.clean


def build_pool(most: int = 4) -> tuple[LandingPool, list[Any]]:
    engines: list[Any] = []

    def begin() -> Any:
        engines.append(NotedEngine())
        return engines[-1]

    return LandingPool(begin, most), engines


def test_a_landing_whose_slots_are_all_here_serves_the_next_connection() -> None:
    pool, engines = build_pool()
    first = pool.take(SLOT_BYTES)
    pool.give_back(first, "p")
    assert pool.take(SLOT_BYTES) is first
    assert len(engines) == 1


def test_a_landing_with_slots_out_is_held_back_while_anybody_may_reach_it() -> None:
    pool, engines = build_pool()
    first = pool.take(SLOT_BYTES)
    engine, old = engines[0], first.memory.address
    first.grant()
    engine.reached = True
    pool.give_back(first, "p")
    assert engine.registered == set(), "no write begins any more"
    assert pool.num_held == 1
    assert pool.take(SLOT_BYTES).engine is engines[1]
    engine.reached = False
    assert pool.num_held == 0
    again = pool.take(SLOT_BYTES)
    assert again.engine is engine
    assert engine.registered == {again.memory.address}
    assert again.memory.address != old, "a late write names an address"


def test_how_many_are_held_is_known_while_an_engine_begins() -> None:
    known: list[int] = []
    pools: list[LandingPool] = []

    def begin() -> Any:
        asking = threading.Thread(target=lambda: known.append(pools[0].num_held), daemon=True)
        asking.start()
        asking.join(60)
        return NotedEngine()

    pools.append(LandingPool(begin))
    pools[0].take(SLOT_BYTES)
    assert known == [0]


def test_a_process_that_says_what_it_may_still_write_to_frees_the_rest() -> None:
    pool, engines = build_pool()
    landings = [pool.take(SLOT_BYTES) for _ in range(3)]
    for landing, instance in zip(landings, ("p", "p", "q"), strict=True):
        landing.grant()
        landing.engine.reached = True  # type: ignore[attr-defined]
        pool.give_back(landing, instance)
    pool.settle("p", [engines[1].address])
    assert pool.num_held == 2
    assert pool.take(SLOT_BYTES).engine is engines[0]
    pool.settle("q", [])
    assert pool.num_held == 1


def test_there_are_no_more_landings_than_that() -> None:
    pool, engines = build_pool(most=2)
    for _ in range(2):
        landing = pool.take(SLOT_BYTES)
        landing.grant()
        landing.engine.reached = True  # type: ignore[attr-defined]
        pool.give_back(landing, "p")
    with pytest.raises(TransferError, match="all 2 landings are in use, 2 of them held back"):
        pool.take(SLOT_BYTES)
    assert len(engines) == 2


def test_larger_blocks_get_larger_slots() -> None:
    pool, engines = build_pool()
    small = pool.take(plan_slot_bytes([10, 20]))
    assert small.slot_bytes == SLOT_BYTES
    pool.give_back(small, "p")
    large = pool.take(plan_slot_bytes([10, 3 * SLOT_BYTES]))
    assert (large.slot_bytes, len(engines)) == (3 * SLOT_BYTES, 1)
    assert large.engine.registered == {large.memory.address}  # type: ignore[attr-defined]
    pool.give_back(large, "p")
    assert pool.take(SLOT_BYTES) is large


# What goes through slots.


class NotedReader:
    def views(self, layer: int, block_ids: Any, fence: object) -> Views:
        runs = [bytes([block]) * BLOCK for block in block_ids]
        return Views([(memoryview(run),) for run in runs], [memoryview(b"".join(runs))])


def build_departures(slots: int = 4, **options: Any) -> tuple[Departures, NotedEngine, StationPool]:
    engine = NotedEngine(**options)
    pool = StationPool(lambda: engine)  # type: ignore[arg-type,return-value]
    piece = Piece(layer=0, block_bytes=BLOCK, runs=((0, BLOCK),), shape=(BLOCK,), narrow=None)
    departures = Departures(pool, NotedReader(), {0: piece, 1: piece})
    departures.take_grant(Grant("10.0.0.9:1", 1 << 40, SLOT_BYTES, tuple(Slot(number, 1) for number in range(slots))))
    return departures, engine, pool


def ready(transfer: int, layer: int, first: int, *block_ids: int) -> ReadyBlocks:
    return ReadyBlocks(transfer, BlockRange(layer, first, len(block_ids)), block_ids, None)


def read(part: ReadyBlocks, run: Any) -> bool:
    run()
    return True


def test_what_is_ready_is_gathered_into_one_piece_per_transfer() -> None:
    departures, engine, _ = build_departures()
    for each in (ready(7, 0, 0, 3, 4), ready(7, 0, 2, 9), ready(7, 1, 0, 3), ready(8, 0, 0, 5)):
        departures.add(each)
    assert departures.pump(0.0, read) == []
    assert [(target, size) for target, _, _, size in engine.submitted] == [("10.0.0.9:1", 4000), ("10.0.0.9:1", 1000)]
    assert [destination for _, _, destination, _ in engine.submitted] == [1 << 40, (1 << 40) + SLOT_BYTES]
    assert departures.has_of(7)
    assert departures.settle(0.1) == []
    engine.outcomes |= {1: True, 2: True}
    told = departures.settle(0.5)
    assert [(transfer, landed.ranges, len(landed.sums), size) for transfer, landed, size in told] == [
        (7, (BlockRange(0, 0, 3), BlockRange(1, 0, 1)), 4, 4000),
        (8, (BlockRange(0, 0, 1),), 1, 1000),
    ]
    assert sum(landed.micros for _, landed, _ in told) == 500_000
    assert not departures.has_of(7)
    assert not departures.busy


def test_what_may_not_be_read_any_more_is_left_out() -> None:
    departures, engine, _ = build_departures()
    for each in (ready(7, 0, 0, 3), ready(8, 0, 0, 5), ready(7, 0, 1, 4)):
        departures.add(each)
    departures.pump(0.0, lambda part, run: part.transfer == 8 and read(part, run))
    assert [size for *_, size in engine.submitted] == [BLOCK]
    assert not departures.has_of(7)


def test_pieces_are_no_larger_than_a_slot_and_wait_for_one() -> None:
    departures, engine, _ = build_departures(slots=1)
    blocks = list(range(1, 256)) * 9
    departures.add(ready(7, 0, 0, *blocks))
    departures.pump(0.0, read)
    most = SLOT_BYTES // BLOCK
    assert [size for *_, size in engine.submitted] == [most * BLOCK]
    assert departures.waits
    engine.outcomes[1] = True
    ((_, landed, _),) = departures.settle(0.1)
    assert landed.ranges == (BlockRange(0, 0, most),)
    departures.take_grant(Grant("10.0.0.9:1", 1 << 40, SLOT_BYTES, (Slot(0, 3),)))
    departures.pump(0.2, read)
    assert len(engine.submitted) == 2


def test_a_failed_piece_is_told_as_lost_and_its_target_is_unsettled_for_good() -> None:
    departures, engine, pool = build_departures()
    departures.add(ready(7, 0, 0, 3))
    departures.pump(0.0, read)
    assert pool.find_unsettled() == ("10.0.0.9:1",)
    engine.outcomes[1] = False
    ((transfer, landed, _),) = departures.settle(0.1)
    assert (transfer, landed.lost) == (7, True)
    departures.close()
    assert pool.find_unsettled() == ("10.0.0.9:1",)


def test_a_piece_that_does_not_end_is_lost_in_time_and_its_engine_rests_until_it_does() -> None:
    departures, engine, pool = build_departures()
    departures.add(ready(7, 0, 0, 3))
    departures.pump(0.0, read)
    assert departures.settle(departure.PIECE_SECONDS) == []
    ((_, landed, _),) = departures.settle(departure.PIECE_SECONDS + 0.1)
    assert landed.lost
    assert not departures.has_of(7)
    assert not departures.busy
    departures.close()
    assert pool.find_unsettled() == ("10.0.0.9:1",)
    assert pool.take(1).engine is engine, "of another station, for nothing may come of this one"
    engine.outcomes[1] = True
    assert pool.find_unsettled() == ()


def test_a_piece_that_cannot_begin_is_lost_at_once() -> None:
    departures, _, _ = build_departures(refuses=True)
    departures.add(ready(7, 0, 0, 3))
    ((transfer, landed, _),) = departures.pump(0.0, read)
    assert (transfer, landed.lost, landed.slot) == (7, True, Slot(0, 1))
    assert not departures.has_of(7)


@pytest.mark.parametrize(
    ("grant", "words"),
    [
        (Grant("10.0.0.9:2", 1 << 40, SLOT_BYTES, ()), "two landings"),
        (Grant("10.0.0.9:1", 1 << 41, SLOT_BYTES, ()), "two landings"),
        (Grant("10.0.0.9:1", 1 << 40, BLOCK - 1, ()), "a block takes 1000"),
        (Grant("10.0.0.9:1", 1 << 40, SLOT_BYTES, tuple(Slot(n, 1) for n in range(5000))), "more slots"),
    ],
)
def test_grants_that_make_no_sense_end_the_connection(grant: Grant, words: str) -> None:
    departures, _, _ = build_departures()
    with pytest.raises(TransferError, match=words):
        departures.take_grant(grant)


def test_an_order_through_slots_that_nobody_granted_is_refused() -> None:
    pool = StationPool(NotedEngine)  # type: ignore[arg-type]
    piece = Piece(layer=0, block_bytes=BLOCK, runs=((0, BLOCK),), shape=(BLOCK,), narrow=None)
    with pytest.raises(TransferError, match="has not granted"):
        Departures(pool, NotedReader(), {0: piece}).take_grant(Grant("e", 1, SLOT_BYTES, ()))


def test_there_are_no_more_engines_than_that() -> None:
    pool = StationPool(NotedEngine, most=2)  # type: ignore[arg-type]
    stations = [pool.take(1), pool.take(1)]
    with pytest.raises(TransferError, match="all 2 of this worker's Mooncake engines are in use"):
        pool.take(1)
    pool.give_back(stations[0])
    assert pool.take(1) is stations[0]


def test_a_piece_never_reaches_into_the_next_slot() -> None:
    """The station that is free has room for more than this peer's slots hold."""
    engine = NotedEngine()
    pool = StationPool(lambda: engine)  # type: ignore[arg-type,return-value]
    pool.give_back(pool.take(4 * BLOCK))
    piece = Piece(layer=0, block_bytes=BLOCK, runs=((0, BLOCK),), shape=(BLOCK,), narrow=None)
    departures = Departures(pool, NotedReader(), {0: piece})
    departures.take_grant(Grant("10.0.0.9:1", 1 << 40, 2 * BLOCK, (Slot(0, 1), Slot(1, 1))))
    departures.add(ready(7, 0, 0, 1, 2, 3))
    departures.pump(0.0, read)
    assert [size for *_, size in engine.submitted] == [2 * BLOCK, BLOCK]
    assert engine.submitted[1][2] == (1 << 40) + 2 * BLOCK
