"""The engine's figures at one moment."""

from __future__ import annotations

from tandem_worker.control.scheduler import Scheduler
from tandem_worker.engine.base import EngineStats
from tandem_worker.engine.runner import StepRunner


def build_stats(scheduler: Scheduler, runner: StepRunner, *, num_pending: int) -> EngineStats:
    """`num_pending`: commands not yet seen by the engine thread; nearly all of them are requests."""
    blocks, totals, meter = scheduler.blocks, runner.totals, runner.meter
    return EngineStats(
        running_requests=len(scheduler.running) + len(scheduler.receiving),
        queued_requests=scheduler.num_waiting + num_pending,
        running_tokens=scheduler.running_tokens,
        queued_prefill_tokens=scheduler.queued_prefill_tokens,
        kv_blocks_used=blocks.num_held,
        kv_blocks_cached=blocks.cache.num_idle,
        kv_blocks_total=blocks.num_blocks,
        kv_eviction_horizon=blocks.cache.horizon,
        prefill_tokens_per_second=meter.prefill_tokens_per_second,
        decode_step_seconds=meter.decode_step_seconds,
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        generated_tokens_total=totals.generated_tokens,
        preemptions_recompute_total=scheduler.num_recomputed,
        preemptions_move_total=scheduler.num_moved,
        steps_total=totals.steps,
        prefills_local_total=totals.prefills_local,
        prefills_remote_total=totals.prefills_remote,
        prefills_fallback_total=totals.prefills_fallback,
    )
