"""The prefix cache of a worker: an exact LRU of blocks, leaves first."""

from __future__ import annotations

from collections import OrderedDict

from tandem_sim.traces import BLOCK_TOKENS


class PrefixCache:
    """Blocks by id; equal ids have equal prefixes."""

    __slots__ = ("_blocks", "capacity")

    def __init__(self, kv_tokens: int) -> None:
        self.capacity = kv_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

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

    def keep(self, blocks: tuple[int, ...]) -> None:
        """Take in a prompt, deepest block first, so that leaves are evicted before their roots."""
        own = self._blocks
        for block in reversed(blocks):
            if block in own:
                own.move_to_end(block)
            else:
                own[block] = None
        while len(own) > self.capacity:
            own.popitem(last=False)
