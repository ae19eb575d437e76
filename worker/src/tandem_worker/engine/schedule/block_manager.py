"""Who holds which KV block: reference counts, free blocks, sharing and copy-on-write.

A block is in exactly one of three places: held (reference count > 0), idle (named, count 0: evictable) or free
(unnamed, count 0). Block 0 is in none: padding writes there. Allocation takes free blocks first, then evicts idle
ones. All operations cost O(blocks moved), none depends on how many blocks are cached.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tandem_worker.engine.schedule.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from tandem_worker.engine.schedule.idle import WatchedCache


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        """`num_blocks` counts block 0, so `num_blocks - 1` can be given out."""
        if num_blocks < 2:
            raise ValueError(f"a block space needs at least 2 blocks, got {num_blocks}")
        self.block_size = block_size
        self.num_blocks = num_blocks - 1
        self.cache = PrefixCache(num_blocks)
        self._holders = array("i", bytes(4 * num_blocks))
        self._free = array("i", range(num_blocks - 1, 0, -1))
        self._num_fresh = len(self._free)
        """Blocks at the bottom of the free ones that were never given out: those that come back lie on top of them."""

    def watch(self) -> WatchedCache:
        """From now on idle blocks can be taken from the cold end. To be called while none is named."""
        from tandem_worker.engine.schedule.idle import WatchedCache

        assert not len(self.cache), "blocks were named before they were watched"
        on_evict = self.cache.on_evict
        self.cache = watched = WatchedCache(self.num_blocks + 1, lambda: len(self._free))
        watched.on_evict = on_evict
        return watched

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + self.cache.num_idle

    @property
    def num_touched(self) -> int:
        """Blocks that may have been written, block 0 included. The first so many: new ones are given out in order."""
        return self.num_blocks + 1 - self._num_fresh

    @property
    def num_held(self) -> int:
        """Blocks that some request holds; neither free nor idle in the prefix cache."""
        return self.num_blocks - self.num_available

    def count_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def num_holders(self, block: int) -> int:
        """How many sequences hold `block`; 0 for one that is free or only cached."""
        return self._holders[block]

    def is_shared(self, block: int) -> bool:
        """Whether more than one sequence holds `block`, so that none of them may write it."""
        return self._holders[block] > 1

    def match_prefix(self, chain: Sequence[bytes], max_blocks: int) -> list[int]:
        """Cached blocks of the longest known prefix, at most `max_blocks`. Holds nothing yet."""
        find = self.cache.find
        blocks: list[int] = []
        for name in chain[:max_blocks] if len(chain) > max_blocks else chain:
            block = find(name)
            if not block:
                break
            blocks.append(block)
        return blocks

    def count_required(self, matched: Sequence[int], num_total: int) -> int:
        """What holding `matched` and allocating the rest of `num_total` takes from `num_available`."""
        holders = self._holders
        return num_total - len(matched) + sum(1 for block in matched if not holders[block])

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to blocks that are held or idle."""
        holders = self._holders
        for block in blocks:
            if not holders[block]:
                assert self.cache.is_named(block), f"block {block} is free"
                self.cache.remove_idle(block)
            holders[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Fresh blocks with one holder. The caller has seen `num_available >= count`."""
        assert self.num_available >= count, f"{count} blocks wanted, {self.num_available} available"
        free, holders = self._free, self._holders
        blocks: list[int] = []
        for _ in range(count):
            block = free.pop() if free else self.cache.evict()
            assert holders[block] == 0, f"block {block} is held"
            holders[block] = 1
            blocks.append(block)
        self._num_fresh = min(self._num_fresh, len(free))
        return blocks

    def replace_shared(self, block: int) -> int:
        """Copy-on-write: a fresh block in place of a shared one, whose content the caller copies."""
        assert self._holders[block] > 1, f"block {block} is not shared"
        (fresh,) = self.allocate(1)
        self._holders[block] -= 1
        return fresh

    def release(self, blocks: Sequence[int], names: Sequence[bytes], now: float) -> None:
        """Let go of one sequence's blocks, deepest first; `names` are those of its leading full blocks.

        Two requests may have computed the same block at the same time; the one without the name is freed, and the
        named one counts as used now: its children were. A block that has its name already is not looked up again: in
        a large cache that look-up misses the processor's caches.
        """
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if index < len(names) and not self.cache.is_named(block):
                owner = self.cache.register(names[index], block)
                if owner != block and not self._holders[owner]:
                    self.cache.touch(owner, now)
            self._drop(block, now)

    def _drop(self, block: int, now: float) -> None:
        holders = self._holders[block] - 1
        assert holders >= 0, f"block {block} released twice"
        self._holders[block] = holders
        if holders:
            return
        if self.cache.is_named(block):
            self.cache.add_idle(block, now)
        else:
            self._free.append(block)

    def free_newest(self, count: int) -> int:
        """Evict up to `count` idle blocks, those that were used last before the others. How many there were."""
        freed = 0
        while freed < count and (block := self.cache.newest_idle()):
            self._free.append(self.cache.give_up(block))
            freed += 1
        return freed

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place. Walks everything: for tests."""
        idle, free = self.cache.idle_blocks(), list(self._free)
        held = [block for block in range(1, self.num_blocks + 1) if self._holders[block] > 0]
        assert sorted(idle + free + held) == list(range(1, self.num_blocks + 1))
        assert len(idle) == self.cache.num_idle
        assert all(self.cache.is_named(block) for block in idle)
        assert not any(self.cache.is_named(block) for block in free)
