"""Every sink gets each block that it wants, or loses it alone; nothing stays pinned once all have copied it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.tiers import Offer, TierEngine
from tandem_worker.tiers.disk import DiskLimits, DiskTier
from tandem_worker.tiers.errors import TierError
from tandem_worker.tiers.fanout import SinkFanout
from tandem_worker.tiers.memory import open_memory
from tandem_worker.tiers.mooncake.tier import StoreTier

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.tiers.rig import KEY


class Recorder:
    """A sink that asks and copies when it is told to."""

    def __init__(self) -> None:
        self.has: set[bytes] = set()
        self.on = True
        self.open: list[Offer] = []
        self.answers = 0
        self.num_due = 0

    @property
    def wants_blocks(self) -> bool:
        return self.on

    def bind(self, engine: TierEngine) -> None:
        self.engine = engine

    def passes(self, name: bytes, reused: bool) -> bool:
        return name in self.has

    def due(self) -> None:
        self.num_due += 1

    def offered(self, offer: Offer | None) -> None:
        self.answers += 1
        if offer is not None:
            self.open.append(offer)

    def copy(self) -> None:
        for offer in self.open:
            self.has.update(offer.names)
            self.engine.hand_back(offer)
        self.open.clear()


class Memory:
    """An engine that offers each of its blocks once, two at a time, when it is stepped."""

    def __init__(self, fanout: SinkFanout, count: int) -> None:
        self.fanout, self.left, self.pinned, self.asked = fanout, list(range(count)), set[int](), 0

    def load_ended(self, load: int, valid: int) -> None: ...

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None:
        self.asked += 1

    def hand_back(self, offer: Offer) -> None:
        assert self.pinned.issuperset(offer.block_ids)
        self.pinned.difference_update(offer.block_ids)

    def drop_kept(self) -> None: ...

    def step(self) -> None:
        while self.asked:
            self.asked -= 1
            ids: list[int] = []
            while self.left and len(ids) < 2:
                block = self.left.pop(0)
                if not self.fanout.passes(b"%d" % block, False):
                    ids.append(block)
            self.pinned.update(ids)
            names = tuple(b"%d" % block for block in ids)
            self.fanout.offered(Offer(block_ids=tuple(ids), names=names, fence=None) if ids else None)


def build(num_blocks: int, num_sinks: int = 2) -> tuple[Memory, list[Recorder]]:
    sinks = [Recorder() for _ in range(num_sinks)]
    fanout = SinkFanout(sinks, most_kept=3)
    memory = Memory(fanout, num_blocks)
    fanout.bind(memory)
    return memory, sinks


def test_both_get_all_when_both_keep_up() -> None:
    memory, sinks = build(7)
    for _ in range(8):
        for sink in sinks:
            sink.engine.offer_blocks(2)
        memory.step()
        for sink in sinks:
            sink.copy()
    assert [len(sink.has) for sink in sinks] == [7, 7]
    assert not memory.pinned


def test_blocks_stay_pinned_until_the_slower_one_has_copied_them() -> None:
    memory, (fast, slow) = build(2)
    fast.engine.offer_blocks(2)
    memory.step()
    fast.copy()
    assert memory.pinned == {0, 1}
    assert slow.num_due == 1
    slow.engine.offer_blocks(2)
    assert memory.pinned == {0, 1}
    slow.copy()
    assert memory.pinned == set()
    assert slow.has == fast.has


def test_one_that_is_behind_loses_what_is_beyond_what_is_kept_for_it() -> None:
    memory, (fast, slow) = build(8)
    for _ in range(4):
        fast.engine.offer_blocks(2)
        memory.step()
        fast.copy()
    assert len(fast.has) == 8
    assert memory.pinned == {0, 1, 2, 3}
    for _ in range(2):
        slow.engine.offer_blocks(2)
        slow.copy()
    assert slow.has == {b"0", b"1", b"2", b"3"}
    assert not memory.pinned


def test_one_that_has_everything_takes_nothing_from_one_that_is_behind() -> None:
    memory, (full, behind) = build(6)
    full.has = {b"%d" % block for block in range(6)}
    full.engine.offer_blocks(2)
    memory.step()
    assert (full.answers, full.open) == (1, [])
    assert len(memory.left) == 4
    for _ in range(4):
        behind.engine.offer_blocks(2)
        memory.step()
        behind.copy()
    assert len(behind.has) == 6
    assert not memory.pinned


def test_nobody_is_handed_more_than_it_asked_for() -> None:
    """A sink copies into a buffer that has room for what it asks for, and others ask for more at a time."""
    sinks = [Recorder(), Recorder()]
    fanout = SinkFanout(sinks, most_kept=100)
    memory = Memory(fanout, 0)
    fanout.bind(memory)
    for sink, count in zip(sinks, (8, 3), strict=True):
        sink.engine.offer_blocks(count)
    assert memory.asked == 1
    memory.pinned.update(range(16))
    for first in (0, 8):  # the second one comes before it is asked for
        names = tuple(b"%d" % block for block in range(first, first + 8))
        fanout.offered(Offer(block_ids=tuple(range(first, first + 8)), names=names, fence=None))
    assert [[len(offer.block_ids) for offer in sink.open] for sink in sinks] == [[8], [3]]
    for sink, count in zip(sinks, (8, 3), strict=True):
        while len(sink.has) < 16:
            assert all(len(offer.block_ids) <= count for offer in sink.open)
            sink.copy()
            sink.engine.offer_blocks(count)
    assert not memory.pinned


class Sparing(Recorder):
    """Wants what was used again."""

    def passes(self, name: bytes, reused: bool) -> bool:
        return not reused or super().passes(name, reused)


def test_one_that_wants_what_was_used_again_gets_nothing_else_from_the_others_offers() -> None:
    """A disk whose daily writes are nearly spent, beside a store."""
    sparing, other = Sparing(), Recorder()
    fanout = SinkFanout([sparing, other], most_kept=100)
    memory = Memory(fanout, 0)
    fanout.bind(memory)
    for reused in (False, True):
        other.engine.offer_blocks(4)
        names = tuple(b"%d %d" % (reused, block) for block in range(4))
        assert not any(fanout.passes(name, reused) for name in names)
        memory.pinned.update(range(4))
        fanout.offered(Offer(block_ids=tuple(range(4)), names=names, fence=None))
        other.copy()
        sparing.engine.offer_blocks(4)
        sparing.copy()
        assert len(sparing.has) == (4 if reused else 0)
        memory.pinned.clear()


def test_one_that_is_off_pins_nothing_and_is_answered() -> None:
    memory, (there, gone) = build(4)
    gone.engine.offer_blocks(2)
    gone.on = False
    memory.step()
    assert (gone.answers, gone.open) == (1, [])
    for _ in range(3):
        there.engine.offer_blocks(2)
        memory.step()
        there.copy()
    assert not memory.pinned


def test_what_was_kept_for_one_that_goes_off_is_let_go() -> None:
    memory, (there, gone) = build(6)
    there.engine.offer_blocks(2)
    memory.step()
    there.copy()
    assert memory.pinned
    gone.on = False
    there.engine.offer_blocks(2)
    memory.step()
    there.copy()
    assert not memory.pinned


def test_one_that_goes_off_lets_go_of_what_is_kept_for_it_at_once() -> None:
    """However much of memory it is, and though nothing else is ever offered."""
    memory, (one, other) = build(4)
    one.engine.offer_blocks(2)
    memory.step()
    one.copy()
    assert memory.pinned
    other.engine.drop_kept()
    assert memory.pinned  # it is on: it asks for them in a while
    other.on = False
    other.engine.drop_kept()
    assert not memory.pinned


@given(st.lists(st.tuples(st.sampled_from(["ask", "copy", "step", "on", "off"]), st.integers(0, 2)), max_size=60))
def test_nobody_waits_for_ever_and_nothing_stays_pinned(steps: list[tuple[str, int]]) -> None:
    memory, sinks = build(20, 3)
    asked: dict[int, int] = {}
    for verb, index in steps:
        sink = sinks[index]
        if verb == "ask" and sink.on and index not in asked:
            asked[index] = sink.answers
            sink.engine.offer_blocks(2)
        elif verb == "copy":
            sink.copy()
        elif verb == "step":
            memory.step()
            assert all(sinks[each].answers == answers + 1 for each, answers in asked.items())
            asked.clear()
        elif verb in ("on", "off"):
            sink.on = verb == "on"
    memory.step()
    for sink in sinks:
        sink.copy()
        sink.on = False
    memory.fanout.offered(None)
    assert not memory.pinned


def test_the_others_go_on_where_it_was_the_turn_of_one_that_goes_off() -> None:
    """One has what is offered, is told that there is nothing, and waits to hear of more; the other one never asks."""
    memory, (one, other) = build(6)
    one.has = {b"0", b"1"}
    one.engine.offer_blocks(2)
    memory.step()
    assert (one.answers, one.open, memory.asked, memory.left) == (1, [], 0, [2, 3, 4, 5])
    told = one.num_due
    other.on = False
    other.engine.drop_kept()
    assert one.num_due == told + 1
    one.engine.offer_blocks(2)
    memory.step()
    assert [offer.names for offer in one.open] == [(b"2", b"3")]


class Listener:
    """A `TierEngine` of a sink that never asks."""

    def __init__(self) -> None:
        self.dropped = 0

    def load_ended(self, load: int, valid: int) -> None: ...

    def offer_blocks(self, count: int, *, hottest: bool = False) -> None: ...

    def hand_back(self, offer: Offer) -> None: ...

    def drop_kept(self) -> None:
        self.dropped += 1


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_tier_says_that_it_is_off(tmp_path: Path, kind: str) -> None:
    rig = Rig(HistoryModel(), 16)  # type: ignore[arg-type]
    memory = open_memory(rig.engine.kv_cache)
    tier = (
        DiskTier(tmp_path, KEY, memory, BLOCK_SIZE, DiskLimits(size_bytes=8 << 20, segment_bytes=1 << 20))
        if kind == "disk"
        else StoreTier("127.0.0.1:1", KEY, memory, BLOCK_SIZE)
    )
    engine = Listener()
    tier.bind(engine)
    tier.health.recover()
    assert not engine.dropped
    tier.health.fail(TierError("Gone", "it is gone"))
    assert engine.dropped == 1
    rig.close()
