"""An engine over a small block space and a disk tier in a folder. The model notices every wrong block."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem_worker.engine.schedule.idle import WatchedCache
from tandem_worker.tiers.disk import DiskLimits, DiskTier
from tandem_worker.tiers.files import Volume
from tandem_worker.tiers.format import TierKey
from tandem_worker.tiers.memory import BlockMemory, PooledMemory, open_memory

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig

KEY = TierKey(model_digest="digest", revision="r1", layout="layout")
SLOT_BYTES = 8192
"""Of a block of the history model."""


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.002)


class DiskRig(Rig):
    def __init__(
        self,
        folder: Path,
        num_blocks: int = 64,
        *,
        key: TierKey = KEY,
        size: int = 8 << 20,
        segment_bytes: int = 16 * SLOT_BYTES,
        volume: Volume | None = None,
        usable: bool = True,
        prefill_rate: float = 1.0,
        write_through: bool = False,
        max_daily_writes: int | None = None,
        model: Any = None,
        **kw: Any,
    ) -> None:
        """`model` None: a `HistoryModel`. `prefill_rate`: tokens per second that computing is taken to be; so slow that
        no load is ever late."""
        super().__init__(HistoryModel() if model is None else model, num_blocks, **kw)
        self.engine._scheduler.hooks.prefill_rate = lambda: prefill_rate
        limits = DiskLimits(
            size_bytes=size,
            write_through=write_through,
            segment_bytes=segment_bytes,
            max_daily_writes=max_daily_writes,
            cold_share=0.5,
        )
        memory: BlockMemory = open_memory(self.engine.kv_cache)
        pool, self.below = self.engine.host_pool, False
        if pool is not None and not write_through:
            memory, num_blocks, self.below = PooledMemory(pool, memory), pool.num_blocks, True
        self.tier = DiskTier(folder, key, memory, BLOCK_SIZE, limits, volume=volume)
        cold = self.tier.plan_cold_blocks(num_blocks)
        self.tier.bind(self.engine.open_desk(self.tier, cold_blocks=cold, fence=memory.fence, below=self.below))
        self.tier.start()
        if usable:
            wait_until(lambda: self.tier.health.on)

    @property
    def written(self) -> int:
        """Blocks."""
        return self.tier.stats().tokens_written // BLOCK_SIZE

    @property
    def is_due(self) -> bool:
        """Whether memory has blocks that should be on the disk."""
        scheduler = self.engine._scheduler
        cache = scheduler.host.blocks.cache if self.below and scheduler.host is not None else scheduler.blocks.cache
        assert isinstance(cache, WatchedCache)
        return cache.is_due

    def cached(self, request_id: str) -> int:
        """Tokens of its prompt that were not computed."""
        return self.out.last(request_id).num_cached_tokens

    def close(self) -> None:
        self.tier.close()
        super().close()
        assert self.engine._scheduler.blocks.num_held == 0
        assert self.engine.failure is None
