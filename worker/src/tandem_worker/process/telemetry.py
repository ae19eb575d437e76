"""What is measured of a worker at one moment, and `/telemetry`, which tells it to gateways and the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_api.names import Role
from tandem_api.telemetry import KVTransportTelemetry, RankTelemetry, WorkerTelemetry

from tandem_worker.engine.contract import EngineStats
from tandem_worker.host.nvml import NO_GPU, GpuSample
from tandem_worker.process.progress import StartFigure
from tandem_worker.server.structured.contract import CompileCounts
from tandem_worker.transfer.contract import TransferStats

if TYPE_CHECKING:
    from tandem_api.telemetry import TierTelemetry, WeightsTelemetry

    from tandem_worker.host.files.exchange import FileSample
    from tandem_worker.tiers.stats import TierStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What does not change while the process lives."""

    model_name: str
    role: Role
    revision: str
    pod: str
    weights: WeightsTelemetry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSample:
    """Everything that is measured, at one moment."""

    at: float
    """Unix seconds."""
    draining: bool
    engine: EngineStats
    gpu: GpuSample
    transfer: TransferStats | None
    """None where the role has no transport."""
    others: Mapping[int, GpuSample] = field(default_factory=dict[int, GpuSample])
    """What the GPUs of the group's other ranks told last."""
    grammars: CompileCounts
    grammar_restarts: int
    """Times that the process which compiles grammars first was started again."""
    refusals: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """What each port did not let through, by the port's name and the reason."""
    spans: Mapping[str, int] = field(default_factory=dict[str, int])
    """Spans of traced requests, by what became of them; none where requests are not traced."""
    graphs_pending: int = 0
    """Batch sizes of decode steps that are still to be recorded."""
    files: FileSample | None = None
    """None where the model's files are not exchanged with other workers."""
    start: StartFigure | None = None
    """None where it is not known."""
    prompts: Sequence[str] = ()
    """Names of the prompts begun lately."""
    tiers: Sequence[TierStats] = ()
    """Empty where blocks are kept in memory alone."""


def build_telemetry(facts: WorkerFacts, sample: WorkerSample) -> WorkerTelemetry:
    """What gateway and operator weigh a worker by."""
    engine, gpu, transfer = sample.engine, sample.gpu, sample.transfer
    return WorkerTelemetry(
        model_name=facts.model_name,
        role=facts.role,
        revision=facts.revision,
        pod=facts.pod,
        draining=sample.draining,
        running_requests=engine.running_requests,
        queued_requests=engine.queued_requests,
        running_tokens=engine.running_tokens,
        queued_prefill_tokens=engine.queued_prefill_tokens,
        kv_blocks_used=engine.kv_blocks_used,
        kv_blocks_cached=engine.kv_blocks_cached,
        kv_blocks_total=engine.kv_blocks_total,
        kv_block_size=engine.kv_block_size,
        kv_eviction_horizon=engine.kv_eviction_horizon,
        at=sample.at,
        prefill_tokens_per_second=engine.prefill_tokens_per_second,
        busy_seconds_total=engine.busy_seconds_total,
        prefill_seconds_total=engine.prefill_seconds_total,
        computed_prompt_tokens_total=engine.computed_prompt_tokens_total,
        prompt_tokens_total=engine.prompt_tokens_total,
        cached_prompt_tokens_total=engine.cached_tokens_total,
        decode_step_seconds=engine.decode_step_seconds if engine.running_requests else None,
        decode_tokens_per_step=engine.decode_tokens_per_step if engine.running_requests else None,
        decode_token_seconds=engine.decode_token_seconds if engine.running_requests else None,
        plain_step_seconds=engine.plain_step_seconds if engine.running_requests else None,
        mixed_step_seconds=engine.mixed_step_seconds if engine.running_requests else None,
        mixed_token_seconds=engine.mixed_token_seconds if engine.running_requests else None,
        keeps_step_seconds=True,
        start_seconds=None if sample.start is None else sample.start.seconds,
        start_from=None if sample.start is None else sample.start.origin,
        weights=facts.weights,
        kv_tiers=_describe_tiers(sample.tiers),
        vram_used_bytes=gpu.vram_used_bytes,
        vram_total_bytes=gpu.vram_total_bytes,
        nvlink_tx_bytes_per_second=gpu.nvlink_tx_bytes_per_second,
        nvlink_rx_bytes_per_second=gpu.nvlink_rx_bytes_per_second,
        prompts=list(sample.prompts),
        ranks=[
            RankTelemetry(
                rank=rank, **{name: getattr(one, name) for name in RankTelemetry.model_fields if name != "rank"}
            )
            for rank, one in sorted({**sample.others, 0: gpu}.items())
            if one != NO_GPU
        ],
        kv_transfer_bytes_per_second=None if transfer is None else transfer.bytes_per_second,
        kv_transfer_bytes_total=None if transfer is None else transfer.bytes_sent + transfer.bytes_received,
        kv_transfer_seconds_total=None if transfer is None else transfer.seconds_receiving,
        kv_transport=None if transfer is None else describe_transport(transfer),
    )


def describe_transport(transfer: TransferStats) -> KVTransportTelemetry:
    """What moves blocks, as gateways and the operator are told."""
    moved = None if transfer.transport is None else transfer.transports.get(transfer.transport)
    return KVTransportTelemetry(
        wanted=transfer.wanted,
        transport=transfer.transport,
        protocol=transfer.protocol,
        bytes_per_second=None if moved is None else moved.bytes_per_second,
        fallback=(transfer.fallback or "")[:1000],
    )


def _describe_tiers(tiers: Sequence[TierStats]) -> list[TierTelemetry]:
    if not tiers:
        return []
    from tandem_worker.process.tiers import describe_tier

    return [describe_tier(tier) for tier in tiers]
