"""A gateway whose prefill worker is behind: what its decode worker is asked, and what people are told of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from tandem_api.launch import GatewayQueue, GatewayRouting, TTFTDeadline
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_gateway.records.access_log import AccessLog


def tell(running: Any, name: str, **figures: Any) -> None:
    """A worker's telemetry has come."""
    worker = running.gateway.scheduler.endpoints[name].worker
    told = {
        "keeps_step_seconds": True, "decode_step_seconds": 0.02, "running_requests": 0, "queued_requests": 0,
        "running_tokens": 0, "queued_prefill_tokens": 0, "kv_blocks_used": 0, "kv_blocks_cached": 0,
        "kv_blocks_total": 1, "kv_eviction_horizon": 0.0, "draining": False,
    } | figures  # fmt: skip
    sample = WorkerTelemetry(model_name="m", role=worker.role, revision="r1", pod=name, **told)
    running.gateway.take_sample(worker, sample)


@pytest.fixture
async def pair(start_gateway, start_worker) -> tuple[Any, Any]:
    """A gateway and its decode worker; the prefill worker has ten seconds of work."""
    decode, prefill = await start_worker("d1"), await start_worker("p1", role=Role.PREFILL)
    running = await start_gateway(decode, prefill, explain=True, convert_step_seconds=0.05)
    endpoint = running.gateway.scheduler.endpoints["p1"]
    for _ in range(10):
        endpoint.speed.observe(1000, 1.0)
    endpoint.tell(10_000, asyncio.get_running_loop().time())
    tell(running, "d1")
    return running, decode


@pytest.mark.parametrize("stream", [True, False])
async def test_the_decode_worker_is_told_to_compute_the_prompt_and_how_long_steps_may_be(pair, chat, stream) -> None:
    running, decode = pair
    head = await read_head(running, chat(stream=stream, headers="x-tandem-route: explain\r\n"))
    headers = decode.received[-1].headers
    assert headers["x-tandem-step-seconds"] == "0.050000"
    assert "x-tandem-prefill" not in headers
    (line,) = [line for line in head.split("\r\n") if line.startswith("x-tandem-route")]
    fields = dict(part.split("=") for part in line.removeprefix("x-tandem-route: ").split("; "))
    assert (fields["decode"], fields["converted"]) == ("d1", "true")
    assert "prefill" not in fields
    assert 9000 < int(fields["prefill_ms"]) < 12000
    assert int(fields["ttft_ms"]) < 1000
    text = running.server.reports.render_metrics().decode()
    assert 'tandem_gateway_conversions_total{verdict="converted"} 1.0' in text


async def read_head(running: Any, request: bytes) -> str:
    reader, writer = await running.connect()
    writer.write(request)
    return (await reader.readuntil(b"\r\n\r\n")).decode()


async def test_log_and_debug_say_so(pair, chat, until) -> None:
    running, _ = pair
    lines: list[dict[str, Any]] = []
    running.gateway.access_log = AccessLog(lambda data: lines.extend(json.loads(line) for line in data.splitlines()))
    await running.raw(chat(headers="connection: close\r\n"))
    running.gateway.scheduler.terms = None
    await running.raw(chat(headers="connection: close\r\n"))
    await until(lambda: len(lines) == 2)
    assert [line["converted"] for line in lines] == [True, False]
    url = f"http://127.0.0.1:{running.server.metrics_port}/debug/route"
    async with httpx.AsyncClient() as client:
        after, before = (await client.get(url)).json()["decisions"]
    assert (before["converted"], before["prefill"], before["decode"]) == (True, [], "d1")
    assert before["why"]["conversion"].startswith("prefill workers are behind (")
    assert (after["converted"], after["prefill"]) == (False, ["p1"])
    assert "conversion" not in after["why"]


@pytest.mark.parametrize(
    "change",
    [
        {"keeps_step_seconds": None},  # of an earlier release
        {"decode_step_seconds": 0.045, "running_requests": 3},  # no room in its steps
        {"queued_prefill_tokens": 90_000},  # others have sent it more than the prefill worker has
    ],
)
async def test_it_is_not_asked_where_that_helps_nobody(pair, chat, change) -> None:
    running, decode = pair
    tell(running, "d1", **change)
    await running.raw(chat(headers="connection: close\r\n"))
    headers = decode.received[-1].headers
    assert "x-tandem-prefill" in headers
    assert "x-tandem-step-seconds" not in headers


async def test_a_worker_that_tells_nothing_any_more_is_not_asked(pair, chat) -> None:
    running, decode = pair
    running.gateway.take_sample(running.gateway.scheduler.endpoints["d1"].worker, None)
    await running.raw(chat(headers="connection: close\r\n"))
    assert "x-tandem-prefill" in decode.received[-1].headers


async def test_it_follows_what_it_is_told_while_it_runs(pair, chat) -> None:
    running, decode = pair
    slow = GatewayQueue(ttft_target=TTFTDeadline(seconds=60))
    for routing, converts in [
        (GatewayRouting(served_names=["toy"]), False),
        (GatewayRouting(served_names=["toy"], convert_step_seconds=0.04), True),
        (GatewayRouting(served_names=["toy"], convert_step_seconds=0.04, queue=slow), False),
    ]:
        running.gateway.apply_routing(routing)
        await running.raw(chat(headers="connection: close\r\n"))
        assert ("x-tandem-step-seconds" in decode.received[-1].headers) is converts


async def test_no_client_says_how_long_steps_may_be(pair, chat) -> None:
    running, decode = pair
    running.gateway.scheduler.terms = None
    await running.raw(chat(headers="connection: close\r\nx-tandem-step-seconds: 9\r\n"))
    assert "x-tandem-step-seconds" not in decode.received[-1].headers


async def test_a_converted_request_that_fails_is_tried_elsewhere(start_gateway, start_worker, fault, chat) -> None:
    first, second = await start_worker("d1", behaviours=[fault.drain]), await start_worker("d2")
    running = await start_gateway(first, second, await start_worker("p1", role=Role.PREFILL), convert_step_seconds=0.05)
    endpoints = running.gateway.scheduler.endpoints
    for _ in range(10):
        endpoints["p1"].speed.observe(1000, 1.0)
    endpoints["p1"].tell(10_000, asyncio.get_running_loop().time())
    tell(running, "d1")
    answer = await running.raw(chat(stream=True, headers="connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 200")
    assert "x-tandem-step-seconds" in first.received[-1].headers
    assert "x-tandem-prefill" in second.received[-1].headers
    assert [endpoint.own.tokens for endpoint in endpoints.values()] == [0, 0, 0]


async def test_events_of_a_worker_that_checks_guesses_count_as_several_tokens(pair) -> None:
    """It tells while requests run; that it says nothing in between changes nothing."""
    running, _ = pair
    endpoint = running.gateway.scheduler.endpoints["d1"]
    assert endpoint.tokens_per_event == 1.0
    tell(running, "d1", decode_tokens_per_step=3.5)
    tell(running, "d1", decode_tokens_per_step=None)
    assert endpoint.tokens_per_event == 3.5


async def test_what_decoding_takes_of_a_step_is_what_it_would_take_without_guesses(pair) -> None:
    running, _ = pair
    own = running.gateway.scheduler.endpoints["d1"].own
    tell(running, "d1", decode_step_seconds=0.04, plain_step_seconds=0.015)
    assert own.decode_seconds == 0.015
    tell(running, "d1", decode_step_seconds=0.04, plain_step_seconds=None)
    assert own.decode_seconds == 0.04
