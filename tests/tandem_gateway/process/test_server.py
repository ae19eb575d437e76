"""The real process: starts, serves, answers probes, drains, stays small."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tandem_api.launch import GatewayConfig
from tandem_api.telemetry import Metric

from tests.tandem_gateway.conftest import begin_stream, chunk, token


async def test_serve_observe_and_stop(launch, start_worker, chat) -> None:
    worker = await start_worker()
    process = await launch("--worker", f"url=127.0.0.1:{worker.port},name=pod-d", "--lame-duck", "0")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.http_port}") as client:
        for stream in (False, True):
            body = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "stream": stream}
            answer = await client.post("/v1/chat/completions", json=body, headers={"x-request-id": f"me-{stream}"})
            assert answer.status_code == 200
        assert (await client.post("/v1/chat/completions", content=b"{")).status_code == 400
    assert (await process.probe("/healthz")).text == "ok\n"
    assert (await process.probe("/readyz")).status_code == 200
    assert (await process.probe("/nothing")).status_code == 404
    metrics = (await process.probe("/metrics")).text
    assert f'{Metric.GATEWAY_REQUESTS_TOTAL}{{code="200",path="/v1/chat/completions"}} 2.0' in metrics
    assert f"{Metric.GATEWAY_REQUESTS_IN_FLIGHT} 0.0" in metrics
    endpoint = (await process.probe("/debug/endpoints")).json()["endpoints"][0]
    assert (endpoint["name"], endpoint["requests"], endpoint["decodeTokens"]) == ("pod-d", 0, 0)
    assert process.rss_mib < 80

    process.process.send_signal(signal.SIGTERM)
    stdout, _ = await process.process.communicate()
    assert process.process.returncode == 0
    lines = [json.loads(line) for line in stdout.splitlines()]
    assert [line["request_id"] for line in lines[:2]] == ["me-False", "me-True"]
    assert [(line["status"], line["error"]) for line in lines[2:]] == [(400, "invalid_json")]
    assert lines[0]["decode"] == "pod-d"
    assert (lines[0]["cached_tokens"], lines[0]["completion_tokens"], lines[0]["status"]) == (3, 4, 200)
    assert lines[1]["events"] == 5
    assert lines[1]["ttft_ms"] > 0


async def test_memory_stays_small_after_large_requests(launch, start_worker) -> None:
    worker = await start_worker()
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{process.http_port}") as client:
        for index in range(8):
            text = f"{index}" * 6_000_000
            answer = await client.post("/v1/completions", json={"model": "toy", "prompt": text})
            assert answer.status_code == 200
    assert process.rss_mib < 120


async def test_drain_finishes_what_runs(launch, start_worker, fault, chat, connect) -> None:
    over = asyncio.Event()

    async def last_longer(worker, request, writer) -> None:
        begin_stream(worker, writer)
        writer.write(chunk(token(0)))
        await over.wait()
        writer.write(chunk(token(1)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await writer.drain()

    worker = await start_worker(default=last_longer)
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "3")
    reader, writer = await connect(process.http_port)
    writer.write(chat(stream=True))
    await reader.readuntil(b"t0 ")
    process.process.send_signal(signal.SIGTERM)
    assert await process.probe_until("/readyz", 503)
    assert (await process.probe("/healthz")).status_code == 200
    late_reader, late_writer = await connect(process.http_port)
    late_writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    assert b"connection: close" in await late_reader.read()
    assert await process.refuses(connect)
    over.set()
    assert b"t1 " in await reader.read()
    assert await process.process.wait() == 0


async def test_a_connection_that_was_said_to_stay_takes_one_more_request(
    launch, start_worker, fault, chat, connect
) -> None:
    """A stream's head was written before the gateway was told to end: its client asks again on the same connection."""
    worker = await start_worker(default=fault.stream(10, then="error", pause=0.1))
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0")
    reader, writer = await connect(process.http_port)
    writer.write(chat(stream=True))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"connection: close" not in head
    await reader.readuntil(b"t1 ")
    process.process.send_signal(signal.SIGTERM)
    assert await process.refuses(connect)
    await reader.readuntil(b"\r\n0\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.write(chat(stream=True))
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert await process.process.wait() == 0


async def test_what_outlasts_the_drain_timeout_is_told(launch, start_worker, fault, chat, connect) -> None:
    worker = await start_worker(default=fault.stream(2, then="hang"))
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0", drain_timeout_seconds=0.3)
    reader, writer = await connect(process.http_port)
    writer.write(chat(stream=True))
    await reader.readuntil(b"t1 ")
    process.process.send_signal(signal.SIGTERM)
    answer = await reader.read()
    assert b"shutting down" in answer
    assert answer.endswith(b"0\r\n\r\n")
    assert await process.process.wait() == 0


@pytest.mark.parametrize("content", [None, "{", '{"served_name": "x"}'])
def test_a_bad_configuration_ends_with_a_sentence(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    ended = subprocess.run(
        [sys.executable, "-m", "tandem_gateway", "--config", str(path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"tandem-gateway: {'cannot read' if content is None else path}")
    assert "Traceback" not in ended.stderr


def test_outside_a_cluster_without_workers_it_ends_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    told = GatewayConfig(
        model_name="m", served_name="m", namespace="n", disaggregated=False, http_port=0, metrics_port=0
    )
    path.write_text(told.to_json())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KUBERNETES_")}
    ended = subprocess.run(
        [sys.executable, "-m", "tandem_gateway", "--config", str(path), "--host", "127.0.0.1"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stderr.startswith("tandem-gateway: ")
    assert "--worker" in ended.stderr


def test_neither_torch_nor_a_web_framework_is_loaded() -> None:
    script = (
        "import sys, tandem_gateway.__main__\n"
        "bad = {'torch', 'numpy', 'aiohttp', 'httpx', 'kubernetes', 'starlette', 'fastapi'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
