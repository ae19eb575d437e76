"""Idle blocks from the cold end, for a tier below: which of them nobody has looked at yet.

Blocks that become idle are queued in the order in which they are given up, so the coldest one that was not looked at
stands first, without a walk over the list. What is older than it has been examined: the tier had it, or was offered
it. A block is due when fewer than `cold_blocks` free and examined ones would be handed out before it.

A block that is offered is pinned until the tier has copied it. It keeps its place among the idle ones, for being copied
is no use, but is passed over when blocks are handed out.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable

from tandem_worker.engine.schedule.prefix_cache import PrefixCache

_FIRST_SERIAL = 2
_EXAMINED = 1
"""Serial of what was examined before its turn: it is in no queue, and older than everything that is."""
_MOST_EXAMINED = 4096
"""In one call: it is made between two steps."""
_SLACK = 1024


class WatchedCache(PrefixCache):
    """A prefix cache that notes what becomes idle. O(1) per block, amortized; `num_idle` is without what is pinned."""

    def __init__(self, num_blocks: int, num_free: Callable[[], int]) -> None:
        """`num_free`: blocks that are handed out before any idle one is."""
        super().__init__(num_blocks)
        self._num_free = num_free
        self._serials = array("q", bytes(8 * num_blocks))
        """When a block became idle, in calls; 0 while it is not."""
        self._uses = bytearray(num_blocks)
        """How many requests have let go of it since it has its name, at most 255."""
        self._next = self._boundary = _FIRST_SERIAL
        """Idle blocks with a serial before the boundary are examined."""
        self._queue: deque[tuple[int, int]] = deque()
        """(serial, block), ascending; some are out of date."""
        self._num_examined = 0
        self._asked = False
        self._pinned = bytearray(num_blocks)
        self._passed = 0
        """All idle blocks up to this one, from the cold end, are pinned: many may be, while a tier is slow."""
        self.cold_blocks = 0
        """So many blocks that are handed out next are to be examined."""
        self.on_due: Callable[[], None] = lambda: None
        """Called when a block is due, and not again before `take_coldest` has taken what is due, or nothing."""

    @property
    def is_due(self) -> bool:
        """Whether there may be a block to be offered."""
        return bool(self._queue) and self._num_free() + self._num_examined < self.cold_blocks

    def add_idle(self, block: int, now: float) -> None:
        super().add_idle(block, now)
        self.num_idle -= self._pinned[block]
        self._serials[block] = self._next
        self._queue.append((self._next, block))
        self._next += 1
        self._uses[block] = min(255, self._uses[block] + 1)
        if len(self._queue) > 2 * self.num_idle + _SLACK:
            self._queue = deque(entry for entry in self._queue if self._serials[entry[1]] == entry[0])
        self._tell()

    def remove_idle(self, block: int) -> None:
        super().remove_idle(block)
        if self._pinned[block]:
            self.num_idle += 1
            self._passed = 0
        self._num_examined -= self._serials[block] < self._boundary
        self._serials[block] = 0

    @property
    def has_unexamined(self) -> bool:
        """Whether there may be an idle block that nobody has looked at."""
        return bool(self._queue)

    def evict(self) -> int:
        block = self.next_idle(self._passed)
        while self._pinned[block]:
            self._passed = block
            block = self.next_idle(block)
        self.give_up(block)
        self._uses[block] = 0
        self._tell()
        return block

    def take_coldest(self, count: int, passes: Callable[[bytes, bool], bool]) -> list[tuple[int, bytes]]:
        """Up to `count` due blocks with their names, coldest first, pinned.

        `passes(name, reused)`: whether it is not worth being offered.
        """
        taken: list[tuple[int, bytes]] = []
        for _ in range(_MOST_EXAMINED):
            if len(taken) == count or not self.is_due:
                break
            serial, block = self._queue.popleft()
            self._boundary = serial + 1
            if self._serials[block] != serial:
                continue
            self._num_examined += 1
            self._take(block, taken, passes)
        self._asked = bool(taken) and self.is_due
        return taken

    def take_hottest(self, count: int, passes: Callable[[bytes, bool], bool]) -> list[tuple[int, bytes]]:
        """Up to `count` blocks that were not examined, hottest first and pinned, whether they are due or not."""
        taken: list[tuple[int, bytes]] = []
        for _ in range(_MOST_EXAMINED):
            if len(taken) == count or not self._queue:
                break
            serial, block = self._queue.pop()
            if self._serials[block] != serial:
                continue
            self._serials[block] = _EXAMINED
            self._num_examined += 1
            self._take(block, taken, passes)
        return taken

    def ask_again(self) -> None:
        """Nothing could be taken now: `on_due` is to be called for the next block that is due."""
        self._asked = False

    def unpin(self, blocks: Iterable[int]) -> None:
        """These are copied."""
        self._passed = 0
        for block in blocks:
            self._pinned[block] = 0
            self.num_idle += self._serials[block] != 0

    def _take(self, block: int, taken: list[tuple[int, bytes]], passes: Callable[[bytes, bool], bool]) -> None:
        name = self.name_of(block)
        if not self._pinned[block] and not passes(name, self._uses[block] > 1):
            self._pinned[block] = 1
            self.num_idle -= 1
            taken.append((block, name))

    def _tell(self) -> None:
        if not self._asked and self.is_due:
            self._asked = True
            self.on_due()
