"""The engine's figures at one moment."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.engine.contract import EngineStats
from tandem_worker.engine.runner import StepRunner


def build_stats(lanes: Sequence[StepRunner], *, num_pending: int) -> EngineStats:
    """Over all lanes. `num_pending`: commands not yet seen by the engine thread; nearly all of them are requests."""
    schedulers = [lane.scheduler for lane in lanes]
    blocks = [scheduler.blocks for scheduler in schedulers]
    totals, meters = [lane.totals for lane in lanes], [lane.meter for lane in lanes]
    speeds = [meter.prefill_tokens_per_second for meter in meters if meter.prefill_tokens_per_second is not None]
    steps = [meter.decode_step_seconds for meter in meters if meter.decode_step_seconds is not None]
    return EngineStats(
        running_requests=sum(len(scheduler.running) + len(scheduler.receiving) for scheduler in schedulers),
        queued_requests=sum(scheduler.num_waiting for scheduler in schedulers) + num_pending,
        running_tokens=sum(scheduler.running_tokens for scheduler in schedulers),
        queued_prefill_tokens=sum(scheduler.queued_prefill_tokens for scheduler in schedulers),
        kv_blocks_used=sum(space.num_held for space in blocks),
        kv_blocks_cached=sum(space.cache.num_idle for space in blocks),
        kv_blocks_total=sum(space.num_blocks for space in blocks),
        kv_eviction_horizon=max(space.cache.horizon for space in blocks),
        prefill_tokens_per_second=sum(speeds) if speeds else None,
        decode_step_seconds=max(steps, default=None),
        prompt_tokens_total=sum(total.prompt_tokens for total in totals),
        cached_tokens_total=sum(total.cached_tokens for total in totals),
        generated_tokens_total=sum(total.generated_tokens for total in totals),
        preemptions_recompute_total=sum(scheduler.num_recomputed for scheduler in schedulers),
        preemptions_move_total=sum(scheduler.num_moved for scheduler in schedulers),
        steps_total=max(total.steps for total in totals),
        prefills_local_total=sum(total.prefills_local for total in totals),
        prefills_remote_total=sum(total.prefills_remote for total in totals),
        prefills_fallback_total=sum(total.prefills_fallback for total in totals),
    )
