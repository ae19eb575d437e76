from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Histogram
from prometheus_client.parser import text_string_to_metric_families
from tandem_api.names import Role
from tandem_api.telemetry import Metric, WeightsTelemetry
from tandem_worker.engine.contract import EngineStats
from tandem_worker.host.files.exchange import FileSample
from tandem_worker.host.nvml import NO_GPU, GpuSample
from tandem_worker.model.weighing import Matrices
from tandem_worker.process.families import Families
from tandem_worker.process.metrics import build_metrics_text
from tandem_worker.process.progress import StartFigure
from tandem_worker.process.telemetry import WorkerFacts, WorkerSample, build_telemetry
from tandem_worker.server.answer.request_metrics import RequestMetrics
from tandem_worker.server.prepare.counts import PreparationCounts
from tandem_worker.server.structured.contract import CompileCounts
from tandem_worker.tiers.stats import TierStats
from tandem_worker.transfer.contract import BandwidthMeter, CoveredTime, TransferStats, TransportStats

FACTS = WorkerFacts(model_name="smollm2", role=Role.DECODE, revision="r1", pod="smollm2-decode-0")
ENGINE = EngineStats(
    running_requests=1, queued_requests=2, running_tokens=3, queued_prefill_tokens=4, kv_blocks_used=5,
    kv_blocks_cached=6, kv_blocks_total=7, kv_blocks_touched=7, kv_block_size=16, kv_eviction_horizon=8.5,
    prefill_tokens_per_second=36.5,
    decode_step_seconds=0.01, mixed_step_seconds=0.02, prompt_tokens_total=10, cached_tokens_total=11,
    generated_tokens_total=12,
    preemptions_total=13, steps_total=14, prefills_local_total=15,
    prefills_remote_total=16, prefills_fallback_total=17, busy_seconds_total=37.5, prefill_seconds_total=38.5,
    computed_prompt_tokens_total=39, decode_tokens_per_step=1.5, guess_seconds_total=46.5,
    guess_bytes=51, decode_token_seconds=0.004, plain_step_seconds=0.008, mixed_token_seconds=0.016,
    draft_tokens_total={"text": 47, "history": 48}, accepted_draft_tokens_total={"text": 49, "history": 50},
)  # fmt: skip
GPU = GpuSample(
    vram_used_bytes=20, vram_total_bytes=21, nvlink_tx_bytes_total=22, nvlink_rx_bytes_total=23,
    nvlink_tx_bytes_per_second=24.0, nvlink_rx_bytes_per_second=25.0,
)  # fmt: skip
GRAMMARS = CompileCounts(compiled=30, refused=31, unavailable=32, cached=33, seconds=34.0)
SAMPLE_LINE = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? (\+Inf|-?[0-9.e+-]+)')


def sample(
    gpu: GpuSample = GPU,
    transfer: TransferStats | None = None,
    spans: dict[str, int] | None = None,
    tiers: tuple[TierStats, ...] = (),
) -> WorkerSample:
    return WorkerSample(
        at=40.5, draining=True, start=StartFigure(seconds=2.5, origin="prepared"),
        engine=ENGINE, gpu=gpu, transfer=transfer, grammars=GRAMMARS, grammar_restarts=35,
        spans=spans or {}, tiers=tiers,
        files=FileSample(received={"peer": 41, "hub": 42}, faults={"wrong": 43}, bytes_sent=44, limit=45.5),
    )  # fmt: skip


def text(**changes: object) -> str:
    requests = RequestMetrics()
    requests.record(status=200, seconds=1.0, first_token_seconds=0.2, num_generated=5, streamed=True)
    memory, matrices = {"weights": 1 << 30}, {"lossless": Matrices(211, 202 << 20)}
    return build_metrics_text(
        FACTS, sample(**changes), requests, memory, matrices, {"total": 2.0004}, PreparationCounts(2, 5, 1)  # type: ignore[arg-type]
    )  # fmt: skip


def total_of(histogram: Histogram) -> float:
    (family,) = histogram.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_sum"))


def test_every_worker_metric_is_there_once() -> None:
    stats = TransferStats(
        integrity_failures={"header": 0}, refusals={"gone": 0}, quota_refusals={"orders": 0}, seconds_receiving=0.0,
        transports={"TCP": TransportStats(num_bytes=0, bytes_per_second=1.0)},
    )  # fmt: skip
    lines = text(transfer=stats, spans={"exported": 3}, tiers=(TierStats(),)).splitlines()
    for attribute, name in vars(Metric).items():
        if attribute.startswith("WORKER_"):
            assert sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1, name


def test_spans_are_told_of_once_there_are_any() -> None:
    name = Metric.WORKER_TRACE_SPANS_TOTAL
    labels = 'model="smollm2",outcome="queue_full",role="decode"'
    assert f"{name}{{{labels}}} 2.0" in text(spans={"exported": 3, "queue_full": 2}).splitlines()
    assert name not in text()


def test_every_line_is_prometheus_text() -> None:
    stats = TransferStats(integrity_failures={"header": 3}, refusals={"wrong_proof": 2}, quota_refusals={"orders": 1})
    lines = text(transfer=stats).splitlines()
    for line in lines:
        assert line.startswith("# ") or SAMPLE_LINE.fullmatch(line), line
    for sample_of in (
        'kv_integrity_failures_total{kind="header",model="smollm2",role="decode"} 3.0',
        'refused_connections_total{model="smollm2",port="kv",reason="wrong_proof",role="decode"} 2.0',
        'kv_quota_refusals_total{model="smollm2",quota="orders",role="decode"} 1.0',
    ):
        assert f"tandem_worker_{sample_of}" in lines


def read_families(text: str) -> set[tuple[object, ...]]:
    """Every sample with its family, its bucket's bound as a number: `1` and `1.0` are the same to Prometheus."""
    return {
        (
            family.type,
            family.documentation,
            sample.name,
            float(sample.value),
            frozenset((name, float(label) if name == "le" else label) for name, label in sample.labels.items()),
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_labels_and_help_are_what_dashboards_know() -> None:
    stats = TransferStats(
        integrity_failures={"header": 3},
        refusals={"wrong_proof": 2},
        quota_refusals={"orders": 1},
        seconds_receiving=40.5,
        transports={"Mooncake": TransportStats(num_bytes=51, bytes_per_second=52.5)},
        fallback="it is not there",
        held_slots=2,
    )
    known = Path(__file__).with_name("metrics.txt").read_text()
    tier = TierStats(tokens_read=46, bytes_written=47, seconds_reading=48.5, evictions=49, loads_cut=50)
    assert read_families(text(transfer=stats, tiers=(tier,))) == read_families(known)


def test_what_cannot_be_measured_is_absent() -> None:
    exposition = text(gpu=NO_GPU)
    assert "vram" not in exposition
    assert "nvlink" not in exposition
    assert "transfer" not in exposition


def test_many_workers_of_whom_nothing_comes_are_no_more_than_a_message_holds() -> None:
    stats = TierStats(tier="peer", reason="PeersFailing", failing=tuple(f"10.0.0.{each}:8001" for each in range(200)))
    (tier,) = build_telemetry(FACTS, sample(tiers=(stats,))).kv_tiers
    assert tier.failing == list(stats.failing[:64])


def test_a_tier_tells_what_it_does_and_why_it_does_not() -> None:
    stats = TierStats(
        reason="VolumeFull", message="it is full", capacity_tokens=160, stored_tokens=32, horizon=4.5, tokens_read=16,
        bytes_written=7, seconds_reading=0.5, evictions=3, integrity_failures=2, loads_cut=1,
    )  # fmt: skip
    exposition = text(tiers=(stats,))
    labels = 'model="smollm2",role="decode"'
    for line in (
        f'kv_tier_tokens_total{{direction="read",{labels},tier="disk"}} 16.0',
        f'kv_tier_bytes_total{{direction="written",{labels},tier="disk"}} 7.0',
        f'kv_tier_seconds_total{{direction="read",{labels},tier="disk"}} 0.5',
        f'kv_tier_evictions_total{{{labels},tier="disk"}} 3.0',
        f'kv_integrity_failures_total{{kind="tier",{labels}}} 2.0',
        f'kv_loads_cut_total{{{labels},tier="disk"}} 1.0',
        f'kv_tier_ready{{{labels},tier="disk"}} 0.0',
    ):
        assert f"tandem_worker_{line}" in exposition
    (tier,) = build_telemetry(FACTS, sample(tiers=(stats,))).kv_tiers
    assert (tier.reason, tier.message, tier.capacity_tokens, tier.stored_tokens, tier.horizon) == (
        "VolumeFull", "it is full", 160, 32, 4.5,
    )  # fmt: skip
    assert build_telemetry(FACTS, sample()).kv_tiers == []


def test_where_nobody_guesses_nothing_is_said_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "draft_tokens" in text()
    monkeypatch.setitem(globals(), "ENGINE", replace(ENGINE, guess_seconds_total=None))
    for name in ("draft_tokens", "guess_seconds", "tokens_per_step"):
        assert name not in text()


def test_telemetry_has_the_same_figures() -> None:
    telemetry = build_telemetry(FACTS, sample(transfer=TransferStats(bytes_per_second=3e9)))
    assert (telemetry.model_name, telemetry.role, telemetry.pod) == ("smollm2", Role.DECODE, "smollm2-decode-0")
    assert (telemetry.kv_blocks_used, telemetry.kv_eviction_horizon, telemetry.draining) == (5, 8.5, True)
    assert (telemetry.vram_used_bytes, telemetry.nvlink_rx_bytes_per_second) == (20, 25.0)
    assert telemetry.kv_transfer_bytes_per_second == 3e9
    assert (telemetry.start_seconds, telemetry.start_from) == (2.5, "prepared")
    assert build_telemetry(FACTS, sample(gpu=NO_GPU)).vram_used_bytes is None


def test_telemetry_tells_what_a_replica_can_do() -> None:
    """In units of the planner: busy seconds, tokens computed, tokens that the blocks hold, and the link's busy time."""
    stats = TransferStats(bytes_sent=5, bytes_received=7, seconds_receiving=1.5)
    telemetry = build_telemetry(FACTS, sample(transfer=stats))
    assert (telemetry.busy_seconds_total, telemetry.prefill_seconds_total) == (37.5, 38.5)
    assert (telemetry.computed_prompt_tokens_total, telemetry.prefill_tokens_per_second) == (39, 36.5)
    assert (telemetry.prompt_tokens_total, telemetry.cached_prompt_tokens_total) == (10, 11)
    assert (telemetry.kv_block_size, telemetry.decode_step_seconds) == (16, 0.01)
    assert telemetry.mixed_step_seconds == 0.02
    assert telemetry.decode_tokens_per_step == 1.5
    assert (telemetry.decode_token_seconds, telemetry.mixed_token_seconds) == (0.004, 0.016)
    assert telemetry.plain_step_seconds == 0.008
    assert (telemetry.kv_transfer_bytes_total, telemetry.kv_transfer_seconds_total) == (12, 1.5)


def test_what_is_not_measured_is_no_zero() -> None:
    idle = replace(sample(), engine=replace(ENGINE, running_requests=0, prefill_tokens_per_second=None))
    telemetry = build_telemetry(FACTS, idle)
    assert telemetry.decode_step_seconds is telemetry.mixed_step_seconds is None, "nothing decodes"
    assert telemetry.decode_token_seconds is telemetry.mixed_token_seconds is telemetry.plain_step_seconds is None
    assert telemetry.prefill_tokens_per_second is None
    assert (telemetry.kv_transfer_bytes_total, telemetry.kv_transfer_seconds_total) == (None, None)
    sending = build_telemetry(FACTS, sample(transfer=TransferStats(bytes_sent=5)))
    assert (sending.kv_transfer_bytes_total, sending.kv_transfer_seconds_total) == (5, None)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), max_size=40))
def test_overlapping_arrivals_count_once(intervals: list[tuple[int, int]]) -> None:
    """Against counting the seconds of each one."""
    ends = sorted((end, length) for end, length in intervals)
    covered, seen = CoveredTime(), 0.0
    for end, length in ends:
        covered.add(float(end - length), float(end))
        assert covered.seconds >= seen
        seen = covered.seconds
    assert covered.seconds == len({second for end, length in ends for second in range(end - length, end)})


def test_histogram_buckets_accumulate() -> None:
    histogram = Histogram("h", "Help.", buckets=[0.1, 1.0], registry=None)
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    out = Families({"role": "decode"})
    out.histogram(histogram)
    assert out.text().splitlines() == [
        "# HELP h Help.", "# TYPE h histogram", 'h_bucket{le="0.1",role="decode"} 2.0',
        'h_bucket{le="1.0",role="decode"} 3.0', 'h_bucket{le="+Inf",role="decode"} 4.0', 'h_count{role="decode"} 4.0',
        'h_sum{role="decode"} 7.65',
    ]  # fmt: skip


def test_label_values_are_escaped() -> None:
    out = Families({"model": 'a"b\\c\nd'})
    out.gauge("g", "Help.", 1)
    assert out.text().splitlines()[-1] == 'g{model="a\\"b\\\\c\\nd"} 1.0'


def test_large_counts_keep_every_digit() -> None:
    out = Families({})
    out.counter("bytes_total", "Help.", (1 << 53) - 1)
    (family,) = text_string_to_metric_families(out.text())
    assert family.samples[0].value == (1 << 53) - 1


@pytest.mark.parametrize(("streamed", "first"), [(False, 0.9), (True, None)])
def test_only_streamed_answers_have_a_first_token_time(streamed: bool, first: float | None) -> None:
    requests = RequestMetrics()
    requests.record(status=200, seconds=1.0, first_token_seconds=first, num_generated=5, streamed=streamed)
    assert total_of(requests.ttft) == 0
    assert requests.by_status() == {200: 1}


def test_time_per_token_counts_the_tokens_after_the_first() -> None:
    requests = RequestMetrics()
    requests.record(status=200, seconds=1.0, first_token_seconds=0.2, num_generated=5, streamed=True)
    assert total_of(requests.tpot) == pytest.approx(0.2)


def test_bandwidth_follows_the_larger_transfers() -> None:
    meter = BandwidthMeter()
    assert meter.rate is None
    meter.observe(64_000_000, 0.064)
    meter.observe(0, 1.0)
    assert meter.rate == pytest.approx(1e9)
    meter.observe(64_000_000, 0.032)
    assert meter.rate == pytest.approx(1.5e9)


def test_a_sample_says_in_which_form_matrices_are_kept() -> None:
    assert build_telemetry(FACTS, sample()).weights is None
    kept = WeightsTelemetry(form="lossless", why="as engine.weights says")
    assert build_telemetry(replace(FACTS, weights=kept), sample()).weights == kept


def test_a_sample_says_what_moves_blocks() -> None:
    assert build_telemetry(FACTS, sample()).kv_transport is None
    stats = TransferStats(
        wanted="Mooncake", transport="Mooncake", protocol="tcp",
        transports={"Mooncake": TransportStats(num_bytes=9, bytes_per_second=2.5)},
    )  # fmt: skip
    told = build_telemetry(FACTS, sample(transfer=stats)).kv_transport
    assert told is not None
    assert (told.wanted, told.transport, told.protocol, told.bytes_per_second, told.fallback) == (
        "Mooncake", "Mooncake", "tcp", 2.5, "",
    )  # fmt: skip
    refused = TransferStats(wanted="Mooncake", fallback="x" * 2000)
    told = build_telemetry(FACTS, sample(transfer=refused)).kv_transport
    assert told is not None
    assert (told.transport, told.bytes_per_second, len(told.fallback)) == (None, None, 1000)
