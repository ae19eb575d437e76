"""One of four workers fails in its own way: every request is answered right by the others, and it draws few of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from tandem_api.names import Role
from tandem_gateway.scheduling import Outcome


def fail_with(status: int) -> Callable[..., Awaitable[None]]:
    async def behave(worker, request, writer) -> None:
        body = json.dumps({"error": {"message": "no", "type": "server_error"}}).encode()
        writer.write(
            b"HTTP/1.1 %d No\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, len(body))
            + body
        )
        await writer.drain()

    return behave


async def ask(running, data: bytes) -> tuple[int, bytes]:
    reader, writer = await running.connect()
    writer.write(data)
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        body = b""
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
    writer.close()
    return int(head.split()[1]), body


def question(chat, number: int, *, stream: bool = False) -> bytes:
    return chat(stream=stream, messages=[{"role": "user", "content": f"question {number}"}])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_a_worker_that_refuses_at_once_draws_no_traffic(
    start_gateway, start_worker, chat, status: int, stream: bool
) -> None:
    workers = [await start_worker(f"d{index}") for index in range(4)]
    workers[0].default = fail_with(status)
    running = await start_gateway(*workers)
    for number in range(60):
        code, body = await ask(running, question(chat, number, stream=stream))
        assert code == 200, body
        assert b"t0 " in body
    assert len(workers[0].received) <= 12
    endpoint = running.gateway.scheduler.endpoints["d0"]
    assert endpoint.health.total >= 1
    assert endpoint.health.ejections >= 1
    assert f'reason="{"busy" if status in (429, 503) else "error"}"' in running.server.reports.render_metrics().decode()


@pytest.mark.parametrize("status", [429, 500])
async def test_where_everybody_refuses_the_client_gets_the_worker_s_own_answer(
    start_gateway, start_worker, chat, status: int
) -> None:
    workers = [await start_worker(f"d{index}", default=fail_with(status)) for index in range(2)]
    running = await start_gateway(*workers)
    code, body = await ask(running, question(chat, 1))
    assert (code, json.loads(body)["error"]["message"]) == (status, "no")
    assert sum(len(worker.received) for worker in workers) == 2


async def test_a_request_that_every_worker_fails_at_ejects_nobody(start_gateway, start_worker, fault, chat) -> None:
    async def fail_at_poison(worker, request, writer) -> None:
        await (fail_with(500) if b"poison" in request.body else fault.answer)(worker, request, writer)

    workers = [await start_worker(f"d{index}", default=fail_at_poison) for index in range(4)]
    running = await start_gateway(*workers)
    poison = chat(messages=[{"role": "user", "content": "poison"}])
    for number in range(20):
        assert (await ask(running, poison))[0] == 500
        assert (await ask(running, question(chat, number)))[0] == 200
    assert {endpoint.state for endpoint in running.gateway.scheduler.endpoints.values()} == {"available"}


def states(running) -> set[str]:
    return {endpoint.state for endpoint in running.gateway.scheduler.endpoints.values()}


async def test_a_request_that_breaks_every_connection_ejects_nobody(start_gateway, start_worker, fault, chat) -> None:
    """One client with such a request could take out two workers each time."""

    async def break_at_poison(worker, request, writer) -> None:
        await (fault.die if b"poison" in request.body else fault.answer)(worker, request, writer)

    workers = [await start_worker(f"d{index}", default=break_at_poison) for index in range(4)]
    running = await start_gateway(*workers)
    poison = chat(messages=[{"role": "user", "content": "poison"}])
    for number in range(10):
        assert (await ask(running, poison))[0] == 502
        assert states(running) == {"available"}
        assert (await ask(running, question(chat, number)))[0] == 200


async def test_errors_count_only_where_another_worker_did_better(start_gateway, start_worker, fault, chat) -> None:
    """With the retries used up there is nobody to ask: it may be the request's fault."""

    async def fail_at_poison(worker, request, writer) -> None:
        await (fail_with(500) if b"poison" in request.body else fault.answer)(worker, request, writer)

    running = await start_gateway(*[await start_worker(f"d{index}", default=fail_at_poison) for index in range(4)])
    while running.gateway.scheduler.may_retry():
        pass
    for number in range(40):
        poison = chat(messages=[{"role": "user", "content": f"poison {number}"}])
        assert (await ask(running, poison))[0] == 500
    assert states(running) == {"available"}


async def test_a_worker_that_breaks_connections_that_others_keep_is_left_out(
    start_gateway, start_worker, fault, chat
) -> None:
    workers = [await start_worker(f"d{index}") for index in range(4)]
    workers[0].default = fault.die
    running = await start_gateway(*workers)
    for number in range(40):
        assert (await ask(running, question(chat, number)))[0] == 200
    assert running.gateway.scheduler.endpoints["d0"].health.ejections >= 1
    assert len(workers[0].received) <= 4


async def test_a_worker_that_cannot_take_one_request_takes_the_others(start_gateway, start_worker, fault, chat) -> None:
    """503 with `x-tandem-retry: request`: of large requests, say. It is not draining."""

    async def refuse_large(worker, request, writer) -> None:
        if b"large" not in request.body:
            await fault.answer(worker, request, writer)
            return
        body = b'{"error":{"message":"not now"}}'
        writer.write(b"HTTP/1.1 503 No\r\nx-tandem-retry: request\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()

    workers = [await start_worker(f"d{index}", default=refuse_large) for index in range(2)]
    running = await start_gateway(*workers)
    large = chat(messages=[{"role": "user", "content": "large"}])
    for number in range(6):
        code, body = await ask(running, large)
        assert (code, json.loads(body)["error"]["message"]) == (503, "not now")
        assert states(running) == {"available"}
        assert (await ask(running, question(chat, number)))[0] == 200
    workers[1].default = fault.answer
    assert (await ask(running, large))[0] == 200


async def test_a_connection_that_was_cut_while_its_client_did_not_read_blames_nobody(
    start_gateway, start_worker, fault, chat, until
) -> None:
    """A worker needs room, and ends a connection that takes nothing from it."""
    cut = asyncio.Event()

    async def flood_and_cut(worker, request, writer) -> None:
        sent: list[int] = []
        flood = asyncio.create_task(fault.flood(sent)(worker, request, writer))
        before = -1
        while before != len(sent):
            before = len(sent)
            await asyncio.sleep(0.3)
        flood.cancel()
        writer.transport.abort()
        cut.set()

    worker = await start_worker(default=flood_and_cut)
    running = await start_gateway(worker)
    reader, writer = await running.connect(limit=1024)
    writer.write(chat(stream=True))
    async with asyncio.timeout(60):
        await cut.wait()
        last = b""
        while part := await reader.read(65536):
            last = (last + part)[-300:]
    assert b"broke off" in last
    endpoint = running.gateway.scheduler.endpoints["pod-d"]
    assert (endpoint.state, endpoint.health.total) == ("available", 0)


async def test_clients_that_leave_at_once_eject_nobody(start_gateway, start_worker, fault, chat, until) -> None:
    workers = [await start_worker(f"d{index}") for index in range(4)]
    running = await start_gateway(*workers)
    for number in range(20):
        await ask(running, question(chat, number, stream=True))
    for worker in workers:
        worker.default = fault.stream(0, then="hang")
    loop = asyncio.get_running_loop()
    started = loop.time()
    number = 0
    while loop.time() - started < 6:
        _, writer = await running.connect()
        writer.write(question(chat, number, stream=True))
        number += 1
        await asyncio.sleep(0.02)
        writer.transport.abort()
    assert not running.gateway.scheduler.failures


async def test_a_worker_that_hangs_is_found_long_before_its_first_token_is_late(
    start_gateway, start_worker, fault, chat, until
) -> None:
    workers = [await start_worker(f"d{index}") for index in range(4)]
    running = await start_gateway(*workers)
    for number in range(40):
        await ask(running, question(chat, number, stream=True))
    workers[0].default = fault.hang
    hung = running.gateway.scheduler.endpoints["d0"]
    loop = asyncio.get_running_loop()
    started, number = loop.time(), 0
    while hung.state == "available":
        assert loop.time() - started < 200, "its first token is late after 300 seconds"
        _, writer = await running.connect()
        writer.write(question(chat, number, stream=True))
        number += 1
        await asyncio.sleep(0.05)
    assert hung.health.reason is Outcome.SILENT
    assert [endpoint.state for endpoint in running.gateway.scheduler.endpoints.values()].count("available") == 3


async def test_a_worker_that_hangs_is_counted_and_left_out(start_gateway, start_worker, fault, chat) -> None:
    workers = [await start_worker(f"d{index}") for index in range(4)]
    workers[0].default = fault.hang
    running = await start_gateway(*workers, timeouts={"first_token_seconds": 0.3})
    codes = [(await ask(running, question(chat, number, stream=True)))[0] for number in range(30)]
    assert codes == [200] * 30, "another worker is asked"
    failed = {name: endpoint.health.total for name, endpoint in running.gateway.scheduler.endpoints.items()}
    assert failed["d0"] >= 1
    assert sum(failed.values()) == running.gateway.metrics.retries["timeout"]  # a busy machine makes others late, too


async def test_a_broken_stream_counts_against_its_worker(start_gateway, start_worker, fault, chat) -> None:
    worker = await start_worker(default=fault.stream(2, then="die"))
    running = await start_gateway(worker, await start_worker("d2"))
    for number in range(8):
        await ask(running, question(chat, number, stream=True))
    assert running.gateway.scheduler.endpoints["pod-d"].health.total >= 1


async def test_a_prefill_worker_that_is_never_used_is_left_out(start_gateway, start_worker, chat) -> None:
    """The decode worker says in its answer who computed the prompt."""
    decode = await start_worker("pod-d")
    prefills = [await start_worker(f"p{index}", role=Role.PREFILL) for index in range(2)]

    async def use_the_second(worker, request, writer) -> None:
        assert len(request.headers["x-tandem-prefill"].split(",")) == 2
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
            b"x-tandem-decode-worker: pod-d\r\nx-tandem-prefill-worker: p1\r\n\r\n{}"
        )
        await writer.drain()

    decode.default = use_the_second
    running = await start_gateway(decode, *prefills)
    first = running.gateway.scheduler.endpoints["p0"]
    for number in range(12):
        if first.state != "available":
            break
        assert (await ask(running, question(chat, number)))[0] == 200
    assert first.state == "ejected"
    assert running.gateway.scheduler.endpoints["p1"].state == "available"
