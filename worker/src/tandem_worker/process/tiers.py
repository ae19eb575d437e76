"""The tiers of a worker's blocks below memory, from its configuration, and what is told about them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import WorkerConfig
from tandem_api.telemetry import Metric, TierTelemetry

from tandem_worker.host.runtime import Runtime
from tandem_worker.process.families import Families

if TYPE_CHECKING:
    from tandem_worker.engine.core import EngineCore
    from tandem_worker.tiers.disk import DiskTier
    from tandem_worker.tiers.stats import TierStats


def open_tier(engine: EngineCore, config: WorkerConfig, digest: str, runtime: Runtime) -> DiskTier | None:
    """Joined with an engine that has computed nothing yet. It looks at its volume while the worker goes on starting;
    what is wrong with that ends nothing.

    Raises ThreadStartError.
    """
    wanted = config.kv.disk
    if wanted is None:
        return None
    from tandem_worker.tiers.disk import DiskLimits, DiskTier
    from tandem_worker.tiers.format import TierKey
    from tandem_worker.tiers.memory import open_memory
    from tandem_worker.transfer.layout import KVLayout

    memory = open_memory(engine.kv_cache)
    layout = KVLayout.of(engine.kv_cache.spec).fingerprint
    tier = DiskTier(
        Path(wanted.path),
        TierKey(model_digest=digest, revision=config.revision, layout=layout),
        memory,
        engine.kv_cache.spec.block_size,
        DiskLimits(
            size_bytes=wanted.size_bytes,
            write_through=wanted.write_through,
            max_daily_writes=wanted.max_daily_writes,
        ),
        runtime.vitals,
    )
    cold_blocks = tier.plan_cold_blocks(engine.kv_cache.num_blocks)
    tier.bind(engine.open_desk(tier, cold_blocks=cold_blocks, fence=memory.fence))
    tier.start()
    return tier


def describe_tier(stats: TierStats) -> TierTelemetry:
    """For gateways and the operator."""
    return TierTelemetry(
        tier=stats.tier,
        reason=stats.reason,
        message=stats.message[:1000],
        capacity_tokens=stats.capacity_tokens,
        stored_tokens=stats.stored_tokens,
        horizon=stats.horizon,
    )


def add_tier(out: Families, stats: TierStats) -> None:
    """The tier's metrics."""
    tier = {"tier": stats.tier}
    read, written = tier | {"direction": "read"}, tier | {"direction": "written"}
    out.counters(
        Metric.WORKER_KV_TIER_TOKENS_TOTAL,
        "Tokens whose blocks came back from a tier for a request, and of those that were written to it.",
        [(read, stats.tokens_read), (written, stats.tokens_written)],
    )
    out.counters(
        Metric.WORKER_KV_TIER_BYTES_TOTAL,
        "Bytes read from a tier and found intact, and bytes written to it.",
        [(read, stats.bytes_read), (written, stats.bytes_written)],
    )
    out.counters(
        Metric.WORKER_KV_TIER_SECONDS_TOTAL,
        "What that took, checking and copying included, of all threads together.",
        [(read, stats.seconds_reading), (written, stats.seconds_writing)],
    )
    out.counters(
        Metric.WORKER_KV_TIER_EVICTIONS_TOTAL, "Blocks that a tier gave up for others.", [(tier, stats.evictions)]
    )
    out.counters(
        Metric.WORKER_KV_LOADS_CUT_TOTAL,
        "Loads that were late: what had not come by then was computed.",
        [(tier, stats.loads_cut)],
    )
    out.gauges(Metric.WORKER_KV_TIER_STORED_TOKENS, "Tokens whose blocks a tier holds.", [(tier, stats.stored_tokens)])
    out.gauges(
        Metric.WORKER_KV_TIER_READY,
        "1 while a tier is in use, 0 while it is switched off; telemetry says why.",
        [(tier, int(stats.reason is None))],
    )
