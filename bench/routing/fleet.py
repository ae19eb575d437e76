"""Simulated workers: prompts one after another at a fixed rate, a prefix cache with an exact LRU of blocks.

Prompts of a worker are computed in the order in which they come, so all that happens to a request follows at the moment
of its assignment from what was assigned before it: no events are needed, and nothing is approximated but these rules:
decoding does not slow prompts down, and a token takes `STEP_SECONDS` and a little for every answer that runs beside it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
from tandem_sim.traces import BLOCK_TOKENS, Arrival

STEP_SECONDS = 0.01
STEP_SECONDS_PER_ANSWER = 0.0002


@dataclass(slots=True)
class Served:
    """What became of a request."""

    first_token: float
    end: float
    hit_tokens: int
    token_seconds: float


class Fleet:
    """Equal workers, by number."""

    def __init__(self, count: int, *, tokens_per_second: float, kv_tokens: int) -> None:
        self.count = count
        self.rate = tokens_per_second
        self.capacity = kv_tokens // BLOCK_TOKENS
        self.free_at = np.zeros(count)
        """When each worker has computed all its prompts; infinite for a lost worker."""
        self.holders: dict[int, set[int]] = {}
        """Block → workers that have it: what perfect knowledge would know."""
        self._caches: list[OrderedDict[int, float]] = [OrderedDict() for _ in range(count)]
        self.evicted_until = np.zeros(count)
        """Last use of the block that each worker evicted last."""
        self._running: list[list[float]] = [[] for _ in range(count)]

    def serve(self, worker: int, arrival: Arrival) -> Served:
        cache = self._caches[worker]
        hit = 0
        for block in arrival.blocks:
            if block not in cache:
                break
            hit += 1
        tokens = min(hit * BLOCK_TOKENS, arrival.prompt - 1)
        start = max(arrival.at, float(self.free_at[worker]))
        first = start + (arrival.prompt - tokens) / self.rate
        self.free_at[worker] = first
        self._keep(worker, arrival.blocks, arrival.at)
        running = self._running[worker]
        while running and running[0] <= first:
            heappop(running)
        step = STEP_SECONDS + STEP_SECONDS_PER_ANSWER * len(running)
        end = first + step * arrival.output
        heappush(running, end)
        return Served(first, end, tokens, step)

    def count_hits(self, arrival: Arrival) -> np.ndarray:
        """Cached prompt tokens on each worker."""
        tokens = np.zeros(self.count)
        known: set[int] = set()
        for depth in range(len(arrival.blocks), 0, -1):
            holders = self.holders.get(arrival.blocks[depth - 1])
            if holders and (fresh := holders - known):
                tokens[list(fresh)] = min(depth * BLOCK_TOKENS, arrival.prompt - 1)
                known |= fresh
            if len(known) == self.count:
                break
        return tokens

    def lose(self, worker: int) -> None:
        for block in self._caches[worker]:
            self.holders[block].discard(worker)
        self._caches[worker].clear()
        self.free_at[worker] = np.inf

    def _keep(self, worker: int, blocks: tuple[int, ...], now: float) -> None:
        """Deepest first, so that leaves are evicted before their roots."""
        cache = self._caches[worker]
        for block in reversed(blocks):
            if block in cache:
                cache.move_to_end(block)
            else:
                self.holders.setdefault(block, set()).add(worker)
            cache[block] = now
        while len(cache) > self.capacity:
            block, self.evicted_until[worker] = cache.popitem(last=False)
            self.holders[block].discard(worker)
