"""A store that all workers of a replay share: blocks by name, up to so many, those used longest ago the first to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SharedStore:
    """Blocks go and come in the order of the prompt, so that a prompt's beginning is the first to be given up, as in a
    store that knows of no prompts."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self.num_written = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def count_leading(self, names: Sequence[bytes]) -> int:
        """How many of these are there, before the first one that is not."""
        return next((index for index, name in enumerate(names) if name not in self._blocks), len(names))

    def use(self, names: Sequence[bytes]) -> None:
        """These were read."""
        for name in names:
            self._blocks.move_to_end(name)

    def put(self, names: Sequence[bytes]) -> None:
        """These are there now; where one was already, nobody sends it again, and nothing is used."""
        for name in names:
            if name in self._blocks:
                continue
            self._blocks[name] = None
            self.num_written += 1
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
