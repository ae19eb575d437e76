"""`GET /fleet`: what became of the requests of each worker."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable

import pytest
from tandem_api.fleet import FLEET_PATH, TTFT_BOUNDS, FleetReport, WorkerReport
from tandem_api.launch import CanaryTraffic
from tandem_api.names import Role

from tests.tandem_gateway.test_faults import ask, fail_with, question

SLOWLY = 0.15
SHORT = {"first_token_seconds": 2.0, "answer_seconds": 2.0}


@pytest.fixture
def read_fleet(connect) -> Callable[..., Awaitable[FleetReport]]:
    async def read(running) -> FleetReport:
        reader, writer = await connect(running.server.metrics_port)
        writer.write(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % FLEET_PATH.encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b"application/json" in head
        return FleetReport.model_validate_json(body)

    return read


def counts(report: FleetReport) -> dict[str, tuple[int, int]]:
    return {worker.name: (worker.requests, worker.failures) for worker in report.workers}


async def test_it_names_the_gateway_and_its_workers(start_gateway, start_worker, read_fleet, monkeypatch) -> None:
    monkeypatch.setenv("POD_NAME", "toy-gateway-1")
    decode, prefill = await start_worker("d"), await start_worker("p", role=Role.PREFILL)
    report = await read_fleet(await start_gateway(decode, prefill))
    assert (report.gateway, report.served_names, report.canary_percent) == ("toy-gateway-1", ["toy"], None)
    assert report.started_at <= report.at <= time.time()
    assert report.workers == [
        WorkerReport(
            name="d", address=decode.worker.address, role=Role.DECODE, revision="r1", state="Admitted",
            ttft_counts=[0] * (len(TTFT_BOUNDS) + 1),
        ),
        WorkerReport(name="p", address=prefill.worker.address, role=Role.PREFILL, revision="r1", state="Admitted"),
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("answer", (1, 0)), ("bad request", (1, 0)), ("error", (1, 1)), ("busy", (1, 0)), ("die", (1, 1)),
        ("hang", (1, 1)), ("drain", (0, 0)),
    ],
)  # fmt: skip
async def test_what_counts_as_a_failure(
    start_gateway, start_worker, fault, chat, read_fleet, kind: str, expected: tuple[int, int], stream: bool
) -> None:
    """Whether or not another worker answers in the end."""
    behaviours = {"bad request": fail_with(400), "error": fail_with(500), "busy": fail_with(429)}
    bad = await start_worker("bad", behaviours=[behaviours.get(kind) or getattr(fault, kind)])
    patience = SHORT if kind == "hang" else None  # a busy machine makes those slow that are well
    running = await start_gateway(bad, await start_worker("good"), timeouts=patience)
    for number in range(64):
        await ask(running, question(chat, number, stream=stream))
        if bad.received:
            break
    report = await read_fleet(running)
    assert counts(report)["bad"] == expected
    assert counts(report)["good"][1] == 0
    ejected = next(worker for worker in report.workers if worker.name == "bad")
    reasons = {"hang": "timeout", "drain": "draining", "die": "reset", "busy": "busy"}
    ejections = running.gateway.scheduler.ejections
    assert [outcome.value for outcome in ejections] == ([reasons[kind]] if kind in reasons else [])
    if ejected.state != "Admitted":  # a quarter of a second may have passed
        assert ejected.reason == reasons[kind]


async def test_streams_tell_when_they_began_and_how_they_ended(
    start_gateway, start_worker, fault, chat, read_fleet
) -> None:
    async def slowly(worker, request, writer) -> None:
        await asyncio.sleep(SLOWLY)
        await fault.answer(worker, request, writer)

    behaviours = [fault.answer, slowly, fault.stream(1, then="die"), fault.stream(1, then="error")]
    running = await start_gateway(await start_worker("d", behaviours=behaviours))
    took = []
    for number in range(4):
        began = time.monotonic()
        await ask(running, question(chat, number, stream=True))
        took.append(time.monotonic() - began)
    (worker,) = (await read_fleet(running)).workers
    assert (worker.requests, worker.failures) == (4, 2)
    buckets = [bucket for bucket, count in enumerate(worker.ttft_counts) for _ in range(count)]
    longest = [bisect_left(TTFT_BOUNDS, seconds) for seconds in sorted(took)]
    assert len(buckets) == 4
    assert all(bucket <= most for bucket, most in zip(buckets, longest, strict=True))
    assert buckets[-1] >= bisect_left(TTFT_BOUNDS, SLOWLY)


async def test_who_leaves_is_not_counted(start_gateway, start_worker, fault, chat, read_fleet) -> None:
    running = await start_gateway(await start_worker("d", default=fault.stream(1, then="hang")))
    reader, writer = await running.connect()
    writer.write(chat(stream=True))
    await reader.readuntil(b"t0 ")
    writer.transport.abort()
    await running.idle()
    assert counts(await read_fleet(running)) == {"d": (0, 0)}


async def test_prefill_workers_count_the_prompts_that_they_were_named_for(
    start_gateway, start_worker, chat, read_fleet
) -> None:
    async def use_the_second(worker, request, writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
            b"x-tandem-decode-worker: d\r\nx-tandem-prefill-worker: p1\r\n\r\n{}"
        )
        await writer.drain()

    prefills = [await start_worker(f"p{index}", role=Role.PREFILL) for index in range(2)]
    running = await start_gateway(await start_worker("d", default=use_the_second), *prefills)
    for number in range(12):
        assert (await ask(running, question(chat, number)))[0] == 200
    report = counts(await read_fleet(running))
    assert report["d"] == report["p1"] == (12, 0)
    assert report["p0"] == (2, 2)


async def test_a_canary_gets_its_share_and_its_failures_reach_no_client(
    start_gateway, start_worker, fault, chat, read_fleet
) -> None:
    workers = [await start_worker(f"d{index}") for index in range(3)]
    workers[2].default = fail_with(500)
    running = await start_gateway(*workers)
    running.gateway.scheduler.apply_canary(CanaryTraffic(percent=25, workers=["d2"]))
    for number in range(40):
        assert (await ask(running, question(chat, number)))[0] == 200
    report = await read_fleet(running)
    assert report.canary_percent == 25
    requests, failures = counts(report)["d2"]
    assert requests == failures
    assert 3 <= requests <= 10
    text = running.server.reports.render_metrics().decode()
    assert 'tandem_gateway_canary_requests_total{moved="true",side="others"}' in text
