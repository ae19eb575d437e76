"""What real workers did, as a gateway's `GET /fleet` tells it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.launch import GatewayConfig
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.scheduling import Worker

PROMPT = 600
BLOCK = 16
REQUESTS = 4


def describe(worker: Any, name: str, role: Role) -> Worker:
    address, status = (url.removeprefix("http://") for url in (worker.url, worker.metrics_url))
    return Worker(name=name, address=address, role=role, revision="r1", kv_address=worker.kv, status_address=status)


def prompt_of(number: int) -> str:
    """Bytes are tokens. What begins otherwise shares nothing."""
    return (f"{number} asks: " + "how far is it to the sea, and who has been there? " * 20)[:PROMPT]


async def read_until(client: httpx.AsyncClient, url: str, holds: Callable[[FleetReport], bool]) -> FleetReport:
    async with asyncio.timeout(60):
        while True:
            report = FleetReport.model_validate_json((await client.get(url)).content)
            if holds(report):
                return report
            await asyncio.sleep(0.05)


def by_role(report: FleetReport, role: Role) -> tuple[WorkerReport, WorkerTelemetry]:
    (worker,) = (worker for worker in report.workers if worker.role is role)
    assert worker.telemetry is not None
    return worker, worker.telemetry


def is_read_since(report: FleetReport, moment: float) -> bool:
    """Both samples are younger than that moment."""
    return all(
        worker.telemetry_age is not None and report.at - worker.telemetry_age > moment + 0.2
        for worker in report.workers
    )  # fmt: skip


def test_fleet_says_what_the_workers_did(pair: SimpleNamespace) -> None:
    asyncio.run(ask_and_compare(pair))


async def ask_and_compare(pair: SimpleNamespace) -> None:
    config = GatewayConfig(
        model_name="tiny", served_name="tiny", namespace="default", disaggregated=True, http_port=0, metrics_port=0
    )
    workers = describe(pair.prefill, "prefill-0", Role.PREFILL), describe(pair.decode, "decode-0", Role.DECODE)
    told = Settings(
        config=config, host="127.0.0.1", workers=workers, workers_file=None, lame_duck_seconds=0.0,
        log_level="warning", access_log=False, telemetry_seconds=0.1,
    )  # fmt: skip
    server = Server(told)
    await server.start()
    fleet_url = f"http://127.0.0.1:{server.metrics_port}/fleet"
    try:
        async with httpx.AsyncClient(timeout=60) as client:
            started = time.time()
            await read_until(client, fleet_url, lambda report: is_read_since(report, started))
            usages: list[dict[str, Any]] = []
            seconds = 0.0
            for number in [*range(REQUESTS), 0]:  # the last one was asked before
                body = {"model": "tiny", "prompt": prompt_of(number), "max_tokens": 8, "temperature": 0}
                began = time.perf_counter()
                answer = await client.post(f"http://127.0.0.1:{server.http_port}/v1/completions", json=body)
                seconds += time.perf_counter() - began
                assert answer.status_code == 200, answer.text
                usages.append(answer.json()["usage"])
            ended = time.time()
            report = await read_until(client, fleet_url, lambda report: is_read_since(report, ended))
    finally:
        await server.stop()
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert cached >= PROMPT - 2 * BLOCK, "the last prompt was known"

    traffic = report.traffic
    assert traffic is not None
    assert (traffic.requests, traffic.finished) == (REQUESTS + 1, REQUESTS + 1)
    assert traffic.computed_prompt_tokens == sum(usage["prompt_tokens"] for usage in usages) == (REQUESTS + 1) * PROMPT
    assert traffic.computed_tokens == traffic.computed_prompt_tokens - cached
    assert traffic.output_tokens == sum(usage["completion_tokens"] for usage in usages)
    assert (traffic.waiting_requests, traffic.waiting_tokens) == (0, 0)

    _, prefill = by_role(report, Role.PREFILL)
    _, decode = by_role(report, Role.DECODE)
    for worker in (prefill, decode):
        assert worker.kv_block_size == BLOCK
        assert worker.busy_seconds_total is not None
        assert 0 < worker.busy_seconds_total <= seconds
        assert (worker.running_requests, worker.queued_requests, worker.queued_prefill_tokens) == (0, 0, 0)
        assert worker.decode_step_seconds is None, "nothing decodes now"
    assert prefill.computed_prompt_tokens_total is not None
    assert decode.computed_prompt_tokens_total is not None
    assert prefill.computed_prompt_tokens_total >= REQUESTS * PROMPT
    assert prefill.computed_prompt_tokens_total + decode.computed_prompt_tokens_total == traffic.computed_tokens
    assert prefill.prefill_seconds_total == prefill.busy_seconds_total, "it does nothing else"
    assert decode.prompt_tokens_total is not None
    assert decode.prompt_tokens_total >= traffic.computed_prompt_tokens
    assert decode.kv_transfer_bytes_total == prefill.kv_transfer_bytes_total
    assert prefill.kv_transfer_bytes_total
    assert decode.kv_transfer_seconds_total is not None
    assert 0 < decode.kv_transfer_seconds_total < seconds
    assert prefill.kv_transfer_seconds_total is None, "it receives none"
    assert decode.vram_total_bytes is None, "there is no GPU here"


def test_the_velocity_is_that_of_busy_time_and_survives_idle_time(pair: SimpleNamespace) -> None:
    """After a second of computing and a rest it is the growth of the totals, not tokens over the time that passed."""

    def read() -> WorkerTelemetry:
        return WorkerTelemetry.model_validate_json(pair.decode.get("/telemetry").content)

    def has_worked() -> bool:
        return (read().prefill_seconds_total or 0) > 1.0

    number, began = 0, time.monotonic()
    while not has_worked():
        assert time.monotonic() - began < 120
        for _ in range(8):
            number += 1
            pair.decode.complete(f"{number} " + "and so on " * 500, max_tokens=1)
    time.sleep(1.0)
    sample = read()
    assert sample.computed_prompt_tokens_total
    assert sample.prefill_seconds_total
    mean = sample.computed_prompt_tokens_total / sample.prefill_seconds_total
    assert sample.prefill_tokens_per_second == pytest.approx(mean, rel=0.1)
    assert pair.decode.metric("tandem_worker_prefill_tokens_per_second") == sample.prefill_tokens_per_second
    assert pair.decode.metric("tandem_worker_busy_seconds_total") == sample.busy_seconds_total
    assert pair.decode.metric("tandem_worker_computed_prompt_tokens_total") == sample.computed_prompt_tokens_total
