"""Requests that wait for a worker, over real sockets: order, bounds, endings, and what everybody is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Collection, Iterator

import pytest
from tandem_api.launch import GatewayQueue, GatewayRouting, TTFTDeadline
from tandem_api.names import HEADER_QUEUE_SECONDS, Role
from tandem_gateway.exchange.queueing import RequestQueue
from tandem_gateway.records.metrics import Metrics
from tandem_gateway.scheduling import Endpoint, Scheduler, Worker
from tandem_gateway.scheduling.queue import FIRST_WINDOW

from tests.tandem_gateway.conftest import FakeWorker, Received, answer

PER_TOKEN = TTFTDeadline(seconds=0.5, seconds_per_token=0.01)


@contextlib.contextmanager
def held_back(worker: FakeWorker) -> Iterator[asyncio.Event]:
    """The worker answers nobody until the event is set."""
    open_door = asyncio.Event()

    async def wait(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await open_door.wait()
        await answer(worker, request, writer)

    worker.default = wait
    yield open_door
    open_door.set()


async def ask(running, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, header and body of one answer in one piece."""
    reader, writer = await running.connect()
    writer.write(data)
    async with asyncio.timeout(30):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *lines = head.split("\r\n")
        fields = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines if each)}
        body = b""
        if "content-length" in fields:
            body = await reader.readexactly(int(fields["content-length"]))
        else:
            body = await reader.readuntil(b"0\r\n\r\n")
    writer.close()
    return int(line.split()[1]), fields, body


def waits(running) -> dict[str, int]:
    return dict(running.gateway.metrics.queue_waits)


def number_of(request: Received) -> int:
    return int(request.headers["x-request-id"])


@pytest.fixture
def numbered(chat) -> Callable[..., bytes]:
    """A stream that says which request it is, with a prompt of about so many bytes."""

    def build(number: int, size: int = 10, **fields) -> bytes:
        content = [{"role": "user", "content": "x" * size}]
        return chat(stream=True, headers=f"x-request-id: {number}\r\n", messages=content, **fields)

    return build


async def test_a_late_worker_answers_all_who_wait_few_at_a_time_and_in_the_order_of_their_deadlines(
    start_gateway, start_worker, numbered, until
) -> None:
    running = await start_gateway(queue=GatewayQueue(ttft_target=PER_TOKEN))
    sizes = [10 + (number * 37 % 200) * 10 for number in range(200)]
    tasks = []
    for number, size in enumerate(sizes):
        tasks.append(asyncio.create_task(ask(running, numbered(number, size))))
        await until(lambda number=number: running.gateway.queue.line.size == number + 1)
    assert b"tandem_gateway_queue_requests 200.0" in running.server.reports.render_metrics()
    dues = {int(entry[2].item.request_id): entry[0] for entry in running.gateway.queue.line._heap}
    order = sorted(dues, key=dues.__getitem__)
    assert order != sorted(order), "the length of prompts matters"
    worker = await start_worker()
    running.workers.append(worker)
    with held_back(worker) as door:
        running.apply(worker)
        await until(lambda: len(worker.received) == FIRST_WINDOW)
        await asyncio.sleep(0.3)
        assert sorted(map(number_of, worker.received)) == sorted(order[:FIRST_WINDOW]), "and nobody else"
        later = await start_worker("late")
        running.workers.append(later)
        running.apply(worker, later)
        await until(lambda: later.received)
        door.set()
        answers = await asyncio.gather(*tasks)
    assert [status for status, _, _ in answers] == [200] * 200
    assert all(0.3 < float(fields[HEADER_QUEUE_SECONDS]) < 200 for _, fields, _ in answers[:16])
    assert sorted(map(number_of, worker.received + later.received)) == list(range(200))
    assert len(later.received) > FIRST_WINDOW, "who appears later takes its part"
    assert waits(running) == {"placed": 200}
    assert running.gateway.queue.line.size == running.gateway.queue.line.tokens == 0
    await running.idle()


async def test_without_a_target_the_order_is_that_of_arrival(start_gateway, start_worker, numbered, until) -> None:
    running = await start_gateway()
    tasks = []
    for number in range(2 * FIRST_WINDOW):
        tasks.append(asyncio.create_task(ask(running, numbered(number, 4000 - 100 * number))))
        await until(lambda number=number: running.gateway.queue.line.size == number + 1)
    worker = await start_worker()
    running.workers.append(worker)
    with held_back(worker) as door:
        running.apply(worker)
        await until(lambda: len(worker.received) == FIRST_WINDOW)
        assert {number_of(request) for request in worker.received} == set(range(FIRST_WINDOW))
        door.set()
        await asyncio.gather(*tasks)


async def test_who_comes_while_others_wait_is_behind_them(start_gateway, start_worker, numbered, until) -> None:
    running = await start_gateway()
    tasks = [asyncio.create_task(ask(running, numbered(number))) for number in range(FIRST_WINDOW + 1)]
    await until(lambda: running.gateway.queue.line.size == len(tasks))
    worker = await start_worker()
    running.workers.append(worker)
    with held_back(worker) as door:
        running.apply(worker)
        await until(lambda: len(worker.received) == FIRST_WINDOW)
        tasks.append(asyncio.create_task(ask(running, numbered(99))))
        await until(lambda: running.gateway.queue.line.size == 2)
        door.set()
        await asyncio.gather(*tasks)
    placed = [request_id for request_id, *_ in running.gateway.decisions]  # two connections may be read in any order
    assert (len(placed), placed[-1]) == (FIRST_WINDOW + 2, b"99")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue_says_so_at_once(start_gateway, start_worker, chat, until, stream: bool) -> None:
    running = await start_gateway(queue=GatewayQueue(max_requests=3))
    tasks = [asyncio.create_task(ask(running, chat(stream=stream))) for _ in range(3)]
    await until(lambda: running.gateway.queue.line.size == 3)
    async with asyncio.timeout(60):
        status, fields, body = await ask(running, chat(stream=stream))
    assert (status, fields["retry-after"]) == (503, "5")
    error = json.loads(body)["error"]
    assert error["code"] == "queue_full"
    assert "3 requests wait" in error["message"]
    assert HEADER_QUEUE_SECONDS not in fields
    worker = await start_worker()
    running.workers.append(worker)
    running.apply(worker)
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 3
    assert waits(running) == {"full": 1, "placed": 3}


async def test_one_client_cannot_keep_all_places(start_gateway, start_worker, chat, until) -> None:
    """It has every place, and asks again as soon as it is turned away."""
    running = await start_gateway(queue=GatewayQueue(max_requests=40))
    line, turned = running.gateway.queue.line, 0

    async def occupy() -> None:
        nonlocal turned
        reader, writer = await running.connect()
        while True:
            writer.write(chat())
            head = await reader.readuntil(b"\r\n\r\n")
            assert b" 503 " in head
            assert b"retry-after: 5" in head
            turned += b"x-tandem-queue-seconds" in head
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            assert json.loads(await reader.readexactly(length))["error"]["code"] == "queue_full"
            await asyncio.sleep(0.01)

    async with asyncio.TaskGroup() as group:
        greedy = [group.create_task(occupy()) for _ in range(60)]
        await until(lambda: line.size == 40)
        modest = []
        for number in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", running.port, local_addr=("127.0.0.2", 0))
            running.writers.append(writer)
            writer.write(chat())
            modest.append(reader)
            await until(lambda number=number: turned == number + 1)
        _, writer = await asyncio.open_connection("127.0.0.1", running.port, local_addr=("127.0.0.2", 0))
        running.writers.append(writer)
        writer.write(chat())
        await asyncio.sleep(0.3)
        assert {source: len(places) for source, places in line._sources.items()} == {"127.0.0.1": 20, "127.0.0.2": 20}
        assert (line.size, turned) == (40, 20), "who has half of them gets no more"
        assert running.gateway.queue.line.tokens == sum(t.tokens for each in line._sources.values() for t in each)
        for task in greedy:
            task.cancel()
    worker = await start_worker()
    running.workers.append(worker)
    running.apply(worker)
    for reader in modest:
        assert b" 200 " in await reader.readuntil(b"\r\n")


@pytest.mark.parametrize("queue", [GatewayQueue(max_requests=0), GatewayQueue(ttl_seconds=0)])
async def test_where_nobody_may_wait_the_answer_comes_at_once(start_gateway, start_worker, chat, queue) -> None:
    running = await start_gateway(queue=queue)
    async with asyncio.timeout(60):
        status, fields, body = await ask(running, chat())
    assert (status, fields["retry-after"]) == (503, "5")
    assert json.loads(body)["error"]["code"] == "no_endpoint"
    assert waits(running) == {}
    alive, dead = await start_worker("a"), await start_worker("b")
    await dead.stop()
    running.workers += [alive, dead]
    running.apply(alive, dead)
    for _ in range(4):
        assert (await ask(running, chat()))[0] == 200, "another worker is asked all the same"


async def test_the_wait_ends_with_its_time(start_gateway, chat) -> None:
    running = await start_gateway(queue=GatewayQueue(ttl_seconds=0.4))
    status, fields, body = await ask(running, chat())
    assert (status, fields["retry-after"]) == (503, "5")
    assert "no decode worker" in json.loads(body)["error"]["message"]
    assert 0.3 < float(fields[HEADER_QUEUE_SECONDS]) < 60
    assert waits(running) == {"expired": 1}
    assert running.gateway.queue.line.size == 0


async def test_who_did_not_wait_is_told_nothing_of_it(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    for stream in (False, True):
        assert HEADER_QUEUE_SECONDS not in (await ask(running, chat(stream=stream)))[1]
    assert waits(running) == {}


async def test_a_time_that_ends_while_a_worker_serves_ends_in_an_answer(
    start_gateway, start_worker, numbered, until
) -> None:
    """It begins none, so it is given few, and then the others: better than to refuse them."""
    running = await start_gateway(queue=GatewayQueue(ttl_seconds=3))
    tasks = [asyncio.create_task(ask(running, numbered(number))) for number in range(3 * FIRST_WINDOW)]
    await until(lambda: running.gateway.queue.line.size == len(tasks))
    worker = await start_worker()
    running.workers.append(worker)
    with held_back(worker) as door:
        running.apply(worker)
        await until(lambda: len(worker.received) == FIRST_WINDOW)
        await until(lambda: len(worker.received) == len(tasks), wait=60)
        door.set()
        answers = await asyncio.gather(*tasks)
    assert [status for status, _, _ in answers] == [200] * len(tasks)


async def test_a_client_that_leaves_gives_up_its_place_at_once(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(queue=GatewayQueue(max_requests=1))
    _, writer = await running.connect()
    writer.write(chat())
    await until(lambda: running.gateway.queue.line.size == 1)
    writer.transport.abort()
    await until(lambda: running.gateway.queue.line.size == 0)
    assert not running.gateway.exchanges
    assert waits(running) == {"left": 1}
    task = asyncio.create_task(ask(running, chat()))
    await until(lambda: running.gateway.queue.line.size == 1)
    worker = await start_worker()
    running.workers.append(worker)
    running.apply(worker)
    assert (await task)[0] == 200
    assert len(worker.received) == 1, "nobody works for who left"


def test_a_queue_whose_last_one_left_by_itself_leaves_no_windows_to_the_next_one() -> None:
    class Waits:
        def dispatch(self, full: Collection[str] = ()) -> bool:
            return False

        def turn_away(self, error: Exception) -> None:
            raise error

    queue = RequestQueue(GatewayQueue(), Scheduler(), Metrics(), on_join=lambda: None)
    worker = Endpoint(Worker(name="a", address="h:1", role=Role.DECODE, revision="r"))
    ticket = queue.join(Waits(), arrived=0.0, tokens=1, now=0.0)
    for _ in range(100):
        queue.take(worker, 0.0, stream=True).end(answered=True)
    queue.leave(ticket, "left", 1.0)
    queue.join(Waits(), arrived=100.0, tokens=1, now=100.0)
    for _ in range(FIRST_WINDOW):
        queue.take(worker, 100.0, stream=True)
    assert queue._ramp.full == {"a"}


async def test_bodies_that_wait_are_bounded_in_bytes_and_small_ones_fit_always(start_gateway, chat, until) -> None:
    running = await start_gateway(max_held_bytes=1_000_000, queue=GatewayQueue(ttl_seconds=20))
    big = chat(messages=[{"role": "user", "content": "x" * 240_000}])
    writers = []
    for number in range(3):
        _, writer = await running.connect()
        writers.append(writer)
        writer.write(big)
        await until(lambda number=number: running.gateway.queue.line.size == number + 1)
    status, fields, body = await ask(running, big)
    assert (status, json.loads(body)["error"]["code"]) == (503, "gateway_full")
    assert fields["retry-after"] == "5"
    assert running.gateway.budget.used <= 1_000_000
    for number in range(20):
        _, writer = await running.connect()
        writers.append(writer)
        writer.write(chat())
        await until(lambda number=number: running.gateway.queue.line.size == number + 4)
    for writer in writers:
        writer.transport.abort()
    await until(lambda: running.gateway.queue.line.size == 0)
    assert running.gateway.budget.used == 0


async def test_one_connection_has_one_place(start_gateway, chat, until) -> None:
    running = await start_gateway()
    _, writer = await running.connect()
    writer.write(chat() * 20)
    await until(lambda: running.gateway.queue.line.size == 1)
    await asyncio.sleep(0.2)
    assert running.gateway.queue.line.size == 1
    writer.transport.abort()
    await running.idle()


async def test_a_worker_that_refuses_at_first_has_the_waiting_ones_later(
    start_gateway, start_worker, numbered, until
) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    port = worker.port
    await worker.stop()
    tasks = [asyncio.create_task(ask(running, numbered(number))) for number in range(40)]
    await until(lambda: running.gateway.queue.line.size == 40)
    await worker.start(port)
    answers = await asyncio.gather(*tasks)
    assert [status for status, _, _ in answers] == [200] * 40
    assert sorted(map(number_of, worker.received)) == list(range(40))


async def test_a_change_of_settings_holds_for_who_comes_next(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway()
    task = asyncio.create_task(ask(running, chat()))
    await until(lambda: running.gateway.queue.line.size == 1)
    running.gateway.apply_routing(GatewayRouting(served_names=["toy"], queue=GatewayQueue(max_requests=0)))
    assert (await ask(running, chat()))[0] == 503
    worker = await start_worker()
    running.workers.append(worker)
    running.apply(worker)
    assert (await task)[0] == 200


async def test_a_gateway_that_stops_answers_who_still_waits(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(drain_timeout_seconds=0.5)
    task = asyncio.create_task(ask(running, chat()))
    await until(lambda: running.gateway.queue.line.size == 1)
    await running.server.drain()
    assert not task.done(), "it may still be served, as what runs may end"
    await running.server.stop()
    status, fields, body = await task
    assert (status, fields["retry-after"]) == (503, "5")
    assert json.loads(body)["error"]["code"] == "shutting_down"
    assert waits(running) == {"stopped": 1}


async def test_a_draining_gateway_still_finds_a_worker_for_who_waits(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(drain_timeout_seconds=20)
    task = asyncio.create_task(ask(running, chat()))
    await until(lambda: running.gateway.queue.line.size == 1)
    draining = asyncio.create_task(running.server.drain())
    await asyncio.sleep(0.2)
    worker = await start_worker()
    running.workers.append(worker)
    running.apply(worker)
    assert (await task)[0] == 200
    await draining
