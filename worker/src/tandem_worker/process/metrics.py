"""`/metrics`: the figures of `/telemetry` and more, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tandem_api.telemetry import Metric

from tandem_worker.engine.contract import EngineStats
from tandem_worker.host.nvml import GpuSample
from tandem_worker.process.families import Families
from tandem_worker.process.telemetry import WorkerFacts, WorkerSample
from tandem_worker.server.answer.request_metrics import RequestMetrics
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.transfer.contract import TransferStats

if TYPE_CHECKING:
    from tandem_worker.host.files.exchange import FileSample
    from tandem_worker.model.weighing import Matrices
    from tandem_worker.tiers.stats import TierStats


def build_metrics_text(
    facts: WorkerFacts,
    sample: WorkerSample,
    requests: RequestMetrics,
    memory_bytes: Mapping[str, int],
    matrices: Mapping[str, Matrices],
    start_seconds: Mapping[str, float],
    preparation: PreparationCounts,
) -> str:
    """Prometheus text. What cannot be measured is left out."""
    out = Families({"model": facts.model_name, "role": facts.role.value})
    _add_requests(out, requests)
    _add_preparation(out, preparation)
    _add_engine(out, sample.engine)
    _add_transfer(out, sample.transfer)
    _add_tiers(out, sample.tiers)
    _add_damage(out, sample)
    _add_gpu(out, sample.gpu)
    _add_grammars(out, sample)
    out.counters(
        Metric.WORKER_REFUSED_CONNECTIONS_TOTAL,
        "Connections, and requests at the inference port, that were turned away before anything was done for them.",
        [
            ({"port": port, "reason": reason}, count)
            for port, reasons in sorted(_refusals(sample).items())
            for reason, count in sorted(reasons.items())
        ],
    )
    if sample.spans:
        out.counters(
            Metric.WORKER_TRACE_SPANS_TOTAL,
            "Spans of traced requests, by what became of them.",
            [({"outcome": outcome}, count) for outcome, count in sorted(sample.spans.items())],
        )
    _add_files(out, sample.files)
    out.gauges(
        Metric.WORKER_MEMORY_BYTES,
        "Memory by what it holds; `arena` is what activations take at their most, `kv` what is reserved for blocks and "
        "`kv_resident` what those that were used take of it.",
        [({"kind": kind}, size) for kind, size in memory_bytes.items()],
    )
    _add_matrices(out, matrices)
    out.gauges(
        Metric.WORKER_START_SECONDS,
        "What each step of this process's start took; `total` from exec until it was ready. Steps run at once.",
        [({"step": step}, round(seconds, 3)) for step, seconds in start_seconds.items()],
    )
    out.gauge(
        Metric.WORKER_GRAPHS_PENDING,
        "Batch sizes of decode steps that are still to be recorded, between steps; until then they run unrecorded.",
        sample.graphs_pending,
    )
    out.gauge(Metric.WORKER_DRAINING, "1 while the worker takes no new requests.", int(sample.draining))
    return out.text()


def _add_matrices(out: Families, matrices: Mapping[str, Matrices]) -> None:
    out.gauges(
        Metric.WORKER_WEIGHTS,
        "Matrices of this process's share of the model, by the form that they are kept in.",
        [({"form": form}, kept.count) for form, kept in sorted(matrices.items())],
    )
    out.gauges(
        Metric.WORKER_WEIGHTS_BYTES,
        "What they take of memory.",
        [({"form": form}, kept.num_bytes) for form, kept in sorted(matrices.items())],
    )


def _refusals(sample: WorkerSample) -> dict[str, Mapping[str, int]]:
    kv = {} if sample.transfer is None else {"kv": sample.transfer.refusals}
    return {**sample.refusals, **kv}


def _add_requests(out: Families, requests: RequestMetrics) -> None:
    statuses = sorted(requests.by_status().items())
    out.counters(
        Metric.WORKER_REQUESTS_TOTAL,
        "Finished HTTP requests by status; 499 when the client went away.",
        [({"status": str(status)}, count) for status, count in statuses],
    )
    out.histogram(requests.ttft)
    out.histogram(requests.tpot)


def _add_preparation(out: Families, counts: PreparationCounts) -> None:
    out.gauge(
        Metric.WORKER_LARGE_REQUESTS,
        "Large requests that are being parsed and tokenized in a process of their own, or wait for that.",
        counts.isolated,
    )
    out.counter(Metric.WORKER_LARGE_REQUESTS_TOTAL, "Large requests that were prepared so.", counts.isolated_total)
    out.counter(
        Metric.WORKER_LARGE_REQUESTS_REFUSED_TOTAL,
        "Large requests refused because too many were there, or because one took too much.",
        counts.refused_total,
    )


def _add_engine(out: Families, engine: EngineStats) -> None:
    out.gauge(Metric.WORKER_REQUESTS_RUNNING, "Requests in the running batch.", engine.running_requests)
    out.gauge(Metric.WORKER_REQUESTS_QUEUED, "Requests that wait for room.", engine.queued_requests)
    out.counter(Metric.WORKER_PROMPT_TOKENS_TOTAL, "Prompt tokens taken in.", engine.prompt_tokens_total)
    out.counter(
        Metric.WORKER_CACHED_TOKENS_TOTAL, "Prompt tokens found in the prefix cache.", engine.cached_tokens_total
    )
    out.counter(
        Metric.WORKER_COMPUTED_TOKENS_TOTAL,
        "Prompt tokens computed here, those of other workers' requests and those computed again included.",
        engine.computed_prompt_tokens_total,
    )
    out.counter(Metric.WORKER_BUSY_SECONDS_TOTAL, "Time in which the engine computed.", engine.busy_seconds_total)
    out.counter(
        Metric.WORKER_PREFILL_SECONDS_TOTAL,
        "Of that, what prompts took; of a step that also decodes, their share of its tokens.",
        engine.prefill_seconds_total,
    )
    out.gauge(
        Metric.WORKER_PREFILL_TOKENS_PER_SECOND,
        "Prompt tokens computed per second of computing prompts, over the last minute of that.",
        engine.prefill_tokens_per_second,
    )
    out.counter(Metric.WORKER_GENERATED_TOKENS_TOTAL, "Tokens generated.", engine.generated_tokens_total)
    out.gauge(Metric.WORKER_KV_BLOCKS_USED, "KV blocks held by live requests.", engine.kv_blocks_used)
    out.gauge(Metric.WORKER_KV_BLOCKS_CACHED, "KV blocks held by the prefix cache alone.", engine.kv_blocks_cached)
    out.gauge(Metric.WORKER_KV_BLOCKS_TOTAL, "KV blocks there are.", engine.kv_blocks_total)
    out.gauge(Metric.WORKER_KV_BLOCK_SIZE_TOKENS, "Tokens that fit into a KV block.", engine.kv_block_size)
    out.counters(
        Metric.WORKER_PREFILL_LOCAL_TOTAL,
        "Prompts prefilled here, by a prefill worker, or here because that failed.",
        [
            ({"where": "local"}, engine.prefills_local_total),
            ({"where": "remote"}, engine.prefills_remote_total),
            ({"where": "fallback"}, engine.prefills_fallback_total),
        ],
    )
    out.counter(
        Metric.WORKER_PREEMPTIONS_TOTAL,
        "Requests set back to make room.",
        engine.preemptions_total,
    )
    out.gauge(Metric.WORKER_STEP_SECONDS, "Smoothed duration of a decode step.", engine.decode_step_seconds)
    _add_guesses(out, engine)


def _add_guesses(out: Families, engine: EngineStats) -> None:
    """Nothing where nobody guesses."""
    if engine.guess_seconds_total is None:
        return
    out.gauge(
        Metric.WORKER_TOKENS_PER_STEP, "Smoothed tokens of one answer in a decode step.", engine.decode_tokens_per_step
    )
    out.counter(Metric.WORKER_GUESS_SECONDS_TOTAL, "Time of computing that guessing took.", engine.guess_seconds_total)
    for name, text, counts in (
        (Metric.WORKER_DRAFT_TOKENS_TOTAL, "Guesses that were checked.", engine.draft_tokens_total),
        (
            Metric.WORKER_ACCEPTED_DRAFT_TOKENS_TOTAL,
            "Of those, the ones that were right and saved a step.",
            engine.accepted_draft_tokens_total,
        ),
    ):
        out.counters(name, text, [({"source": source}, count) for source, count in counts.items()])


def _add_transfer(out: Families, transfer: TransferStats | None) -> None:
    if transfer is None:
        return
    out.counters(
        Metric.WORKER_KV_TRANSFER_BYTES_TOTAL,
        "KV bytes moved between workers.",
        [({"direction": "sent"}, transfer.bytes_sent), ({"direction": "received"}, transfer.bytes_received)],
    )
    out.counter(
        Metric.WORKER_KV_TRANSFER_SECONDS_TOTAL,
        "Time in which KV blocks were arriving, from however many workers.",
        transfer.seconds_receiving,
    )
    out.counters(
        Metric.WORKER_KV_TRANSPORT_BYTES_TOTAL,
        "KV bytes that each transport has moved.",
        [({"transport": name}, moved.num_bytes) for name, moved in transfer.transports.items()],
    )
    out.gauges(
        Metric.WORKER_KV_TRANSPORT_BYTES_PER_SECOND,
        "Bandwidth of each transport while it moved KV, of the last transfers.",
        [({"transport": name}, moved.bytes_per_second) for name, moved in transfer.transports.items()],
    )
    out.gauge(
        Metric.WORKER_KV_TRANSPORT_FALLBACK,
        "1 while the transport that spec.kv.transport asks for cannot be had.",
        float(transfer.fallback is not None),
    )
    out.gauge(
        Metric.WORKER_KV_SLOTS_HELD,
        "Landings for Mooncake that nobody uses, because a write may still come.",
        transfer.held_slots,
    )
    out.counter(
        Metric.WORKER_KV_TRANSFER_FAILURES_TOTAL,
        "KV transfers that were given up, whatever the reason.",
        transfer.failures,
    )
    out.counters(
        Metric.WORKER_KV_QUOTA_REFUSALS_TOTAL,
        "What peers with a key were refused, because they wanted more than a peer may.",
        [({"quota": quota}, count) for quota, count in transfer.quota_refusals.items()],
    )


def _add_tiers(out: Families, tiers: Sequence[TierStats]) -> None:
    if tiers:
        from tandem_worker.process.tiers import add_tiers

        add_tiers(out, tiers)


def _add_damage(out: Families, sample: WorkerSample) -> None:
    counts = {} if sample.transfer is None else dict(sample.transfer.integrity_failures)
    if sample.tiers:
        counts["tier"] = sum(tier.integrity_failures for tier in sample.tiers)
    out.counters(
        Metric.WORKER_KV_INTEGRITY_FAILURES_TOTAL,
        "What arrived over the KV transport, or from a tier, and was not used, because it was damaged or not what was "
        "ordered.",
        [({"kind": kind}, count) for kind, count in counts.items()],
    )


def _add_grammars(out: Families, sample: WorkerSample) -> None:
    counts = sample.grammars
    out.counters(
        Metric.WORKER_GRAMMARS_TOTAL,
        "Grammars of structured output: compiled, refused, not to be had now, or known from before.",
        [
            ({"result": "compiled"}, counts.compiled),
            ({"result": "refused"}, counts.refused),
            ({"result": "unavailable"}, counts.unavailable),
            ({"result": "cached"}, counts.cached),
        ],
    )
    out.counter(Metric.WORKER_GRAMMAR_SECONDS_TOTAL, "Time that requests waited for grammars.", counts.seconds)
    out.counter(
        Metric.WORKER_GRAMMAR_RESTARTS_TOTAL,
        "Times that the process which compiles grammars first had to be started again.",
        sample.grammar_restarts,
    )


def _add_files(out: Families, files: FileSample | None) -> None:
    if files is None:
        return
    out.counters(
        Metric.WORKER_MODEL_BYTES_TOTAL,
        "Bytes of the model that this process got, by where they came from.",
        [({"source": source}, count) for source, count in files.received.items()],
    )
    out.counter(
        Metric.WORKER_MODEL_SENT_BYTES_TOTAL, "Bytes of the model that other workers got from here.", files.bytes_sent
    )
    out.gauge(
        Metric.WORKER_MODEL_SEND_LIMIT_BYTES_PER_SECOND,
        "How fast the model's files are sent at most: less while streams run.",
        files.limit,
    )
    out.counters(
        Metric.WORKER_MODEL_SOURCE_FAULTS_TOTAL,
        "Workers that were left as sources, because their bytes were wrong, or they were slow or lost.",
        [({"kind": kind}, count) for kind, count in files.faults.items()],
    )


def _add_gpu(out: Families, gpu: GpuSample) -> None:
    out.gauge(Metric.WORKER_VRAM_USED_BYTES, "VRAM in use on this worker's GPU.", gpu.vram_used_bytes)
    out.gauge(Metric.WORKER_VRAM_TOTAL_BYTES, "VRAM of this worker's GPU.", gpu.vram_total_bytes)
    out.counter(Metric.WORKER_NVLINK_TX_BYTES_TOTAL, "Bytes sent over NVLink.", gpu.nvlink_tx_bytes_total)
    out.counter(Metric.WORKER_NVLINK_RX_BYTES_TOTAL, "Bytes received over NVLink.", gpu.nvlink_rx_bytes_total)
