"""Runs an application on a socket, and can be stopped; the two ports of a process. Signals are the business of whoever
starts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import orjson
import uvicorn
from starlette.types import ASGIApp
from tandem_api.launch import WorkerConfig
from tandem_api.openai import error_body
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tandem_worker.host.errors import StartupError

_log = logging.getLogger(__name__)
HEADER_TIMEOUT_SECONDS = 10.0
"""A client must have sent its complete header within this time."""
MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 128
"""Fields of a request, trailers included, as the gateway takes them. Kept as Python's objects, `a: b` takes forty times
as much memory as it has bytes, and nobody has shown a key yet."""
KEEP_ALIVE_SECONDS = 75
MAX_CONNECTIONS = 4096
_METRICS_CONNECTIONS = 128
"""The kubelet and a few scrapers; one connection each."""


class _HeadersTooLargeError(Exception):
    """Raised inside the parser, so that it stops."""


class WorkerProtocol(HttpToolsProtocol):
    """Adds a deadline and a size for request headers, a bound on connections, and OpenAI's error shape where the parser
    refuses.

    When there are too many connections, the one that has been idle for longest makes room, and where none is idle one
    whose client does not take its answer: strangers use up neither descriptors nor places.
    """

    open: OrderedDict[WorkerProtocol, None]
    """This server's connections, the least recently used first. Each server has its own."""
    limit = MAX_CONNECTIONS
    busy_give_way = False
    """The one that was answered first gives way where none does otherwise: for short answers, which can be had again. A
    probe then gets in whatever others do."""
    _deadline: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """Received since the last header, piece of a body or message that was complete."""
    _num_headers = 0

    def connection_made(self, transport: Any) -> None:
        """Count the connection, close another one when there are too many, and start the deadline for headers."""
        super().connection_made(transport)
        if len(self.open) >= self.limit:
            self._make_room()
        self.open[self] = None
        self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and stop its timers."""
        self.open.pop(self, None)
        self._stop_deadline()
        super().connection_lost(exc)
        # uvicorn leaves this to a connection that ended in order. One that was reset would keep itself, and what it had
        # read, until the time for its next request is over.
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        """Note that this connection was the last one in use: others are closed before it."""
        super().on_response_complete()
        if self in self.open:
            self.open.move_to_end(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_stuck(self) -> bool:
        """Whether more has been written than its client has read."""
        return self.flow.write_paused

    def _make_room(self) -> None:
        """For this connection; where all others are being answered, and read, this one has to go."""
        idle = (other for other in self.open if other.is_idle)
        stuck = (other for other in self.open if other.is_stuck)
        victim = next(idle, None) or next(stuck, None) or (next(iter(self.open)) if self.busy_give_way else self)
        self.open.pop(victim, None)
        victim.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Refuse the request when its headers grow beyond MAX_HEADER_BYTES."""
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """A request begins: its headers have to arrive before the deadline."""
        super().on_message_begin()
        self._num_headers = 0
        self._start_deadline()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Refuse the request when it has more than MAX_HEADERS headers, or one that is too large."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS or len(name) + len(value) > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise _HeadersTooLargeError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End the deadline and the count of bytes for headers: neither applies to the body."""
        self._stop_deadline()
        self._head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """What follows a body counts as headers of the next request, from 0."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """What comes next counts as headers of the next request, from 0."""
        self._head_bytes = 0
        super().on_message_complete()

    def _start_deadline(self) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        message = f"The request header was not complete after {HEADER_TIMEOUT_SECONDS:g} s."
        self._refuse(b"408 Request Timeout", orjson.dumps(error_body(message, kind="timeout_error")))

    def _refuse_headers(self) -> None:
        limits = f"{MAX_HEADER_BYTES} bytes and {MAX_HEADERS} fields"
        message = f"The request header is too large: at most {limits} are read."
        error = error_body(message, kind="invalid_request_error", code="headers_too_large")
        self._refuse(b"431 Request Header Fields Too Large", orjson.dumps(error))

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in OpenAI's error shape; `msg`, the parser's own words, is not sent."""
        text = "The request is not valid HTTP/1.1."
        self._refuse(
            b"400 Bad Request", orjson.dumps(error_body(text, kind="invalid_request_error", code="invalid_http"))
        )

    def _refuse(self, status: bytes, body: bytes) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()  # it would be read as a part of the answer that is on its way
            return
        lines = [
            b"HTTP/1.1 " + status,
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        self.transport.close()


class RunningServer:
    """A server that is accepting connections."""

    def __init__(
        self, server: uvicorn.Server, task: asyncio.Task[None], port: int, connections: Collection[WorkerProtocol]
    ) -> None:
        """`connections`: those that are open."""
        self._server = server
        self._task = task
        self._connections = connections
        self.port = port

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Stop accepting, let running responses end for `grace_seconds`, then cut them off."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_seconds))
        self._server.should_exit = True
        await self._task
        for connection in list(self._connections):  # whoever does not read what was written keeps one open
            connection.transport.abort()
        await asyncio.sleep(0)

    async def wait(self) -> None:
        """Until the server has ended. Raises what ended it."""
        await asyncio.shield(self._task)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    backlog: int = 2048,
    max_connections: int = MAX_CONNECTIONS,
    busy_give_way: bool = False,
) -> RunningServer:
    """Start serving; returns when connections are accepted. `port` 0 takes a free one. Raises OSError."""
    # Bound here because uvicorn answers a taken port with sys.exit.
    listener = _bind(host, port)
    connections = OrderedDict[WorkerProtocol, None]()
    settings = {"open": connections, "limit": max_connections, "busy_give_way": busy_give_way}
    config = uvicorn.Config(
        app,
        http=type("ServerProtocol", (WorkerProtocol,), settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=backlog,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    listening = asyncio.create_task(server.listening.wait())
    await asyncio.wait({task, listening}, return_when=asyncio.FIRST_COMPLETED)
    listening.cancel()
    if task.done():
        listener.close()
        await task
    return RunningServer(server, task, listener.getsockname()[1], connections)


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPorts:
    api: RunningServer
    status: RunningServer

    async def close(self) -> None:
        """Probes are answered until the last request is."""
        await self.api.stop()
        await self.status.stop()


async def open_ports(config: WorkerConfig, host: str, *, api: ASGIApp, status: ASGIApp) -> HttpPorts:
    """Raises StartupError when a port is taken. A quarter of the process's descriptors is never a port's."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = descriptors if descriptors >= 0 else 1 << 20
    # Whoever keeps all of its connections busy must not keep the kubelet out: it would restart the worker.
    few = min(_METRICS_CONNECTIONS, most // 4)
    watching = await _open(status, host, config.metrics_port, few, busy_give_way=True)
    try:
        serving = await _open(api, host, config.http_port, min(MAX_CONNECTIONS, most // 2))
    except StartupError:
        await watching.stop()
        raise
    return HttpPorts(api=serving, status=watching)


async def _open(
    app: ASGIApp, host: str, port: int, max_connections: int, *, busy_give_way: bool = False
) -> RunningServer:
    try:
        return await serve(app, host, port, max_connections=max_connections, busy_give_way=busy_give_way)
    except OSError as error:
        raise StartupError("PortInUse", f"Port {port} cannot be opened at {host}: {error}") from error
