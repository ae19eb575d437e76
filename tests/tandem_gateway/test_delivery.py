"""An answer counts when the client has it: slow clients get all of it, and what is cut short is not logged as whole."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest
from tandem_gateway.http import connection as connection_module
from tandem_gateway.records.access_log import AccessLog

SIZE = 20_000_000


async def large(worker, request, writer) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % SIZE)
    writer.write(b"x" * SIZE)
    await writer.drain()


def records(running) -> list[dict[str, object]]:
    """The access log's lines, from now on."""
    lines: list[dict[str, object]] = []
    running.gateway.access_log = AccessLog(lambda data: lines.extend(json.loads(line) for line in data.splitlines()))
    return lines


@pytest.mark.parametrize("close", [True, False])
async def test_a_client_that_pauses_gets_all_of_it(
    start_gateway, start_worker, chat, until, monkeypatch, close: bool
) -> None:
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.3)
    running = await start_gateway(await start_worker(default=large))
    lines = records(running)
    reader, writer = await running.connect(limit=1024)
    writer.write(chat(headers="connection: close\r\n" if close else ""))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(1.5)
    assert not lines, "logged before it was delivered"
    async with asyncio.timeout(60):
        await reader.readexactly(SIZE)
    await running.idle()
    await until(lambda: lines)
    assert [(line["status"], line["error"], line["bytes"]) for line in lines] == [(200, None, SIZE)]


async def test_a_client_that_leaves_in_the_middle_is_logged_as_gone(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker(default=large))
    lines = records(running)
    reader, writer = await running.connect(limit=1024)
    writer.write(chat())
    await reader.readuntil(b"\r\n\r\n")
    writer.transport.abort()
    await until(lambda: lines)
    assert [line["status"] for line in lines] == [499]
    assert running.gateway.metrics.requests["/v1/chat/completions", 499] == 1


async def test_a_client_that_takes_nothing_of_it_is_dropped(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker(default=large), timeouts={"idle_seconds": 0.4})
    lines = records(running)
    reader, writer = await running.connect(limit=1024)
    writer.write(chat())
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: lines)
    assert [line["status"] for line in lines] == [499]
    await running.idle()
    assert running.gateway.budget.used == 0


async def test_a_client_that_takes_a_little_at_a_time_is_not_dropped(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker(default=large), timeouts={"idle_seconds": 3.0})
    reader, writer = await running.connect(limit=1 << 16)
    writer.write(chat())
    await reader.readuntil(b"\r\n\r\n")
    left, began = SIZE, time.monotonic()
    while left > SIZE - 6_000_000:
        left -= len(await reader.read(1 << 17))
        await asyncio.sleep(0.1)
    assert time.monotonic() - began > 3.0, "it has taken longer than a client may take nothing"
    async with asyncio.timeout(60):
        await reader.readexactly(left)


async def test_requests_behind_a_slow_answer_wait_for_it(start_gateway, start_worker, chat) -> None:
    worker = await start_worker(default=large)
    running = await start_gateway(worker)
    reader, writer = await running.connect(limit=1024)
    writer.write(chat() + chat(headers="connection: close\r\n"))
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.3)
    assert len(worker.received) == 1
    async with asyncio.timeout(60):
        await reader.readexactly(SIZE)
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(SIZE)


@pytest.mark.parametrize("close", [True, False])
async def test_draining_waits_for_slow_clients(launch, start_worker, chat, connect, close: bool) -> None:
    worker = await start_worker(default=large)
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0")
    reader, writer = await connect(process.http_port)
    writer.write(chat(headers="connection: close\r\n" if close else ""))
    await reader.readuntil(b"\r\n\r\n")
    process.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(1.0)
    async with asyncio.timeout(60):
        await reader.readexactly(SIZE)
        stdout, _ = await process.process.communicate()
    assert process.process.returncode == 0
    assert [json.loads(line)["status"] for line in stdout.splitlines()] == [200]


async def test_what_the_drain_timeout_cuts_is_logged_as_cut(launch, start_worker, chat, connect) -> None:
    worker = await start_worker(default=large)
    process = await launch("--worker", f"url=127.0.0.1:{worker.port}", "--lame-duck", "0", drain_timeout_seconds=0.3)
    reader, writer = await connect(process.http_port)
    writer.write(chat())
    await reader.readuntil(b"\r\n\r\n")
    process.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        stdout, _ = await process.process.communicate()
    assert [json.loads(line)["error"] for line in stdout.splitlines()] == ["shutting_down"]


async def test_local_answers_are_delivered_before_the_end(launch, connect) -> None:
    process = await launch("--worker", "url=127.0.0.1:1", "--lame-duck", "0", "--no-access-log")
    reader, writer = await connect(process.http_port)
    writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    await reader.readuntil(b"\r\n")
    process.process.send_signal(signal.SIGTERM)
    assert b'"object":"list"' in await reader.read()
    assert await process.process.wait() == 0


@pytest.mark.parametrize("limit", [{"answer_seconds": 0.4, "first_token_seconds": 0.2}, {"first_token_seconds": 0.4}])
async def test_an_answer_in_one_piece_has_a_deadline_whatever_it_asks_for(
    start_gateway, start_worker, fault, chat, limit: dict[str, float]
) -> None:
    running = await start_gateway(await start_worker(default=fault.hang), timeouts={"answer_seconds": 0.4} | limit)
    async with asyncio.timeout(30):
        answer = await running.raw(chat(max_tokens=10**12, headers="connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 504")


async def test_only_streams_have_a_time_to_first_token(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker())
    lines = records(running)
    await running.raw(chat(headers="connection: close\r\n"))
    await until(lambda: lines)
    assert lines[0]["ttft_ms"] is None
    assert sum(running.gateway.metrics.ttft.counts) == 0
    await running.raw(chat(stream=True, headers="connection: close\r\n"))
    await until(lambda: len(lines) == 2)
    assert lines[1]["ttft_ms"] > 0
    assert sum(running.gateway.metrics.ttft.counts) == 1


async def test_the_trace_that_a_client_names_is_in_the_access_log(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker())
    lines = records(running)
    for parent in ("", f"traceparent: 00-{'a1' * 16}-{'b2' * 8}-01\r\n", 'traceparent: 00-"\r\n'):
        await running.raw(chat(headers=f"connection: close\r\n{parent}"))
    await until(lambda: len(lines) == 3)
    assert [line["trace_id"] for line in lines] == [None, "a1" * 16, None]


async def test_every_answer_is_in_the_access_log(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker())
    lines = records(running)
    refused = [
        (
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\nconnection: close\r\n\r\n",
            "/v1/models",
            200,
            None,
        ),
        (b'GET /a"b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n', '/a"b', 404, "unknown_url"),
        (chat(model="other", headers="connection: close\r\n"), "/v1/chat/completions", 404, "model_not_found"),
        (chat(messages=3, headers="connection: close\r\n"), "/v1/chat/completions", 400, "invalid_type"),
        (b"nonsense\r\n\r\n", None, 400, "invalid_request_error"),
        (chat(headers="connection: close\r\n"), "/v1/chat/completions", 200, None),
    ]
    for index, (data, path, status, error) in enumerate(refused):
        await running.raw(data)
        await until(lambda count=index + 1: len(lines) == count)
        line = lines[-1]
        assert (line["path"], line["status"], line["error"]) == (path, status, error)
        assert line["request_id"]
    assert lines[0]["request_id"] == "a"
