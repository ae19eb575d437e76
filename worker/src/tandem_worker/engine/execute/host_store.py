"""KV blocks in host memory: where preempted sequences' blocks are moved to and fetched from.

Moves are launched behind the step under way and before the next one, so they read what the former wrote and are read
by the latter. Moving out is waited for: afterwards the device blocks may be written by anyone, the network included.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from tandem_worker.host.uploads import upload, wait_for_launched
from tandem_worker.model.contract import KVCache

_MEASURED_BLOCKS = 32


class HostStore:
    """`num_blocks` blocks, each with every layer's share. Pinned when the cache is on a GPU."""

    def __init__(self, kv_cache: KVCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._layers = kv_cache.layers
        self._device = kv_cache.layers[0].device
        self._stored = [torch.zeros((num_blocks, *layer.shape[1:]), dtype=layer.dtype) for layer in self._layers]
        if self._device.type == "cuda":
            # Not torch's own pinned memory: that comes in powers of two, up to twice what was planned.
            runtime = cast(Any, torch.cuda.cudart())
            for stored in self._stored:
                torch.cuda.check_error(int(runtime.cudaHostRegister(stored.data_ptr(), stored.nbytes, 0)))

    def move_out(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(device block, host block) pairs; returns when the host has them."""
        index = self._index([block for block, _ in pairs])
        runs = find_runs([host for _, host in pairs])
        for layer, stored in zip(self._layers, self._stored, strict=True):
            gathered = layer.index_select(0, index)
            for first, host, count in runs:
                stored[host : host + count].copy_(gathered[first : first + count], non_blocking=True)
        wait_for_launched(self._device)

    def move_in(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(host block, device block) pairs; what is launched afterwards finds them."""
        index = self._index([block for _, block in pairs])
        runs = find_runs([host for host, _ in pairs])
        for layer, stored in zip(self._layers, self._stored, strict=True):
            gathered = layer.new_empty((len(pairs), *layer.shape[1:]))
            for first, host, count in runs:
                gathered[first : first + count].copy_(stored[host : host + count], non_blocking=True)
            layer.index_copy_(0, index, gathered)

    def measure_seconds_per_block(self) -> float:
        """Out and in again. Moves blocks onto themselves: to be called while no step is under way."""
        count = min(_MEASURED_BLOCKS, self.num_blocks, self._layers[0].shape[0] - 1)
        pairs = [(1 + block, block) for block in range(count)]
        seconds = 0.0
        for _ in range(2):  # the first time touches memory that the second one only copies
            began = time.perf_counter()
            self.move_out(pairs)
            self.move_in([(host, block) for block, host in pairs])
            wait_for_launched(self._device)
            seconds = time.perf_counter() - began
        return seconds / count

    def _index(self, blocks: list[int]) -> torch.Tensor:
        return upload(np.array(blocks, dtype=np.int64), self._device)


def find_runs(blocks: list[int]) -> list[tuple[int, int, int]]:
    """(index, block, length) of each stretch in which blocks follow one another."""
    runs: list[tuple[int, int, int]] = []
    begin = 0
    for index in range(1, len(blocks) + 1):
        if index == len(blocks) or blocks[index] != blocks[index - 1] + 1:
            runs.append((begin, blocks[begin], index - begin))
            begin = index
    return runs
