"""A gateway in the test's own loop, in front of workers that behave as a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tandem_api.launch import GatewayConfig, GatewayTimeouts
from tandem_api.names import Role
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.scheduling import Worker

from tests.ports import free_port

sys.path.insert(0, str(Path(__file__).parent))  # `processes`, for the tests that need real ones
from processes import launch, launch_worker  # noqa: F401

MODEL = "toy"


@dataclass
class Received:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.body)


async def until(condition: Callable[[], object], *, wait: float = 60.0) -> None:
    """Return as soon as `condition` holds. `wait` ends what hangs: no test is about it."""
    async with asyncio.timeout(wait):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event to wait on)
            await asyncio.sleep(0.005)


Behaviour = Callable[["FakeWorker", Received, asyncio.StreamWriter], Awaitable[None]]


def event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class FakeWorker:
    """An OpenAI server for one connection at a time per client; `behaviours` are used up first, then `default`."""

    name: str
    behaviours: list[Behaviour] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    connections: int = 0
    """Over which a request of a test came."""
    cancelled: int = 0
    """Connections that the gateway closed while an answer was under way."""
    answering: int = 0
    port: int = 0
    role: Role = Role.DECODE
    revision: str = "r1"
    default: Behaviour | None = None
    card: dict[str, Any] | None = None
    """What it says of its model to the gateway, which asks of its own accord: no request of a test."""
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port or free_port())
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def is_connected(self) -> bool:
        return bool(self._tasks)

    @property
    def worker(self) -> Worker:
        return Worker(name=self.name, address=f"127.0.0.1:{self.port}", role=self.role, revision=self.revision)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_counted = False
        while True:
            request = await self._read(reader)
            if (request.method, request.path) == ("GET", "/v1/models"):
                await send_json(writer, 200 if self.card else 404, {"object": "list", "data": [self.card]})
                continue
            self.connections += not is_counted
            is_counted = True
            self.received.append(request)
            behaviour = self.behaviours.pop(0) if self.behaviours else self.default or answer
            self.answering += 1
            watch = asyncio.create_task(reader.read(1))
            work = asyncio.create_task(behaviour(self, request, writer))
            try:
                await asyncio.wait({watch, work}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    self.cancelled += 1
                    return
                work.result()
            finally:
                self.answering -= 1
                for task in (watch, work):
                    task.cancel()
                await asyncio.gather(watch, work, return_exceptions=True)
            if writer.is_closing():
                return

    @staticmethod
    async def _read(reader: asyncio.StreamReader) -> Received:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.split("\r\n")
        headers = {key.lower(): value.strip() for key, _, value in (item.partition(":") for item in fields if item)}
        method, path, _ = line.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Received(method, path, headers, body)


async def send_json(writer: asyncio.StreamWriter, status: int, payload: object, *headers: str) -> None:
    body = json.dumps(payload).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    await writer.drain()


def begin_stream(worker: FakeWorker, writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        b"x-tandem-decode-worker: %b\r\n\r\n" % worker.name.encode()
    )


def token(index: int) -> bytes:
    return event(
        {
            "id": "c1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": MODEL,
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": f"t{index} "}, "finish_reason": None}],
        }
    )


def usage(request: Received, count: int) -> dict[str, Any]:
    prompt = max(1, len(request.body) // 8)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": count,
        "total_tokens": prompt + count,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def answer(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
    """What a healthy worker does."""
    body = request.json
    count = body.get("max_tokens") or 4
    if not body.get("stream"):
        text = "".join(f"t{index} " for index in range(count))
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "text": text, "finish_reason": "stop"}
        payload = {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
        await send_json(writer, 200, payload | {"usage": usage(request, count)}, "x-tandem-decode-worker: pod-d")
        return
    begin_stream(worker, writer)
    for index in range(count):
        writer.write(chunk(token(index)))
        await writer.drain()
        await asyncio.sleep(0)
    if (body.get("stream_options") or {}).get("include_usage"):
        last = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": []}
        writer.write(chunk(event(last | {"usage": usage(request, count)})))
    writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


class Behaviours:
    """Faults, by name."""

    answer = staticmethod(answer)

    @staticmethod
    async def die(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    @staticmethod
    async def hang(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    @staticmethod
    async def drain(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await send_json(writer, 503, {"error": {"message": "draining"}}, "x-tandem-retry: 1")

    @staticmethod
    async def garbage(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\x16\x03\x01 this is not HTTP\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(3600)

    @staticmethod
    def stream(tokens: int, *, then: str, partial: bytes = b"", pause: float = 0.0) -> Behaviour:
        """Some tokens, then `die`, `hang`, `eof` (a clean end without [DONE]) or `error` (the worker's own)."""

        async def behave(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
            begin_stream(worker, writer)
            for index in range(tokens):
                writer.write(chunk(token(index)))
                await writer.drain()
                await asyncio.sleep(pause)
            if partial:
                writer.write(chunk(partial))
            await writer.drain()
            await asyncio.sleep(0.02)
            if then == "die":
                writer.transport.abort()
            elif then == "hang":
                await asyncio.sleep(3600)
            elif then == "error":
                writer.write(
                    chunk(event({"error": {"message": "out of memory", "type": "server_error"}})) + b"0\r\n\r\n"
                )
            else:
                writer.write(b"0\r\n\r\n")

        return behave

    @staticmethod
    async def drip(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        """A healthy stream that arrives byte by byte."""
        begin_stream(worker, writer)
        data = b"".join(chunk(token(index)) for index in range(3)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        for position in range(len(data)):
            writer.write(data[position : position + 1])
            await writer.drain()
            await asyncio.sleep(0)

    @staticmethod
    def flood(sent: list[int]) -> Behaviour:
        """Tokens as fast as the gateway takes them; `sent` counts the bytes."""

        async def behave(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
            begin_stream(worker, writer)
            data = chunk(token(0)) * 64
            while True:
                writer.write(data)
                await writer.drain()
                sent.append(len(data))

        return behave


@dataclass
class Running:
    """A gateway under test."""

    server: Server
    workers: list[FakeWorker]
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    @property
    def port(self) -> int:
        return self.server.http_port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def gateway(self):
        return self.server.gateway

    def apply(self, *workers: FakeWorker) -> None:
        self.server.apply_workers([worker.worker for worker in workers])

    async def idle(self) -> None:
        """Wait until nothing is in flight, then check that every counter is back at zero."""
        await until(lambda: not self.gateway.exchanges and not any(worker.answering for worker in self.workers))
        for endpoint in self.gateway.scheduler.endpoints.values():
            assert (endpoint.requests, endpoint.prefill_tokens, endpoint.decode_tokens) == (0, 0, 0)

    async def raw(self, data: bytes, *, wait: float = 60.0) -> bytes:
        """Send bytes, and everything that comes back until the gateway closes or `wait` has passed."""
        reader, writer = await self.connect()
        writer.write(data)
        received = b""
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(wait):
                while part := await reader.read(65536):
                    received += part
        writer.transport.abort()
        return received

    async def connect(self, *, limit: int = 65536) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        self.writers.append(writer)
        return reader, writer


StartGateway = Callable[..., Awaitable[Running]]


@pytest.fixture
def fault() -> type[Behaviours]:
    return Behaviours


@pytest.fixture
async def start_worker() -> AsyncIterator[Callable[..., Awaitable[FakeWorker]]]:
    started: list[FakeWorker] = []

    async def start(name: str = "pod-d", **fields: Any) -> FakeWorker:
        worker = FakeWorker(name, **fields)
        await worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.stop()


@pytest.fixture
async def start_gateway() -> AsyncIterator[StartGateway]:
    """Start a gateway over fake workers. At the end it must be alive and idle."""
    running: list[Running] = []

    async def start(*workers: FakeWorker, timeouts: dict[str, float] | None = None, **fields: Any) -> Running:
        config = GatewayConfig(
            namespace="default",
            disaggregated=any(worker.role is Role.PREFILL for worker in workers),
            http_port=0,
            metrics_port=0,
            timeouts=GatewayTimeouts(**(timeouts or {})),
            **{"model_name": MODEL, "served_name": MODEL, **fields},
        )
        dummy = Worker(name="none", address="127.0.0.1:1", role=Role.DECODE, revision="r1")
        told = Settings(
            config=config,
            host="127.0.0.1",
            workers=tuple(worker.worker for worker in workers) or (dummy,),
            workers_file=None,
            lame_duck_seconds=0.0,
            log_level="info",
            access_log=False,
        )
        server = Server(told)
        await server.start()
        await asyncio.sleep(0)
        found = Running(server, list(workers))
        if not workers:
            found.apply()
        running.append(found)
        return found

    yield start
    for found in running:
        for writer in found.writers:
            writer.transport.abort()
        await found.idle()
        assert not found.server._stopping.is_set(), "a part of the gateway has failed"
        await found.server.stop()


def chat_request(*, stream: bool = False, headers: str = "", **fields: Any) -> bytes:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields})
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{headers}content-length: {len(body)}\r\n\r\n{body}"
    ).encode()


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Awaitable[None]]:
    return until


@pytest.fixture
async def connect() -> AsyncIterator[Callable[[int], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]]:
    """Opens connections to a local port that are gone when the test ends."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writers.append(writer)
        return reader, writer

    yield open_one
    for writer in writers:
        writer.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
def chat() -> Callable[..., bytes]:
    """Builds a chat request as raw bytes."""
    return chat_request
