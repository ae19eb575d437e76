"""Gateways over native links: to the worker's own listener with an application of the test's, and to what is none."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest
from tandem_api import link
from tandem_api.keys import KeyRing, open_ring
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.native import NativeLink
from tandem_worker.server.link.listener import LinkListener

from tests.tandem_gateway.conftest import FakeWorker, StartGateway, token, until

WAIT = 30.0
SAMPLE = WorkerTelemetry(
    model_name="toy", role=Role.DECODE, revision="r1", pod="pod-d", draining=False, running_requests=1,
    queued_requests=2, running_tokens=3, queued_prefill_tokens=4, kv_blocks_used=5, kv_blocks_cached=6,
    kv_blocks_total=7, kv_eviction_horizon=0,
)  # fmt: skip
DONE = b"data: [DONE]\n\n"


@dataclass
class LinkedWorker(FakeWorker):
    """A worker with both ports. Over the link it answers as `steps` says, over HTTP as the others do."""

    ring: Callable[[], KeyRing] = open_ring
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    gone: int = 0
    open: int = 0
    link_address: str = ""
    listener: LinkListener | None = None
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        self.listener = LinkListener(
            self.answer, self.ring, name=self.name, telemetry=lambda: SAMPLE.to_json().encode()
        )
        await self.listener.start("127.0.0.1", 0)
        self.link_address = f"127.0.0.1:{self.listener.port}"

    async def stop(self) -> None:
        await super().stop()
        if self.listener is not None:
            self.release.set()
            await self.listener.stop(0.1)

    @property
    def worker(self) -> Worker:
        return replace(super().worker, link_address=self.link_address)

    async def answer(self, scope: Any, receive: Any, send: Any) -> None:
        """`seed`: 0 is a usual answer, 1 waits for `release` before it, 2 after its first token, 3 sends much."""
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        request = json.loads(body)
        self.bodies.append(request)
        kind, count = request.get("seed", 0), request.get("max_tokens", 4)
        watcher = asyncio.ensure_future(receive())
        self.open += 1
        try:
            if kind == 1:
                await self.wait(watcher)
            if not request.get("stream"):
                text = json.dumps({"choices": [{"text": "x" * count}], "pod": self.name}).encode()
                await self.begin(send, b"application/json")
                await send({"type": "http.response.body", "body": text})
                return
            await self.begin(send, b"text/event-stream")
            for index in range(count):
                part = token(index) if kind != 3 else token(index) * 100
                await send({"type": "http.response.body", "body": part, "more_body": True})
                self.sent += len(part)
                if kind == 2 and index == 0:
                    await self.wait(watcher)
            await send({"type": "http.response.body", "body": DONE})
        finally:
            self.open -= 1
            self.gone += watcher.done() and watcher.result()["type"] == "http.disconnect"
            watcher.cancel()

    async def begin(self, send: Any, kind: bytes) -> None:
        headers = [(b"content-type", kind), (b"x-tandem-decode-worker", self.name.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def wait(self, watcher: asyncio.Future[Any]) -> None:
        released = asyncio.ensure_future(self.release.wait())
        await asyncio.wait({watcher, released}, return_when=asyncio.FIRST_COMPLETED)
        released.cancel()


@pytest.fixture
async def start_linked() -> AsyncIterator[Callable[..., Awaitable[LinkedWorker]]]:
    started: list[LinkedWorker] = []

    async def start(name: str = "pod-d", **fields: Any) -> LinkedWorker:
        worker = LinkedWorker(name, **fields)
        await worker.start()
        await worker.listen()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.stop()


StartLinked = Callable[..., Awaitable[LinkedWorker]]
Impostor = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def start_impostor() -> AsyncIterator[Callable[[Impostor], Awaitable[str]]]:
    """A port of a native link with something else behind it; returns its address."""
    servers: list[asyncio.Server] = []

    async def start(behave: Impostor) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await behave(reader, writer)
            except (ConnectionError, asyncio.CancelledError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "messages": [{"role": "user", "content": "hi"}]} | fields


async def ask(running: Any, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient(timeout=WAIT) as client:
        return await client.post(f"{running.url}/v1/chat/completions", json=chat(**fields))


def links_of(running: Any) -> list[NativeLink]:
    return [found for found in running.gateway._links.values() if isinstance(found, NativeLink)]


async def linked(running: Any) -> None:
    await until(lambda: all(found.state == "native" for found in links_of(running)), wait=WAIT)


async def metrics(running: Any) -> dict[str, float]:
    async with httpx.AsyncClient(timeout=WAIT) as client:
        text = (await client.get(f"http://127.0.0.1:{running.server.metrics_port}/metrics")).text
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_answers_and_streams(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    whole = await ask(running)
    assert whole.json() == {"choices": [{"text": "xxxx"}], "pod": "pod-d"}
    assert whole.headers["x-tandem-decode-worker"] == "pod-d"
    stream = await ask(running, stream=True, max_tokens=50)
    assert stream.content == b"".join(token(index) for index in range(50)) + DONE
    assert stream.headers["content-type"] == "text/event-stream"
    assert not worker.received  # over HTTP
    assert (await metrics(running))['tandem_gateway_links{state="native"}'] == 1
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"http://127.0.0.1:{running.server.metrics_port}/debug/endpoints")).json()
    assert told["endpoints"][0]["link"] == "native"
    await running.idle()


async def test_many_at_once_share_the_connection(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    answers = await asyncio.gather(*(ask(running, stream=True, max_tokens=20 + n) for n in range(30)))
    for number, answer in enumerate(answers):
        assert answer.content == b"".join(token(index) for index in range(20 + number)) + DONE
    assert worker.listener is not None
    assert worker.listener.num_links == 1


async def test_large_bodies_in_both_directions(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    text = "".join(random.Random(1).choices("abcdefgh ", k=20 * link.WINDOW))
    whole = await ask(running, messages=[{"role": "user", "content": text}], max_tokens=3_000_000)
    assert worker.bodies[0]["messages"][0]["content"] == text
    assert len(whole.json()["choices"][0]["text"]) == 3_000_000


async def test_a_slow_client_stops_its_own_stream_alone(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    body = json.dumps(chat(stream=True, seed=3, max_tokens=1500)).encode()
    reader, writer = await running.connect(limit=2**16)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await until(lambda: worker.open == 1, wait=WAIT)
    (found,) = links_of(running)
    connection = found._connection
    assert connection is not None
    await until(lambda: any(call.held_bytes for call in connection.calls.values()), wait=WAIT)
    for _ in range(20):
        fast = await ask(running, stream=True, max_tokens=5)
        assert fast.content.endswith(DONE)
    (slow,) = connection.calls.values()
    assert 0 < slow.held_bytes <= link.WINDOW
    assert worker.open == 1
    received = bytearray()
    async with asyncio.timeout(120):
        while not received.endswith(b"0\r\n\r\n"):
            part = await reader.read(2**20)
            assert part, "the answer broke off"
            received += part
    assert received.count(b'"content"') == 150_000
    await running.idle()


async def test_a_client_that_leaves(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    body = json.dumps(chat(stream=True, seed=2)).encode()
    reader, writer = await running.connect()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"t0 ")
    writer.transport.abort()
    await until(lambda: worker.gone == 1 and worker.open == 0, wait=WAIT)
    assert (await ask(running)).status_code == 200
    await running.idle()


async def test_a_link_that_breaks_costs_another_attempt(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    workers = [await start_linked(f"pod-{number}") for number in range(2)]
    running = await start_gateway(*workers, link="Native")
    await linked(running)
    pending = asyncio.create_task(ask(running, seed=1))
    await until(lambda: any(worker.open for worker in workers), wait=WAIT)
    first, second = sorted(workers, key=lambda worker: -worker.open)
    second.release.set()
    assert first.listener is not None
    for each in tuple(first.listener._links):
        each.transport.abort()
    assert (await pending).json()["pod"] == second.name
    await linked(running)  # it is made again by itself
    counted = await metrics(running)
    assert counted['tandem_gateway_link_ends_total{reason="closed"}'] == 1
    assert counted['tandem_gateway_retries_total{reason="reset"}'] == 1
    await running.idle()


async def greet_and_hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(link.encode_hello(link.Hello(max_streams=100)))
    while await reader.read(65536):
        pass


async def test_a_worker_that_hangs_is_noticed_and_a_slow_one_is_left_alone(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any
) -> None:
    slow, hung = await start_linked("pod-slow"), await start_linked("pod-hung")
    hung.link_address = await start_impostor(greet_and_hang)
    running = await start_gateway(slow, hung, link="Native")
    await linked(running)
    began = time.monotonic()
    pending = [asyncio.create_task(ask(running, seed=1)) for _ in range(8)]
    await until(lambda: running.gateway.native.ends["hung"], wait=WAIT)
    took = time.monotonic() - began
    assert took > 1.0
    await until(lambda: slow.open == 8, wait=WAIT)
    await asyncio.sleep(max(0.0, began + 2 * link.HUNG_SECONDS - time.monotonic()))
    slow.release.set()
    assert [answer.json()["pod"] for answer in await asyncio.gather(*pending)] == ["pod-slow"] * 8
    (found,) = [each for each in links_of(running) if each.worker.name == "pod-slow"]
    assert found.state == "native"
    assert found.ping_seconds is not None
    await running.idle()


async def speak_version_2(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(65536)
    writer.write(link.encode_hello(link.Hello()).replace(b"\x01", b"\x02", 1))
    await writer.drain()


async def test_another_version_is_asked_over_http(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any, caplog: Any
) -> None:
    worker = await start_linked()
    worker.link_address = await start_impostor(speak_version_2)
    running = await start_gateway(worker, link="Native")
    assert (await ask(running)).status_code == 200
    assert len(worker.received) == 1
    assert (await metrics(running))['tandem_gateway_links{state="http_version"}'] == 1
    assert "asked over HTTP" in caplog.text
    await running.idle()


async def test_a_worker_without_the_port_is_asked_over_http(
    start_linked: StartLinked, start_worker: Any, start_gateway: StartGateway, caplog: Any
) -> None:
    plain, worker = await start_worker("pod-plain"), await start_linked("pod-linked")
    running = await start_gateway(plain, worker, link="Native")
    await linked(running)
    answers = await asyncio.gather(*(ask(running) for _ in range(8)))
    assert all(answer.status_code == 200 for answer in answers)
    assert plain.received
    assert worker.bodies
    counted = await metrics(running)
    assert counted['tandem_gateway_links{state="http_unannounced"}'] == 1
    assert counted['tandem_gateway_links{state="native"}'] == 1
    assert "no port for the native link" in caplog.text


async def test_a_link_is_made_only_where_it_is_wanted(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker)
    assert (await ask(running)).status_code == 200
    assert worker.listener is not None
    assert worker.listener.num_links == 0
    assert not any("link" in name for name in await metrics(running))


async def test_a_worker_that_does_not_take_the_key(
    start_linked: StartLinked, start_gateway: StartGateway, caplog: Any
) -> None:
    ring = KeyRing(primary="a", keys={"a": bytes(32)})
    strict, free = await start_linked("pod-strict", ring=lambda: ring), await start_linked("pod-free")
    running = await start_gateway(strict, free, link="Native")
    answers = await asyncio.gather(*(ask(running) for _ in range(6)))
    assert [answer.json()["pod"] for answer in answers] == ["pod-free"] * 6
    assert not strict.bodies
    assert running.gateway.native.ends["unauthorized"] >= 1


async def test_a_port_that_nobody_listens_on(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any
) -> None:
    dead, alive = await start_linked("pod-dead"), await start_linked("pod-alive")
    dead.link_address = "127.0.0.1:1"
    running = await start_gateway(dead, alive, link="Native")
    answers = await asyncio.gather(*(ask(running) for _ in range(6)))
    assert [answer.json()["pod"] for answer in answers] == ["pod-alive"] * 6
    assert running.gateway.native.ends["connect"] >= 1
    await running.idle()


async def test_a_worker_that_drains_says_so_first(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    going, staying = await start_linked("pod-going"), await start_linked("pod-staying")
    running = await start_gateway(going, staying, link="Native")
    await linked(running)
    assert going.listener is not None
    going.listener.drain()
    await until(lambda: running.gateway.scheduler.endpoints["pod-going"].level < 0, wait=WAIT)
    assert running.gateway.scheduler.endpoints["pod-going"].health.reason.value == "draining"
    assert (await ask(running)).json()["pod"] == "pod-staying"


async def test_samples_come_by_themselves(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    await until(lambda: running.gateway.telemetry_reads["link"] >= 3, wait=WAIT)
    sample, age = running.gateway.telemetry(worker.worker)
    assert sample == SAMPLE
    assert age < 5
    assert set(running.gateway.telemetry_reads) == {"link"}


async def test_requests_of_a_worker_that_left_run_on(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    pending = asyncio.create_task(ask(running, stream=True, seed=2))
    await until(lambda: worker.sent, wait=WAIT)
    running.apply()
    worker.release.set()
    assert (await pending).content.endswith(DONE)
    assert worker.listener is not None
    listener = worker.listener
    await until(lambda: listener.num_links == 0, wait=WAIT)


async def test_more_requests_than_a_worker_takes_go_to_others(
    start_linked: StartLinked, start_gateway: StartGateway
) -> None:
    workers = [await start_linked(f"pod-{number}") for number in range(2)]
    for worker in workers:
        assert worker.listener is not None
        worker.listener.max_streams = 2
    running = await start_gateway(*workers, link="Native")
    await linked(running)
    pending = [asyncio.create_task(ask(running, seed=1)) for _ in range(4)]
    await until(lambda: sum(worker.open for worker in workers) == 4, wait=WAIT)
    for worker in workers:
        worker.release.set()
    assert all(answer.status_code == 200 for answer in await asyncio.gather(*pending))


async def test_whatever_a_worker_sends_costs_its_link_alone(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any
) -> None:
    """Damaged, cut and late frames: no error that nobody catches, and every request is answered by the other worker."""
    chance = random.Random(11)
    head = link.encode_response_head(200, [(b"content-type", b"application/json")])

    async def damage(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = [link.encode_hello(link.Hello(max_streams=100)), link.encode(link.TELEMETRY, 0, b'{"pod": 1}')]
        for number in range(1, 4):
            frames += [link.encode(link.HEAD, number, head), link.encode_credit(number, 5)]
            frames += [link.encode(link.DATA, number, b"x" * 50), link.encode_reason(link.RESET, number, "why not")]
        data = bytearray(b"".join(frames[: chance.randrange(1, len(frames) + 1)]))
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        place = 0
        while place < len(data):
            size = chance.choice((1, 12, 40, 1000))
            writer.write(data[place : place + size])
            place += size
            await writer.drain()
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            await reader.read(65536)

    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    mad, sane = await start_linked("pod-mad"), await start_linked("pod-sane")
    mad.link_address = await start_impostor(damage)
    running = await start_gateway(mad, sane, link="Native", timeouts={"connect_seconds": 0.5})
    for _ in range(40):
        found = next(each for each in links_of(running) if each.worker.name == "pod-mad")
        found._retry_at, found._pause, found.refused = 0.0, 0.01, None
        answers = await asyncio.gather(*(ask(running) for _ in range(3)))
        for answer in answers:
            assert answer.status_code == 200
            # A damaged frame may end an answer of the mad worker, with what it sent; and it has an HTTP port.
            assert not answer.content.strip(b"x") or answer.json().get("pod") in (None, "pod-sane")
    assert not problems
    await running.idle()
