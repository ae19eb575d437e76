"""What one client can make the gateway spend: others do not wait, and memory stays where it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

import pytest

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
STALL_SECONDS = 0.5
"""Of the gateway's computing, for other work shares the machine. Each attack used to take several."""


async def longest_wait(process, connect: Callable, attack: asyncio.Task[None]) -> float:
    """The most that the gateway computed before it answered another client, while the attack went on."""
    reader, writer = await connect(process.http_port)
    longest = 0.0
    while not attack.done():
        started = process.cpu_seconds
        writer.write(MODELS)
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        longest = max(longest, process.cpu_seconds - started)
        await asyncio.sleep(0.005)
    await attack
    return longest


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        for position in range(0, len(data), 1 << 20):
            writer.write(data[position : position + (1 << 20)])
            await writer.drain()


async def attack_with(process, connect: Callable, data: bytes) -> None:
    """Send, and read whatever comes until the gateway has had enough or all is answered."""
    reader, writer = await connect(process.http_port)
    sending = asyncio.create_task(send(writer, data))
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 20):
            pass
    writer.transport.abort()
    await sending


CLOSE = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
TINY = b'{"role":"a"},'
ATTACKS = {
    "pipelined requests": b"GET / HTTP/1.1\r\nhost:x\r\n\r\n" * 80_000 + CLOSE,
    "upgrade offers": b"GET / HTTP/1.1\r\nhost:x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n" * 20_000 + CLOSE,
    "tiny chunks": CHUNKED + b"1\r\nx\r\n" * 1_000_000 + b"0\r\n\r\n" + CLOSE,
    "trailers": CHUNKED + b"0\r\n" + b"x-a: b\r\n" * 2_000_000 + b"\r\n" + CLOSE,
    "a trailer without end": CHUNKED + b"0\r\nx-a: " + b"b" * 16_000_000 + b"\r\n\r\n" + CLOSE,
    "a chunk extension without end": CHUNKED + b"1;x=" + b"b" * 16_000_000 + b"\r\nx\r\n0\r\n\r\n" + CLOSE,
}  # fmt: skip
BODIES = {
    "tiny messages": b'{"model":"toy","messages":[' + TINY * 490_000 + b'{"role":"user"}]}',
    "tiny strings": b'{"model":"toy","prompt":[' + b'"",' * 2_000_000 + b'""]}',
    "empty objects": b'{"model":"toy","prompt":"","x":[' + b"{}," * 2_000_000 + b"{}]}",
    "escaped quotes": b'{"model":"toy","prompt":"","x":["' + b'\\\\","{' * 900_000 + b'"]}',
}


def post(body: bytes) -> bytes:
    path = b"/v1/chat/completions" if b"messages" in body else b"/v1/completions"
    head = b"POST %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (path, len(body)) + body


@pytest.mark.parametrize("attacks", [ATTACKS, {name: post(body) for name, body in BODIES.items()}],
                         ids=["HTTP", "bodies"])  # fmt: skip
async def test_others_do_not_wait(launch, launch_worker, connect, attacks: dict[str, bytes]) -> None:
    """One attack after another on one process: it remembers none of them."""
    _, port = await launch_worker()
    process = await launch("--worker", f"url=127.0.0.1:{port}", "--no-access-log")
    await attack_with(process, connect, CLOSE)
    for name, data in attacks.items():
        before = process.rss_mib
        attack = asyncio.create_task(attack_with(process, connect, data))
        assert await longest_wait(process, connect, attack) < STALL_SECONDS, name
        assert process.rss_mib < before + 60, name


async def test_answers_that_nobody_reads_are_not_made(launch, connect) -> None:
    process = await launch("--worker", "url=127.0.0.1:1", "--no-access-log")
    await attack_with(process, connect, CLOSE)
    before = process.rss_mib
    _, writer = await connect(process.http_port)
    sending = asyncio.create_task(send(writer, MODELS * 500_000))
    await asyncio.sleep(1.5)
    assert not sending.done(), "the gateway reads on"
    assert process.rss_mib < before + 10
    writer.transport.abort()
    await sending


async def test_answers_that_are_read_late_all_arrive(start_gateway) -> None:
    running = await start_gateway()
    reader, writer = await running.connect(limit=1024)
    sending = asyncio.create_task(send(writer, MODELS * 30_000 + CLOSE))
    await asyncio.sleep(0.5)
    seen = 0
    async with asyncio.timeout(40):
        while data := await reader.read(1 << 16):
            seen += data.count(b"HTTP/1.1 200")
    await sending
    assert seen >= 29_990  # a status line may lie across two reads


async def test_a_client_may_stay_one_request_ahead_for_ever(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker(), max_body_bytes=64 * 1024)
    request = chat(user="x" * 8_000)
    reader, writer = await running.connect()
    writer.write(request)
    for turn in range(40):
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), turn
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))


@pytest.mark.parametrize("leave", [True, False])
async def test_connections_are_limited(start_gateway, start_worker, until, leave: bool) -> None:
    running = await start_gateway(await start_worker(), max_connections=4)
    held = [await running.connect() for _ in range(4)]
    await until(lambda: len(running.server.reception.connections) == 4)
    if leave:
        held[0][1].close()
        await until(lambda: len(running.server.reception.connections) == 3)
    answer = await running.raw(CLOSE)
    head, _, body = answer.partition(b"\r\n\r\n")
    if leave:
        assert head.startswith(b"HTTP/1.1 404")
        return
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after" in head
    assert json.loads(body)["error"]["code"] == "gateway_full"
    held[1][1].write(MODELS)
    assert (await held[1][0].readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")


async def test_the_sum_of_bodies_is_limited(start_gateway, start_worker, fault, chat, until) -> None:
    worker = await start_worker(behaviours=[fault.hang])
    running = await start_gateway(worker, max_held_bytes=1024 * 1024)
    large = chat(user="x" * 600_000)
    _, first = await running.connect()
    first.write(large)
    await until(lambda: worker.answering)
    assert running.gateway.budget.used > 600_000
    refused = await running.raw(large)
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"gateway_full" in refused
    assert (await running.raw(chat(headers="connection: close\r\n"))).startswith(b"HTTP/1.1 200")
    first.transport.abort()
    await until(lambda: running.gateway.budget.used == 0)
    assert (await running.raw(chat(user="x" * 600_000, headers="connection: close\r\n"))).startswith(b"HTTP/1.1 200")
    await until(lambda: running.gateway.budget.used == 0)


async def test_half_sent_bodies_count(start_gateway, until) -> None:
    running = await start_gateway(max_held_bytes=1024 * 1024)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n"
    writers = []
    for _ in range(2):
        _, writer = await running.connect()
        writer.write(head + b"x" * 350_000)
        writers.append(writer)
    await until(lambda: running.gateway.budget.used >= 700_000)
    assert (await running.raw(head + b"x" * 350_000)).startswith(b"HTTP/1.1 503")
    for writer in writers:
        writer.transport.abort()
    await until(lambda: running.gateway.budget.used == 0)


async def test_held_answers_count(start_gateway, start_worker, chat, until) -> None:
    async def large(worker, request, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2000000\r\n\r\n")
        writer.write(b"x" * 2_000_000)
        await writer.drain()

    running = await start_gateway(await start_worker(default=large), max_held_bytes=1024 * 1024)
    answer = await running.raw(chat(headers="connection: close\r\n"))
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"ask for a stream" in answer
    await until(lambda: running.gateway.budget.used == 0)


async def test_what_was_read_before_the_connection_broke_is_no_endless_work(start_gateway, until) -> None:
    """As when the write of an earlier answer finds the client gone: the end of it is told a turn later."""
    running = await start_gateway()
    _, writer = await running.connect()
    await until(lambda: running.server.reception.connections)
    connection = next(iter(running.server.reception.connections))
    connection.transport.abort()
    connection.data_received(b"nonsense\r\n\r\n")
    await until(lambda: connection.closed)
    writer.close()
