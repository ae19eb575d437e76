"""The engine's figures at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from tandem_worker.engine.contract import EngineStats, HostStats
from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.speculator import Speculator
from tandem_worker.engine.runner import StepRunner
from tandem_worker.engine.schedule.meter import SpeedMeter, WorkMeter

_FIELDS = tuple(field.name for field in fields(EngineStats))
_HOST_FIELDS = tuple(field.name for field in fields(HostStats))
_LARGEST = frozenset(
    {
        "kv_eviction_horizon", "kv_blocks_touched", "decode_step_seconds", "mixed_step_seconds", "steps_total",
        "decode_tokens_per_step", "decode_token_seconds", "plain_step_seconds", "mixed_token_seconds",
    }
)  # fmt: skip
"""The largest figure of several lanes counts, not the sum."""
_SHARED = frozenset(
    {
        "kv_block_size", "prefill_tokens_per_second", "busy_seconds_total", "prefill_seconds_total",
        "computed_prompt_tokens_total",
    }
)  # fmt: skip
"""Every lane has the same figure, or nearly: lanes step together."""


def build_stats(lanes: Sequence[StepRunner], work: WorkMeter, *, num_pending: int) -> EngineStats:
    """Over all lanes, which share `work`. `num_pending`: commands that the engine thread has not seen yet, nearly all
    of them requests."""
    stats = _describe(lanes[0], work, num_pending)
    for lane in lanes[1:]:
        stats = _join(stats, _describe(lane, work, 0))
    return stats


def _describe(lane: StepRunner, work: WorkMeter, num_pending: int) -> EngineStats:
    scheduler, totals, meter = lane.scheduler, lane.totals, lane.meter
    blocks = scheduler.blocks
    return EngineStats(
        running_requests=len(scheduler.queues.running) + len(scheduler.queues.receiving),
        queued_requests=scheduler.queues.num_queued + num_pending,
        running_tokens=scheduler.queues.running_tokens,
        queued_prefill_tokens=scheduler.queues.queued_prefill_tokens,
        kv_blocks_used=blocks.num_held,
        kv_blocks_cached=blocks.cache.num_idle,
        kv_blocks_total=blocks.num_blocks,
        kv_blocks_touched=blocks.num_touched,
        kv_block_size=blocks.block_size,
        kv_eviction_horizon=blocks.cache.horizon,
        prefill_tokens_per_second=work.velocity,
        decode_step_seconds=meter.decode_step_seconds,
        mixed_step_seconds=meter.mixed_step_seconds,
        busy_seconds_total=work.busy_seconds,
        prefill_seconds_total=work.prefill_seconds,
        computed_prompt_tokens_total=work.prefill_tokens,
        prompt_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        generated_tokens_total=totals.generated_tokens,
        preemptions_total=scheduler.planner.num_preempted,
        steps_total=totals.steps,
        prefills_local_total=totals.prefills_local,
        prefills_remote_total=totals.prefills_remote,
        prefills_fallback_total=totals.prefills_fallback,
        decode_tokens_per_step=meter.decode_tokens_per_step,
        host=_describe_host(lane),
        **_describe_guesses(lane.speculator, meter),
    )


def _describe_guesses(speculator: Speculator | None, meter: SpeedMeter) -> dict[str, Any]:
    if speculator is None:
        return {}
    return {
        "draft_tokens_total": {source.value: speculator.drafted[source] for source in Source},
        "accepted_draft_tokens_total": {source.value: speculator.accepted[source] for source in Source},
        "guess_seconds_total": speculator.seconds,
        "guess_bytes": speculator.num_bytes,
        "decode_token_seconds": meter.decode_token.seconds,
        "plain_step_seconds": meter.plain_step_seconds,
        "mixed_token_seconds": meter.mixed_token.seconds,
    }


def _describe_host(lane: StepRunner) -> HostStats | None:
    host = lane.scheduler.host
    if host is None:
        return None
    counts, (seconds_out, seconds_in) = host.counts, lane.executor.host_seconds
    return HostStats(
        blocks_total=host.blocks.num_blocks,
        blocks_stored=len(host.blocks.cache),
        horizon=host.blocks.cache.horizon,
        blocks_out_total=counts.blocks_out,
        blocks_in_total=counts.blocks_in,
        seconds_out_total=seconds_out,
        seconds_in_total=seconds_in,
        evictions_total=counts.evictions,
        bytes_per_block=lane.executor.kv_cache.spec.bytes_per_block,
    )


def _join_hosts(one: HostStats, other: HostStats) -> HostStats:
    summed = {name: getattr(one, name) + getattr(other, name) for name in _HOST_FIELDS}
    same = ("bytes_per_block", "seconds_out_total", "seconds_in_total")
    kept = {name: getattr(one, name) for name in same}
    joined: dict[str, Any] = {**summed, **kept, "horizon": max(one.horizon, other.horizon)}
    return HostStats(**joined)


def _join(one: EngineStats, other: EngineStats) -> EngineStats:
    return EngineStats(**{name: _join_figure(name, getattr(one, name), getattr(other, name)) for name in _FIELDS})


def _join_figure(name: str, one: Any, other: Any) -> Any:
    if name in _SHARED:
        return one
    if one is None or other is None:
        return one if other is None else other
    if isinstance(one, HostStats):
        return _join_hosts(one, other)
    if isinstance(one, dict):
        return {key: one[key] + other[key] for key in one}
    return max(one, other) if name in _LARGEST else one + other
