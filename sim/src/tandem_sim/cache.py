"""The prefix cache of a worker: an exact LRU of blocks, leaves first."""

from __future__ import annotations

from collections import OrderedDict

from tandem_sim.traces import BLOCK_TOKENS


class PrefixCache:
    """Blocks by id; equal ids have equal prefixes."""

    __slots__ = ("_blocks", "capacity", "evicted_until")

    def __init__(self, kv_tokens: int) -> None:
        self.capacity = kv_tokens // BLOCK_TOKENS
        self.evicted_until = 0.0
        """Last use of the block that was evicted last."""
        self._blocks: OrderedDict[int, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: tuple[int, ...], prompt: int) -> int:
        """Cached tokens of a prompt. Its last token is always computed."""
        hit = 0
        for block in blocks:
            if block not in self._blocks:
                break
            hit += 1
        return min(hit * BLOCK_TOKENS, prompt - 1)

    def keep(self, blocks: tuple[int, ...], now: float) -> None:
        """Take in a prompt, deepest block first, so that leaves are evicted before their roots."""
        own = self._blocks
        for block in reversed(blocks):
            own[block] = now
            own.move_to_end(block)
        while len(own) > self.capacity:
            _, self.evicted_until = own.popitem(last=False)
