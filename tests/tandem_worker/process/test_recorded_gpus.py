"""The same load, decided about with NVML's answers from a file: through the reader, the heartbeat between ranks, the
worker's telemetry, a gateway's report and the operator's snapshot, to the decision and what it says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.fleet import FleetReport, Traffic, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_operator.autoscale.plan.contract import Decision, RoleSpec, ScalingSpec, Target
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.planner import plan
from tandem_operator.autoscale.plan.shares import Shares
from tandem_operator.autoscale.plan.snapshots import Heard, RoleCount, Totals, add_up, take_shares, take_snapshot
from tandem_worker.engine.contract import EngineStats
from tandem_worker.group.control.link import encode_beat, parse_beat
from tandem_worker.host.nvml import NO_GPU, GpuReader, GpuSample
from tandem_worker.process.telemetry import WorkerFacts, WorkerSample, build_telemetry
from tandem_worker.server.structured.contract import CompileCounts

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "nvml.json").read_text())
SPEC = ScalingSpec(
    roles={Role.PREFILL: RoleSpec(max=64), Role.DECODE: RoleSpec(max=64)}, ttft=Target(seconds=2.0),
    tpot=Target(seconds=0.03),
)  # fmt: skip
IDLE = EngineStats(
    running_requests=0, queued_requests=0, running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0,
    kv_blocks_cached=0, kv_blocks_total=20_000, kv_blocks_touched=0, kv_block_size=16, kv_eviction_horizon=0.0,
    prefill_tokens_per_second=1e4, decode_step_seconds=0.008, mixed_step_seconds=None, prompt_tokens_total=0,
    cached_tokens_total=0, generated_tokens_total=0, preemptions_total=0,
    steps_total=0, prefills_local_total=0, prefills_remote_total=0, prefills_fallback_total=0, busy_seconds_total=0.0,
    prefill_seconds_total=0.0, computed_prompt_tokens_total=0,
)  # fmt: skip


class RecordedNvml:
    """Answers of one GPU, the next pair of link counters at every reading."""

    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 138, 139
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, NVML_FI_DEV_NVLINK_LINK_COUNT = 90, 91
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, NVML_SUCCESS = 1, 0, 0
    nvmlEventTypeXidCriticalError = 8

    class NVMLError_Timeout(Exception):
        pass

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers, self.events, self.reading = answers, list(answers["xid_events"]), 0

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlEventSetCreate(self) -> str:
        return "events"

    def nvmlDeviceRegisterEvents(self, handle: str, mask: int, events: str) -> None:
        assert (mask, events) == (8, "events")

    def nvmlEventSetWait_v2(self, events: str, milliseconds: int) -> Any:
        assert milliseconds == 0, "a scrape waits for nothing"
        if not self.events:
            raise self.NVMLError_Timeout
        return SimpleNamespace(eventData=self.events.pop(0))

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(**self.answers["nvmlDeviceGetMemoryInfo"])

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(**self.answers["nvmlDeviceGetUtilizationRates"])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.answers["nvmlDeviceGetCurrentClocksEventReasons"]

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0)
        return self.answers["nvmlDeviceGetTotalEccErrors"]

    def nvmlDeviceGetFieldValues(self, handle: str, wanted: list[Any]) -> list[Any]:
        if wanted == [90, 91]:
            values = self.answers["nvlink_speed_mbps"], self.answers["nvlink_links"]
        else:
            values = tuple(self.answers["nvlink_kib"][self.reading])
            self.reading += 1
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=v, uiVal=v)) for v in values]


class Worker:
    """A decode worker of four ranks: rank 0 reads its GPU, the others' come with their heartbeats."""

    def __init__(self, pod: str, gpus: list[dict[str, Any]], clock: list[float]) -> None:
        self.pod = pod
        self.readers = [GpuReader("GPU-1", RecordedNvml(one), clock=lambda: clock[0]) for one in gpus]

    def tell(self, role: Role, engine: EngineStats) -> WorkerTelemetry:
        samples = [reader.sample() for reader in self.readers] or [NO_GPU]
        others: dict[int, GpuSample] = {}
        for rank, one in enumerate(samples[1:], 1):
            problems, others[rank] = parse_beat(encode_beat([], one))
            assert not problems
        sample = WorkerSample(
            at=1.0, draining=False, engine=engine, gpu=samples[0], others=others, transfer=None,
            grammars=CompileCounts(), grammar_restarts=0,
        )  # fmt: skip
        told = build_telemetry(WorkerFacts(model_name="m", role=role, revision="r", pod=self.pod), sample)
        return WorkerTelemetry.model_validate_json(told.to_json())


def decide(case: str, rate: float, *, decodes: int = 3, spec: ScalingSpec = SPEC) -> Decision:
    """After three minutes of so many requests per second, of 4000 tokens in and 300 out, with 3 prefill workers."""
    clock, totals, history, shares = [1000.0], Totals(since=0.0), History(), Shares()
    workers = {Role.PREFILL: [Worker(f"m-prefill-{n}", [], clock) for n in range(3)]}
    calm = RECORDED["calm"]
    workers[Role.DECODE] = [Worker(f"m-decode-{n}", RECORDED[case] if n == 1 else calm, clock) for n in range(decodes)]
    counts = {
        role: RoleCount(replicas=len(own), leaders=frozenset(one.pod for one in own), starts=(45.0,))
        for role, own in workers.items()
    }
    for step in range(37):
        clock[0] = 1000.0 + 5 * step
        count = int(5 * step * rate)
        held = int(10_000 * rate / decodes * (0.8 + 0.1 * (step % 5)))
        engine = {
            Role.PREFILL: replace(IDLE, busy_seconds_total=count * 0.4 / 3),
            Role.DECODE: replace(
                IDLE, running_requests=6, running_tokens=held, decode_step_seconds=0.008 + 2e-8 * held
            ),
        }
        traffic = Traffic(
            requests=count, prompt_tokens=4000 * count, prompt_squares=2.0 * 4000**2 * count,
            computed_prompt_tokens=4000 * count, computed_tokens=4000 * count, finished=count,
            output_tokens=300 * count,
        )  # fmt: skip
        report = FleetReport(
            gateway="g", started_at=1.0, at=0.0, traffic=traffic,
            workers=[
                WorkerReport(
                    name=one.pod, address="10.0.0.1:8000", role=role, revision="r", state="Admitted",
                    telemetry=one.tell(role, engine[role]), telemetry_age=0.5,
                )
                for role, own in workers.items() for one in own
            ],
        )  # fmt: skip
        heard = [Heard(report=FleetReport.model_validate_json(report.to_json()), age=0.0)]
        totals = add_up(totals, heard, now=clock[0])
        shares = take_shares(shares, heard, now=clock[0])
        snapshot = take_snapshot(heard, counts, totals, shares, now=clock[0])
        assert snapshot is not None
        history = history.observe(snapshot)
    return plan(spec, history.snapshots[-1], history, clock[0])


def test_full_memory_of_one_rank_bounds_decode() -> None:
    calm, full = decide("calm", 4.0), decide("vram", 4.0)
    assert calm.replicas[Role.DECODE] < 3 <= full.replicas[Role.DECODE]
    assert calm.roles[Role.DECODE].limit != "VRAM"
    assert full.roles[Role.DECODE].limit == "VRAM"
    assert "VRAM of m-decode-1 rank 2 is 99% full" in full.sentence
    assert "VRAM" not in calm.sentence
    assert (calm.inputs["vram_share"], full.inputs["vram_share"]) == (0.879, 0.989)


def test_full_links_of_one_rank_bound_the_ratio_and_are_named() -> None:
    calm, full = decide("calm", 7.0), decide("nvlink", 7.0)
    assert calm.roles[Role.DECODE].limit != "NVLink"
    assert full.roles[Role.DECODE].limit == "NVLink"
    assert full.replicas[Role.DECODE] > calm.replicas[Role.DECODE]
    of_calm = calm.replicas[Role.PREFILL] / calm.replicas[Role.DECODE]
    assert full.replicas[Role.PREFILL] / full.replicas[Role.DECODE] < of_calm
    assert "The NVLink of m-decode-1 rank 1 is 97% busy" in full.sentence
    assert full.inputs["nvlink_share"] == pytest.approx(0.97, abs=0.02)


def test_where_there_may_be_no_more_decode_replicas_full_links_bound_prefill() -> None:
    spec = replace(SPEC, roles={Role.PREFILL: RoleSpec(max=64), Role.DECODE: RoleSpec(max=3)})
    calm, full = decide("calm", 7.0, spec=spec), decide("nvlink", 7.0, spec=spec)
    assert (calm.replicas[Role.PREFILL], calm.roles[Role.PREFILL].limit) == (4, "TTFT target")
    assert (full.replicas[Role.PREFILL], full.roles[Role.PREFILL].limit) == (3, "NVLink")
    assert "prefill stays at 3 (NVLink; demand asks for 4)" in full.sentence


def test_gpus_that_are_not_well_are_named_and_size_nothing() -> None:
    calm, sick = decide("calm", 4.0), decide("sick", 4.0)
    assert sick.replicas == calm.replicas
    said = (
        "Not well: m-decode-1 rank 1 (clocks lowered by heat or power); "
        "m-decode-1 rank 3 (XID 79, 2 uncorrected memory errors)."
    )
    assert said in sick.sentence
    assert "Not well" not in calm.sentence


def test_what_other_processes_tell_is_no_more_than_figures() -> None:
    _, told = parse_beat(b'{"problems": [], "gpu": {"xid": "79", "active": -1, "vram_used_bytes": 5, "later": 1}}')
    assert told == GpuSample(vram_used_bytes=5)
