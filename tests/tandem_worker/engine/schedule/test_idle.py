"""Which idle blocks a tier is offered, against a model that keeps one plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.idle import WatchedCache

NUM_BLOCKS, COLD = 12, 6
Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["add", "reuse", "drop", "coldest", "hottest", "back"]), st.integers(0, 30)),
    max_size=60,
)


def watched() -> tuple[BlockManager, WatchedCache]:
    blocks = BlockManager(NUM_BLOCKS + 1, 4)
    cache = blocks.watch()
    cache.cold_blocks = COLD
    return blocks, cache


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


class Model:
    """The blocks as a request and a tier would see them; `idle` is oldest first."""

    def __init__(self) -> None:
        self.blocks, self.cache = watched()
        self.idle: list[int] = []
        self.examined: set[int] = set()
        self.pinned: list[int] = []
        self.held: list[list[int]] = []
        self.written: set[bytes] = set()
        self.clock = 0
        self.names = 0

    def add(self, count: int) -> None:
        count = count % 4 + 1
        if self.blocks.num_available < count:
            return
        free = self.blocks.num_available - sum(block not in self.pinned for block in self.idle)
        for _ in range(max(0, count - free)):
            victim = next(block for block in self.idle if block not in self.pinned)
            self.idle.remove(victim)
            self.examined.discard(victim)
        taken = self.blocks.allocate(count)
        assert not set(taken) & (set(self.idle) | set(self.pinned))
        for block in taken:
            self.names += 1
            self.cache.register(name_of(self.names), block)
        self.held.append(taken)

    def reuse(self, number: int) -> None:
        if self.idle:
            block = self.idle.pop(number % len(self.idle))
            self.examined.discard(block)
            self.blocks.hold([block])
            self.held.append([block])

    def drop(self, number: int) -> None:
        if self.held:
            blocks = self.held.pop(number % len(self.held))
            self.clock += 1
            self.blocks.release(blocks, [self.cache.name_of(block) for block in blocks], self.clock)
            self.idle.extend(reversed(blocks))

    def coldest(self, number: int) -> None:
        free = len(self.blocks._free)
        expected: list[int] = []
        for block in list(self.idle):
            if block in self.examined:
                continue
            if len(expected) == number % 4 or free + len(self.examined) >= COLD:
                break
            self.examined.add(block)
            if self.cache.name_of(block) not in self.written and block not in self.pinned:
                expected.append(block)
        taken = self.cache.take_coldest(number % 4, lambda name, reused: name in self.written)
        assert [block for block, _ in taken] == expected
        self._note(taken)

    def hottest(self, number: int) -> None:
        expected: list[int] = []
        for block in reversed(self.idle):
            if len(expected) == number % 4:
                break
            if block not in self.examined:
                self.examined.add(block)
                if self.cache.name_of(block) not in self.written and block not in self.pinned:
                    expected.append(block)
        taken = self.cache.take_hottest(number % 4, lambda name, reused: name in self.written)
        assert [block for block, _ in taken] == expected
        self._note(taken)

    def back(self, number: int) -> None:
        self.cache.unpin(self.pinned)
        self.pinned = []

    def _note(self, taken: list[tuple[int, bytes]]) -> None:
        for block, name in taken:
            assert self.cache.name_of(block) == name
            self.pinned.append(block)
            self.written.add(name)

    def check(self) -> None:
        assert self.cache.idle_blocks() == self.idle
        assert self.cache.num_idle == sum(block not in self.pinned for block in self.idle)


@given(ACTIONS)
def test_the_coldest_are_offered_first_and_each_once(actions: list[Action]) -> None:
    model = Model()
    for action, number in actions:
        getattr(model, action)(number)
        model.check()


def test_it_tells_once_that_blocks_are_due() -> None:
    blocks, cache = watched()
    told: list[int] = []
    cache.on_due = lambda: told.append(1)
    taken = blocks.allocate(8)
    for number, block in enumerate(taken):
        cache.register(name_of(number), block)
    blocks.release(taken, [name_of(number) for number in range(8)], 1.0)
    assert told == [1]
    assert len(cache.take_coldest(100, lambda name, reused: False)) == 2
    assert not cache.is_due


def test_a_tier_is_told_which_blocks_were_used_again() -> None:
    blocks, cache = watched()
    taken = blocks.allocate(8)
    names = [name_of(number) for number in range(8)]
    blocks.release(taken, names, 1.0)
    blocks.hold(taken[:2])
    blocks.release(taken[:2], names[:2], 2.0)
    seen: dict[bytes, bool] = {}

    def passes(name: bytes, reused: bool) -> bool:
        seen[name] = reused
        return True

    cache.take_hottest(100, passes)
    assert {name for name, reused in seen.items() if reused} == set(names[:2])


def test_what_nobody_takes_does_not_pile_up() -> None:
    blocks, cache = watched()
    (block,) = blocks.allocate(1)
    blocks.release([block], [name_of(1)], 1.0)
    for turn in range(5000):
        blocks.hold([block])
        blocks.release([block], [name_of(1)], float(turn))
    assert len(cache._queue) < 1200


def test_it_tells_again_when_nothing_could_be_taken() -> None:
    blocks, cache = watched()
    told: list[int] = []
    cache.on_due = lambda: told.append(1)
    taken = blocks.allocate(10)
    names = [name_of(number) for number in range(10)]
    blocks.release(taken[:8], names[:8], 1.0)
    assert told == [1]
    cache.ask_again()
    blocks.release(taken[8:9], names[8:9], 2.0)
    assert told == [1, 1]
    assert cache.take_coldest(0, lambda name, reused: False) == []
    blocks.release(taken[9:], names[9:], 3.0)
    assert told == [1, 1, 1]


def test_many_pinned_blocks_cost_what_is_given_out_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier that is slow may keep an eighth of memory pinned, from the cold end."""
    blocks = BlockManager(1025, 4)
    cache = blocks.watch()
    cache.cold_blocks = 1025
    blocks.release(blocks.allocate(1024), [name_of(number) for number in range(1024)], 1.0)
    pinned = [block for block, _ in cache.take_coldest(512, lambda name, reused: False)]
    steps = [0]
    walk = cache.next_idle

    def count(block: int) -> int:
        steps[0] += 1
        return walk(block)

    monkeypatch.setattr(cache, "next_idle", count)
    taken = [cache.evict() for _ in range(256)]
    assert not set(taken) & set(pinned)
    assert steps[0] <= 512 + 2 * 256
    cache.remove_idle(pinned[0])  # used again
    cache.unpin(pinned[1:3])
    assert [cache.evict() for _ in range(2)] == pinned[1:3]
    cache.add_idle(pinned[0], 2.0)
    cache.unpin([pinned[0], *pinned[3:]])
    assert cache.evict() == pinned[3]
