"""Gateways over native links: to the worker's own listener with an application of the test's, and to what is none."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tandem_api import link
from tandem_api.keys import KeyRing, open_ring
from tandem_api.link import FrameReader
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_gateway.http import budget
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream import native, native_connection
from tandem_gateway.upstream.native import NativeLink
from tandem_gateway.upstream.native_connection import LinkConnection, LinkEnded
from tandem_worker.server.wire.gate import TokenGate
from tandem_worker.server.wire.link.listener import LinkListener

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
    pod_name: str = ""
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
        return replace(super().worker, link_address=self.link_address, pod_name=self.pod_name)

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
    # Without the certificates of the world, which take longer to read than the request does.
    async with httpx.AsyncClient(timeout=WAIT, verify=False) as client:
        return await client.post(f"{running.url}/v1/chat/completions", json=chat(**fields))


def links_of(running: Any) -> list[NativeLink]:
    return [found for found in running.gateway.upstreams.links.values() if isinstance(found, NativeLink)]


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


async def test_a_slow_client_stops_its_own_stream_alone(
    start_linked: StartLinked, start_gateway: StartGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "FREE_BYTES", 0)
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
    await until(lambda: running.gateway.budget.used >= slow.held_bytes, wait=WAIT)
    assert worker.open == 1
    received = bytearray()
    async with asyncio.timeout(120):
        while not received.endswith(b"0\r\n\r\n"):
            part = await reader.read(2**20)
            assert part, "the answer broke off"
            received += part
    assert received.count(b'"content"') == 150_000
    await running.idle()
    assert running.gateway.budget.used == 0


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


async def carry_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
    """To the worker that has taken the place of the impostor."""
    host, _, port = address.rpartition(":")
    back_reader, back_writer = await asyncio.open_connection(host, int(port))

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        finally:
            target.close()

    await asyncio.gather(copy(reader, back_writer), copy(back_reader, writer))


async def test_a_worker_of_another_version_that_is_replaced_at_its_address_is_linked(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "REFUSED_FIRST", 0.05)
    worker, replaced, tries = await start_linked(), False, 0
    address = worker.link_address

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal tries
        tries += 1
        await (carry_on(reader, writer, address) if replaced else speak_version_2(reader, writer))

    worker.link_address = await start_impostor(behave)
    running = await start_gateway(worker, link="Native")
    (found,) = links_of(running)
    await until(lambda: tries >= 3, wait=WAIT)
    assert (await ask(running)).status_code == 200
    assert (len(worker.received), found.state) == (1, "http_version")
    replaced = True
    await until(lambda: found.state == "native", wait=WAIT)
    assert (await ask(running)).status_code == 200
    assert (len(worker.received), len(worker.bodies)) == (1, 1)
    await running.idle()


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
    await until(lambda: running.server.telemetry.reads["link"] >= 3, wait=WAIT)
    sample, age = running.server.telemetry.sample(worker.worker)
    assert sample == SAMPLE
    assert age < 5
    assert set(running.server.telemetry.reads) == {"link"}


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


HELLO = link.encode_hello(link.Hello(max_streams=100))
OK_HEAD = link.encode(link.HEAD, 1, link.encode_response_head(200, [(b"content-type", b"application/json")]))


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ([OK_HEAD, OK_HEAD], "two heads"),
        ([link.encode(link.DATA_LAST, 1, b"{}")], "a part of an answer that it may not have"),
        ([link.encode(link.DATA, 77, b"x")], "stream 77 has not begun"),
        ([OK_HEAD, *[link.encode(link.DATA, 77, b"x")] * 1000], "stream 77 has not begun"),
        ([link.encode_credit(1, 2**32 - 1)], "granted more than there is"),
        ([link.encode_header(link.TELEMETRY, 0, 100_000_000)], "TELEMETRY of 100000000 bytes"),
        ([link.encode(link.HEAD, 1, b"100\r\n")], "not a status and headers"),
        ([link.encode(link.HEAD, 1, b"200\r\na: b\r\rc: d\r\n")], "not a status and headers"),
        ([HELLO], "second HELLO"),
    ],
)
async def test_what_a_worker_may_not_send(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any, lie: Any, problem: str, caplog: Any
) -> None:
    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        frames = FrameReader(link.FROM_GATEWAY)
        while data := await reader.read(65536):
            if any(frame[0] in (link.REQUEST, link.REQUEST_LAST) for frame in frames.feed(data)):
                writer.write(b"".join(lie))

    liar, honest = await start_linked("pod-liar"), await start_linked("pod-honest")
    liar.link_address = await start_impostor(behave)
    running = await start_gateway(liar, honest, link="Native")
    await linked(running)
    answers = await asyncio.gather(*(ask(running) for _ in range(4)))
    assert [answer.json()["pod"] for answer in answers] == ["pod-honest"] * 4
    assert running.gateway.native.ends["protocol"] >= 1
    assert any(problem in str(getattr(record, "reason", "")) for record in caplog.records)
    await running.idle()


class Owner:
    """Of a connection whose other end is the test's."""

    def __init__(self) -> None:
        self.lost: list[LinkEnded] = []
        self.samples: list[bytes] = []

    def on_sample(self, payload: bytes) -> None:
        self.samples.append(payload)

    def on_drain(self) -> None: ...

    def on_idle(self, connection: LinkConnection) -> None: ...

    def on_lost(self, connection: LinkConnection, end: LinkEnded, calls: list[Any]) -> None:
        self.lost.append(end)


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[tuple[LinkConnection, Owner, socket.socket]]]]:
    sockets: list[socket.socket] = []

    async def make(**hello: Any) -> tuple[LinkConnection, Owner, socket.socket]:
        ours, theirs = socket.socketpair()
        sockets.append(theirs)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        owner = Owner()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: LinkConnection(owner, link.Hello(**hello)), sock=ours)
        theirs.sendall(HELLO)
        async with asyncio.timeout(WAIT):
            await connection.greeted
        return connection, owner, theirs

    yield make
    for each in sockets:
        each.close()


async def test_calls_do_not_wait_for_a_worker_that_takes_no_goodbye(connect: Any) -> None:
    connection, owner, _ = await connect()
    connection.put(link.encode(link.RESET, 1, bytes(500)) * 4000)
    await asyncio.sleep(0.05)
    assert connection.transport.get_write_buffer_size()
    connection.end(LinkEnded("protocol", "a test says so"))
    assert connection.worn, "no call may begin on it"
    await asyncio.sleep(0)
    assert [end.code for end in owner.lost] == ["protocol"]
    await asyncio.sleep(native_connection.FAREWELL_SECONDS + 0.2)
    assert not connection.transport.get_write_buffer_size()
    assert len(owner.lost) == 1


@pytest.mark.parametrize(
    ("telemetry_seconds", "silence", "hung"),
    [(0.25, 3.2, False), (0.25, 3.4, True), (2.5, 3.9, False), (2.5, 4.2, True)],
)
async def test_how_long_a_worker_may_be_silent(
    connect: Any, telemetry_seconds: float, silence: float, hung: bool
) -> None:
    """3 s, and as long before as it may last have said something."""
    connection, owner, _ = await connect(telemetry_seconds=telemetry_seconds)
    heard_at = connection._heard_at
    for step in range(int(10 * silence) + 1):
        connection.tick(heard_at + step / 10)
    await asyncio.sleep(0)
    assert [end.code for end in owner.lost] == ["hung"] * hung


async def test_a_worker_that_talks_and_reads_nothing_hangs(connect: Any) -> None:
    connection, owner, _ = await connect()
    now = connection._heard_at
    for step in range(int(10 * native_connection.UNANSWERED_SECONDS) + 2):
        connection._heard_at = now + step / 10
        connection.tick(now + step / 10)
        if owner.lost:
            break
    await asyncio.sleep(0)
    assert [str(end) for end in owner.lost] == ["the worker read nothing for 15 s"]


async def test_samples_are_taken_as_often_as_the_clock_ticks(connect: Any) -> None:
    connection, owner, theirs = await connect()
    theirs.sendall(b"".join(link.encode(link.TELEMETRY, 0, b"%05d" % number) for number in range(5000)))
    theirs.sendall(link.encode(link.DRAIN))
    await asyncio.sleep(0.2)
    assert not owner.samples
    for _ in range(3):
        connection.tick(connection._heard_at)
    assert owner.samples == [b"04999"]


async def test_another_pod_at_the_address(start_linked: StartLinked, start_gateway: StartGateway) -> None:
    right, wrong = await start_linked("pod-a", pod_name="pod-a"), await start_linked("pod-c", pod_name="pod-b")
    running = await start_gateway(right, wrong, link="Native")
    answers = await asyncio.gather(*(ask(running) for _ in range(6)))
    assert [answer.json()["pod"] for answer in answers] == ["pod-a"] * 6
    assert running.gateway.native.ends["stranger"] >= 1
    assert not wrong.bodies
    assert not wrong.received
    await running.idle()


async def test_a_worker_that_leaves_while_it_is_linked_hears_of_its_requests(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any
) -> None:
    """Else it would end the link after 15 s."""
    greet, pinged = asyncio.Event(), asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet.wait()
        writer.write(HELLO)
        frames = FrameReader(link.FROM_GATEWAY)
        while data := await reader.read(65536):
            for tag, _, _ in frames.feed(data):
                if tag == link.PING:
                    pinged.set()
                    writer.write(link.encode(link.HEAD, 1, link.encode_response_head(200, [])))
                    writer.write(link.encode(link.DATA_LAST, 1, b"{}"))

    worker = await start_linked()
    worker.link_address = await start_impostor(behave)
    running = await start_gateway(worker, link="Native", timeouts={"connect_seconds": 20})
    (found,) = links_of(running)
    pending = asyncio.create_task(ask(running))
    await until(lambda: found._waiting, wait=WAIT)
    running.apply()
    greet.set()
    async with asyncio.timeout(WAIT):
        await pinged.wait()
    assert (await pending).json() == {}
    await running.idle()


async def test_keys_that_are_withdrawn_from_a_linked_gateway(
    start_linked: StartLinked, start_gateway: StartGateway, tmp_path: Path
) -> None:
    old, new = (KeyRing(primary=name, keys={name: bytes([number]) * 32}) for number, name in enumerate("ab"))
    rings = {"pod-a": old, "pod-b": old}
    (tmp_path / "api.json").write_text(old.encode())
    workers = [await start_linked(name, ring=lambda name=name: rings[name]) for name in rings]
    for worker in workers:
        assert worker.listener is not None
        worker.listener.app = TokenGate(worker.answer, worker.ring)
    running = await start_gateway(*workers, link="Native", keys_path=str(tmp_path))
    await linked(running)
    assert {(await ask(running)).status_code for _ in range(4)} == {200}
    rings["pod-a"] = new
    answers = [await ask(running) for _ in range(6)]
    assert {answer.json()["pod"] for answer in answers} == {"pod-b"}
    (tmp_path / "api.json").write_text(KeyRing(primary="b", keys=dict(old.keys) | dict(new.keys)).encode())
    rings["pod-b"] = new
    async with asyncio.timeout(WAIT):
        while (await ask(running)).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await running.idle()


async def test_a_rotation_of_keys_costs_no_request(
    start_linked: StartLinked, start_gateway: StartGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway greets anew as soon as it has another key, and what runs over the former link ends there."""
    monkeypatch.setattr(link, "GATEWAY_SILENCE_SECONDS", 2.5)
    keys = {name: bytes([number]) * 32 for number, name in enumerate("ab")}
    old = KeyRing(primary="a", keys={"a": keys["a"]})
    rings, file = [old], tmp_path / "api.json"
    file.write_text(old.encode())
    worker = await start_linked(ring=lambda: rings[-1])
    listener = worker.listener
    assert listener is not None
    listener.app = TokenGate(worker.answer, worker.ring)
    running = await start_gateway(worker, link="Native", keys_path=str(tmp_path))
    await linked(running)
    stream = asyncio.create_task(ask(running, stream=True, seed=2))
    await until(lambda: worker.sent, wait=WAIT)
    (first,) = listener._links
    statuses: Counter[int] = Counter()
    stop = asyncio.Event()

    async def keep_asking() -> None:
        while not stop.is_set():
            statuses[(await ask(running)).status_code] += 1

    asking = asyncio.create_task(keep_asking())
    rings.append(KeyRing(primary="a", keys=keys))
    file.write_text(KeyRing(primary="b", keys=keys).encode())
    await until(lambda: listener.num_links == 2, wait=WAIT)
    rings.append(KeyRing(primary="b", keys={"b": keys["b"]}))
    file.write_text(rings[-1].encode())
    await until(lambda: first.withdrawn_at is not None, wait=WAIT)
    await asyncio.sleep(4)  # longer than a gateway may be silent over a link
    worker.release.set()
    assert (await stream).content.endswith(DONE)
    await until(lambda: listener.num_links == 1, wait=WAIT)
    assert first not in listener._links
    before = statuses[200]
    await until(lambda: statuses[200] > before + 5, wait=WAIT)
    stop.set()
    await asking
    assert set(statuses) == {200}
    assert not running.gateway.metrics.retries
    await running.idle()


async def test_a_gateway_that_is_behind_with_its_key_is_linked_once_it_has_the_new_one(
    start_linked: StartLinked, start_gateway: StartGateway, tmp_path: Path
) -> None:
    old, new = (KeyRing(primary=name, keys={name: bytes([number]) * 32}) for number, name in enumerate("ab"))
    rings = [old]
    (tmp_path / "api.json").write_text(old.encode())
    worker = await start_linked(ring=lambda: rings[-1])
    listener = worker.listener
    assert listener is not None
    running = await start_gateway(worker, link="Native", keys_path=str(tmp_path))
    await linked(running)
    rings.append(new)
    await until(lambda: running.gateway.native.ends["unauthorized"] >= 2, wait=WAIT)
    assert listener.num_links == 0
    (found,) = links_of(running)
    found._pause = found._retry_at = 1e9  # it has been behind for long
    (tmp_path / "api.json").write_text(new.encode())
    await linked(running)
    assert (await ask(running)).status_code == 200


async def test_the_end_of_a_link_under_a_hundred_requests(
    start_linked: StartLinked, start_gateway: StartGateway
) -> None:
    """Those that nobody has seen begin are answered by the other worker; streams that had begun are told."""
    workers = [await start_linked(f"pod-{number}") for number in range(2)]
    running = await start_gateway(*workers, link="Native")
    await linked(running)
    seeds = [1, 2] * 50
    pending = [asyncio.create_task(ask(running, stream=seed == 2, seed=seed)) for seed in seeds]
    await until(lambda: sum(worker.open for worker in workers) == 100, wait=WAIT)
    await until(lambda: sum(each.first_byte_at > 0 for each in running.gateway.exchanges) == 50, wait=WAIT)
    dead, other = workers
    assert dead.open
    other.release.set()
    assert dead.listener is not None
    (gone,) = dead.listener._links
    gone.transport.abort()
    answers = await asyncio.gather(*pending)
    told = [answer for answer in answers if b'data: {"error"' in answer.content]
    assert all(answer.status_code == 200 for answer in answers)
    for seed, answer in zip(seeds, answers, strict=True):
        assert answer in told or (answer.json()["pod"] == other.name if seed == 1 else answer.content.endswith(DONE))
    assert 0 < len(told) < 50
    await running.idle()
    await until(lambda: not dead.open, wait=WAIT)


async def test_no_byte_of_a_clients_header_breaks_the_link(
    start_linked: StartLinked, start_gateway: StartGateway
) -> None:
    worker = await start_linked()
    running = await start_gateway(worker, link="Native")
    await linked(running)
    body = json.dumps(chat()).encode()
    values = [bytes([number]) for number in range(256)] + [
        b"",
        b"a\r\n b",
        b"a\r\n\tb",
        b"a\rb",
        b"a\nb: c",
        b"x" * 20_000,
    ]
    statuses: Counter[bytes] = Counter()
    for value in values:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntracestate: a" + value
        answer = await running.raw(head + b"z\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        statuses[answer[9:12]] += 1
    trailers = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n"
    )
    chunked = b"connection: close\r\n\r\n%x\r\n%b\r\n0\r\nx-tandem-prefill: y\r\na: b\r\n\r\n" % (len(body), body)
    answer = await running.raw(trailers + chunked)
    assert b" 200 " in answer
    assert set(statuses) <= {b"200", b"400"}
    assert statuses[b"200"] > 200
    assert not running.gateway.native.ends
    assert (await ask(running)).status_code == 200
    await running.idle()


async def test_an_answer_in_tiny_parts_takes_the_room_of_its_bytes(
    start_linked: StartLinked, start_gateway: StartGateway, start_impostor: Any
) -> None:
    text = json.dumps({"choices": [{"text": "x" * 50_000}]}).encode()
    finish = asyncio.Event()

    async def behave(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HELLO)
        await reader.readuntil(b"content-length")
        parts = [text[start : start + 2] for start in range(0, len(text), 2)]
        writer.write(OK_HEAD + b"".join(link.encode(link.DATA, 1, part) for part in parts))
        await finish.wait()
        writer.write(link.encode(link.DATA_LAST, 1))
        await reader.read(1)

    worker = await start_linked()
    worker.link_address = await start_impostor(behave)
    running = await start_gateway(worker, link="Native")
    await linked(running)
    pending = asyncio.create_task(ask(running))
    await until(lambda: any(each.held_size == len(text) for each in running.gateway.exchanges), wait=WAIT)
    (exchange,) = running.gateway.exchanges
    assert sum(map(sys.getsizeof, exchange.held)) < 2 * len(text)
    finish.set()
    assert (await pending).content == text
    await running.idle()
