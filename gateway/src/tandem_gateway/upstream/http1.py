"""The plain HTTP/1.1 link to one worker: a pool of kept-alive connections, one call on each at a time.

A connection returns to the pool only after a complete answer that allows reuse; every other end closes it. Cancelling
a call closes its connection, which is how a worker learns that the client went away.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import cast

import httptools

from tandem_gateway.upstream.base import Failure, ResponseHead, Sink

IDLE_SECONDS = 15.0
MAX_IDLE = 256
WRITE_JOIN_BYTES = 64 * 1024
"""Head and body up to this size leave in one write; copying larger ones would cost more than a second one."""
MAX_HEAD_BYTES = 64 * 1024
_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"proxy-connection", b"upgrade", b"trailer")
)


class Http1Link:
    """The connections between this gateway and one worker."""

    def __init__(self, address: str, *, connect_seconds: float) -> None:
        host, _, port = address.rpartition(":")
        self.host = host.strip("[]")
        self.port = int(port)
        self._connect_seconds = connect_seconds
        self._idle: list[_Connection] = []
        self._closed = False
        self._dials: set[asyncio.Task[None]] = set()

    def start(self, sink: Sink, head: bytes, body: bytes) -> Http1Call:
        call = Http1Call(sink, head, body)
        if self._idle:
            self._idle.pop().carry(call, reused=True)
        else:
            # The set keeps the task alive: the event loop holds only a weak reference.
            task = asyncio.get_running_loop().create_task(self._dial(call))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)
        return call

    async def _dial(self, call: Http1Call) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(lambda: _Connection(self), self.host, self.port)
        except TimeoutError:
            call.fail(Failure.CONNECT, f"no connection within {self._connect_seconds:g} s")
            return
        except OSError as error:
            call.fail(Failure.CONNECT, error.strerror or str(error))
            return
        if call.sink is None:
            connection.abort()
            return
        connection.carry(call, reused=False)

    def release(self, connection: _Connection, now: float) -> None:
        """Back into the pool, youngest last: reuse keeps few connections warm and lets the others age out."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def reap(self, now: float) -> None:
        while self._idle and self._idle[0].idle_since < now - IDLE_SECONDS:
            self._idle.pop(0).abort()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


class Http1Call:
    """One request on one connection. `sink` is None once the call has ended."""

    __slots__ = ("body", "connection", "head", "paused", "sink")

    def __init__(self, sink: Sink, head: bytes, body: bytes) -> None:
        self.sink: Sink | None = sink
        self.head = head
        self.body = body
        self.connection: _Connection | None = None
        self.paused = False

    def cancel(self) -> None:
        self.sink = None
        if self.connection is not None:
            self.connection.abort()

    def fail(self, failure: Failure, detail: str) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_upstream_failure(failure, detail)

    def pause_reading(self) -> None:
        if self.connection is not None and not self.paused:
            self.paused = True
            self.connection.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.connection is not None and self.paused:
            self.paused = False
            self.connection.transport.resume_reading()


class _Connection(asyncio.Protocol):
    """A socket to a worker and the parser of what it answers. The callbacks named `on_*` are httptools'."""

    transport: asyncio.Transport

    def __init__(self, link: Http1Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._call: Http1Call | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._length: int | None = None
        self._head_bytes = 0
        self._chunked = False
        self._reused = False
        self._answering = False
        self._complete = False
        self._reusable = False
        self._head: ResponseHead | None = None
        self._body: list[bytes] = []
        self.idle_since = 0.0

    def carry(self, call: Http1Call, *, reused: bool) -> None:
        """Send a call's request. The connection must be idle."""
        self._call = call
        call.connection = self
        self._reused = reused
        self._answering = self._complete = self._chunked = False
        self._length = None
        self._head_bytes = 0
        if len(call.body) <= WRITE_JOIN_BYTES:
            self.transport.write(call.head + call.body)
        else:
            self.transport.write(call.head)
            self.transport.write(call.body)
        # The exchange keeps the body for retries; this reference would keep it for the whole answer.
        call.head = call.body = b""

    def abort(self) -> None:
        self._call = None
        self.transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Bytes that nobody asked for: whatever they are, the next answer must not begin with them.
            self._link.forget(self)
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._deliver(call)
            self.abort()
            call.fail(Failure.PROTOCOL, f"the worker's answer is not HTTP: {error}")
            return
        self._deliver(call)
        if self._complete:
            self._finish(call)

    def eof_received(self) -> None:
        """The worker closed its side; connection_lost follows and tells whether the answer was complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        call, self._call = self._call, None
        if call is None:
            self._link.forget(self)
            return
        until_close = self._answering and self._length is None and not self._chunked
        if until_close and exc is None:
            self._conclude(call)
        elif self._reused and not self._answering:
            call.fail(Failure.STALE, "an idle connection had been closed")
        else:
            call.fail(Failure.RESET, f"the worker closed the connection{f' ({exc})' if exc else ''}")

    def _deliver(self, call: Http1Call) -> None:
        """Everything that one read brought goes on in one piece, outside the parser's callbacks."""
        if self._head is not None:
            head, self._head = self._head, None
            if call.sink is not None:
                call.sink.on_upstream_head(head)
        parts = self._body
        if parts:
            self._body = []
            if call.sink is not None:
                data = parts[0] if len(parts) == 1 else b"".join(parts)
                call.sink.on_upstream_body(data, final=self._complete)

    def _finish(self, call: Http1Call) -> None:
        """A complete answer: the connection is free before the exchange hears of it, for it may start the next call."""
        if self._call is None:
            return
        self._call = None
        if call.paused:
            call.resume_reading()
        call.connection = None
        if self._reusable:
            self._link.release(self, self._loop.time())
        else:
            self.transport.abort()
        self._conclude(call)

    @staticmethod
    def _conclude(call: Http1Call) -> None:
        sink, call.sink = call.sink, None
        if sink is not None:
            sink.on_upstream_end()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("header too large")
        name = name.lower()
        if name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True
        if name not in _HOP_BY_HOP:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status >= 200:
            self._answering = True
            self._head = ResponseHead(status, headers, self._length)

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._answering
        self._reusable = self._parser.should_keep_alive()  # the parser forgets it when it returns
