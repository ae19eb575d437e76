"""Connections to workers: dead ones, poisoned ones, silent ones, and none at all."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import json
import os
import resource
import socket

import pytest
from tandem_gateway.exchange.recovery import MAX_RESETS
from tandem_gateway.upstream import http1_connection
from tandem_gateway.upstream.base import Failure
from tandem_gateway.upstream.http1 import Http1Call, Http1Link


def answer_of(text: str) -> bytes:
    body = json.dumps({"choices": [{"index": 0, "text": text}]}).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def repeating(surplus: bytes = b"", later: bytes = b""):
    """Answers with the request's id, then with bytes that nobody asked for."""

    async def behave(worker, request, writer) -> None:
        writer.write(answer_of(request.headers["x-request-id"]) + surplus)
        await writer.drain()
        if later:
            await asyncio.sleep(0.02)
            writer.write(later)
            await writer.drain()

    return behave


async def ask(running, chat, request_id: str) -> tuple[int, bytes]:
    answer = await running.raw(chat(headers=f"connection: close\r\nx-request-id: {request_id}\r\n"))
    return int(answer.split()[1]), answer.partition(b"\r\n\r\n")[2]


FOREIGN = answer_of("not-yours")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "surplus",
    [FOREIGN, FOREIGN[:20], FOREIGN[:60], FOREIGN[:-4], b"x", b"\0" * 100, b"0\r\n\r\n", FOREIGN * 3, b"\r\nx"],
)
async def test_what_follows_an_answer_reaches_nobody(
    start_gateway, start_worker, chat, surplus: bytes, late: bool
) -> None:
    behave = repeating(later=surplus) if late else repeating(surplus)
    worker = await start_worker(default=behave)
    running = await start_gateway(worker)
    for index in range(4):
        status, body = await ask(running, chat, f"id-{index}")
        assert status == 200
        assert json.loads(body)["choices"][0]["text"] == f"id-{index}"
        if late:
            await asyncio.sleep(0.06)
    assert worker.connections == 4, "a poisoned connection was used again"


async def test_bytes_that_arrive_just_before_the_next_request_are_seen(
    start_gateway, start_worker, chat, until
) -> None:
    """Both are in the same turn of the event loop: only the socket itself knows."""
    writers: list[asyncio.StreamWriter] = []

    async def behave(worker, request, writer) -> None:
        writers.append(writer)
        writer.write(answer_of(request.headers["x-request-id"]))
        await writer.drain()

    running = await start_gateway(await start_worker(default=behave))
    assert (await ask(running, chat, "first"))[0] == 200
    await until(lambda: not running.server.reception.connections)
    reader, _ = await running.connect()
    await until(lambda: running.server.reception.connections)
    writers[0].get_extra_info("socket")._sock.send(FOREIGN)
    connection = next(iter(running.server.reception.connections))
    connection.data_received(chat(headers="x-request-id: second\r\n"))
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"x-request-id: second" in head
    assert b"second" in await reader.read(1000)


async def test_switching_protocols_is_refused(start_gateway, start_worker, chat) -> None:
    async def switch(worker, request, writer) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n" + FOREIGN)
        await writer.drain()
        await asyncio.sleep(3600)

    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    running = await start_gateway(*[await start_worker(f"d{index}", default=switch) for index in range(2)])
    async with asyncio.timeout(30):
        status, body = await ask(running, chat, "a")
    assert status == 502
    assert b"switches protocols" in body
    assert not problems


@pytest.mark.parametrize("interim", [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
async def test_interim_answers_are_skipped(start_gateway, start_worker, chat, interim: bytes) -> None:
    async def behave(worker, request, writer) -> None:
        writer.write(interim * 3 + answer_of("x"))

    running = await start_gateway(await start_worker(default=behave))
    assert (await ask(running, chat, "a"))[0] == 200


async def test_trailers_of_a_worker_change_nothing(start_gateway, start_worker, chat) -> None:
    async def behave(worker, request, writer) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\nx-evil: 1\r\n\r\n"
        )

    worker = await start_worker(default=behave)
    running = await start_gateway(worker)
    for _ in range(2):
        answer = await running.raw(chat(headers="connection: close\r\n"))
        assert answer.endswith(b"\r\n\r\n{}")
        assert b"x-evil" not in answer
    assert worker.connections == 1


@pytest.mark.parametrize(
    "begin",
    [
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 200 OK\r\nx",
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: ",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2;x=",
    ],
    ids=["value", "name", "reason", "trailer", "extension"],
)
async def test_a_field_without_end_is_no_answer(start_gateway, start_worker, chat, begin: bytes) -> None:
    """The parser tells of a field once it is whole, and keeps all of it until then."""
    sent = 0

    async def behave(worker, request, writer) -> None:
        nonlocal sent
        writer.write(begin)
        while sent < 8 * 1024 * 1024:
            writer.write(b"a" * 16384)
            sent += 16384
            await writer.drain()

    running = await start_gateway(await start_worker(default=behave))
    async with asyncio.timeout(60):
        status, body = await ask(running, chat, "a")
    assert status == 502
    assert b"header too large" in body
    assert sent < 8 * 1024 * 1024


async def test_one_dead_idle_connection_says_that_all_are_dead(start_gateway, start_worker, chat) -> None:
    """As after a crash: each connection accepts another request and is closed for it."""
    seen: set[asyncio.StreamWriter] = set()
    together = asyncio.Barrier(8)

    async def once(worker, request, writer) -> None:
        if writer in seen:
            writer.transport.abort()
            return
        seen.add(writer)
        if len(seen) <= 8:
            await together.wait()
        await repeating()(worker, request, writer)

    worker = await start_worker(default=once)
    running = await start_gateway(worker)
    assert {status for status, _ in await asyncio.gather(*(ask(running, chat, "a") for _ in range(8)))} == {200}
    assert worker.connections == 8
    assert (await ask(running, chat, "b"))[0] == 200
    assert worker.connections == 9
    assert running.gateway.metrics.retries == {"stale": 1}
    assert running.gateway.scheduler.endpoints["pod-d"].health.failures == 0


async def test_a_request_is_not_sent_again_after_the_worker_began_to_answer(start_gateway, start_worker, chat) -> None:
    begun: list[int] = []

    async def behave(worker, request, writer) -> None:
        if len(worker.received) == 1:
            await repeating()(worker, request, writer)
            return
        begun.append(1)
        writer.write(b"HTTP/1.1 2")
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    workers = [await start_worker(default=behave)]
    running = await start_gateway(*workers)
    assert (await ask(running, chat, "a"))[0] == 200
    status, _ = await ask(running, chat, "b")
    assert status == 502
    assert len(begun) == MAX_RESETS


async def test_a_killed_worker_costs_nobody_an_answer(launch, launch_worker, connect) -> None:
    workers = [await launch_worker() for _ in range(4)]
    names = [f"url=127.0.0.1:{port},name=d{index}" for index, (_, port) in enumerate(workers)]
    process = await launch(*(part for name in names for part in ("--worker", name)), "--no-access-log")
    wrong: list[object] = []
    done = start = 0

    async def client(number: int, turns: int) -> None:
        nonlocal done
        reader, writer = await connect(process.http_port)
        for turn in range(turns):
            prompt = f"prompt {number}.{turn}"
            body = json.dumps({"model": "toy", "prompt": prompt}).encode()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            answer = await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            if b" 200 " not in head or json.loads(answer)["choices"][0]["text"] != prompt:
                wrong.append((prompt, head, answer))
            done += 1

    async def killer() -> None:
        while done < start + 16 * 10:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        workers[1][0].kill()

    async with asyncio.timeout(50):
        # Many idle connections, then fewer clients: the dead ones are not all noticed before one is taken.
        await asyncio.gather(*(client(number, 2) for number in range(160)))
        start = done
        await asyncio.gather(killer(), *(client(number, 40) for number in range(16)))
    assert not wrong


def stop_hearing(sock: socket.socket) -> None:
    """As if the machine had lost its power: from now on the kernel drops what arrives, and acknowledges nothing."""

    class Instruction(ctypes.Structure):
        _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("first", ctypes.POINTER(Instruction))]

    program = Program(1, ctypes.pointer(Instruction(0x06, 0, 0, 0)))  # return 0 bytes of it
    attach_filter = 26
    libc = ctypes.CDLL(None, use_errno=True)
    told = libc.setsockopt(sock.fileno(), socket.SOL_SOCKET, attach_filter, ctypes.byref(program), 16)
    assert told == 0, os.strerror(ctypes.get_errno())


async def test_a_machine_that_vanishes_is_noticed_while_it_answers(
    start_gateway, start_worker, fault, chat, monkeypatch
) -> None:
    monkeypatch.setattr(http1_connection, "KEEPALIVE_SECONDS", 1)
    monkeypatch.setattr(http1_connection, "UNANSWERED_SECONDS", 0.5)

    async def vanish(worker, request, writer) -> None:
        stop_hearing(writer.get_extra_info("socket"))
        await asyncio.sleep(3600)

    async def first_vanishes(worker, request, writer) -> None:
        first = sum(len(item.received) for item in workers) == 1
        await (vanish if first else repeating())(worker, request, writer)

    workers = [await start_worker(f"d{index}", default=first_vanishes) for index in range(2)]
    running = await start_gateway(*workers)
    async with asyncio.timeout(60):
        status, _ = await ask(running, chat, "a")
    assert status == 200
    assert sorted(len(worker.received) for worker in workers) == [1, 1]
    for worker in workers:
        await worker.stop()


async def test_a_lack_of_descriptors_is_not_the_workers_fault(start_gateway, start_worker, chat, until) -> None:
    worker = await start_worker(card={"max_model_len": 4096})
    running = await start_gateway(worker)
    await until(lambda: running.server.card.facts)  # nothing opens or closes a connection meanwhile
    await until(lambda: not worker.is_connected)
    reader, writer = await running.connect()
    await until(lambda: running.server.reception.connections)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    plugs: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                plugs.append(os.dup(0))
        writer.write(chat(headers="connection: close\r\n"))
        await until(lambda: running.gateway.metrics.retries["local"] >= 2)
        assert running.gateway.scheduler.endpoints["pod-d"].health.failures == 0
    finally:
        for descriptor in plugs:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert b"200 OK" in await reader.readuntil(b"\r\n")
    assert running.gateway.metrics.retries["refused"] == 0


@pytest.mark.parametrize("again", [False, True])
async def test_nor_is_it_where_a_request_is_sent_again(monkeypatch, again: bool) -> None:
    """The idle connection that had it was dead, and now there is no descriptor for another."""
    failures: list[Failure] = []

    class Asking:
        def on_upstream_failure(self, failure: Failure, detail: str) -> None:
            failures.append(failure)

    async def refuse(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    link = Http1Link("127.0.0.1:1", connect_seconds=1, on_stale=lambda: None)
    call = Http1Call(link, Asking(), b"", b"", None)
    if again:
        link.restart(call)
    else:
        link._start_dial(call)
    async with asyncio.timeout(60):
        while not failures:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert failures == [Failure.LOCAL]


@pytest.mark.parametrize("turns", range(6))
async def test_a_call_that_is_given_up_wants_no_connection_any_more(turns: int) -> None:
    """Nor does the gateway wait for one: a worker that answers no SYN keeps a socket for seconds."""

    class Nobody:
        def on_upstream_failure(self, failure: Failure, detail: str) -> None:
            raise AssertionError("it was given up")

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        link = Http1Link(address, connect_seconds=60, on_stale=lambda: None)
        call = link.start(Nobody(), b"GET / HTTP/1.1\r\n\r\n", b"")
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        link.close()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not link._dials
