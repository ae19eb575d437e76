"""An engine over a small block space and Mooncake's store. The model notices every wrong block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem_worker.tiers.format import TierKey
from tandem_worker.tiers.memory import open_memory
from tandem_worker.tiers.mooncake.tier import StoreTier

from tests.mooncake.library import plan_environment
from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig
from tests.tandem_worker.tiers.rig import KEY, wait_until


class StoreRig(Rig):
    def __init__(
        self,
        address: str,
        num_blocks: int = 64,
        *,
        key: TierKey = KEY,
        usable: bool = True,
        prefill_rate: float = 1.0,
        retry_seconds: float = 0.3,
        notes: Path | None = None,
        given_bytes: int = 0,
        **kw: Any,
    ) -> None:
        """`prefill_rate`: tokens per second that computing is taken to be; so slow that no load is ever late."""
        model: Any = HistoryModel()
        super().__init__(model, num_blocks, **kw)
        self.engine._scheduler.hooks.prefill_rate = lambda: prefill_rate
        memory = open_memory(self.engine.kv_cache)
        self.tier = StoreTier(
            address, key, memory, BLOCK_SIZE, environment=plan_environment(), retry_seconds=retry_seconds, notes=notes,
            given_bytes=given_bytes,
        )  # fmt: skip
        cold = self.tier.plan_cold_blocks(num_blocks)
        self.tier.bind(self.engine.open_desk(self.tier, cold_blocks=cold, fence=memory.fence))
        self.tier.start()
        if usable:
            wait_until(lambda: self.tier.health.on)

    @property
    def written(self) -> int:
        """Blocks."""
        return self.tier.stats().tokens_written // BLOCK_SIZE

    def cached(self, request_id: str) -> int:
        """Tokens of its prompt that were not computed."""
        return self.out.last(request_id).num_cached_tokens

    def close(self) -> None:
        self.tier.close()
        super().close()
        assert self.engine._scheduler.blocks.num_held == 0
        assert self.engine.failure is None
