"""One socket to a worker, and the strict reading of what it answers.

An answer that is followed by anything, in the same read or while the connection is idle, was complete all the same; but
the connection is closed, for the next answer on it would begin with those bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from typing import Protocol, cast

import httptools

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.upstream.base import Failure, Sink

WRITE_JOIN_BYTES = 64 * 1024
"""Head and body up to this size leave in one write; copying larger ones would cost more than a second one."""
MAX_HEAD_BYTES = 64 * 1024
"""Bytes of fields and trailers, and of anything else that a worker sends without a part of an answer's body."""
_TOO_LARGE = "header too large"
RECEIVE_BYTES = 64 * 1024
"""Bytes of an answer in the kernel, which takes twice as much: a hundred times what a step of the engine writes."""
KEEPALIVE_SECONDS = 5
UNANSWERED_SECONDS = 15.0
"""A machine that acknowledges nothing for this long has gone: neither what was sent to it, nor a look whether it is
still there, which an otherwise silent connection gets every KEEPALIVE_SECONDS."""
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"proxy-connection", b"upgrade", b"trailer")
)


class Owner(Protocol):
    """The pool that a connection belongs to."""

    def release(self, connection: WorkerConnection, now: float) -> None: ...

    def forget(self, connection: WorkerConnection) -> None: ...


class Carried(Protocol):
    """A call, as the connection that carries it sees it."""

    sink: Sink | None
    head: bytes
    body: bytes
    connection: WorkerConnection | None
    paused: bool

    def fail(self, failure: Failure, detail: str) -> None: ...

    def restart(self) -> None:
        """This connection was dead before it carried anything: another one, a fresh one."""
        ...

    def forget_request(self) -> None: ...

    def resume_reading(self) -> None: ...


class _Surplus(Exception):
    """Something follows a complete answer."""


class WorkerConnection(asyncio.Protocol):
    """The callbacks named `on_*` are httptools'."""

    transport: asyncio.Transport

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._call: Carried | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._length: int | None = None
        self._head_bytes = 0
        self._fruitless = 0
        """Bytes of reads in a row that brought neither a whole header nor a part of a body: a single field without end
        never reaches `on_header`."""
        self._chunked = False
        self._reused = False
        """It carries a call, not the first one, of whose answer nothing has come."""
        self._answering = False
        self._complete = False
        self._reusable = False
        self._head: ResponseHead | None = None
        self._body: list[bytes] = []
        self.on_body = self._body.append
        """httptools calls it with every part of a body."""
        self._parser = httptools.HttpResponseParser(self)
        self.idle_since = 0.0

    def is_quiet(self) -> bool:
        """The worker has neither closed this idle connection nor sent anything over it that was not read yet."""
        return not self.transport.is_closing() and not self._poll.poll(0)

    def carry(self, call: Carried, *, reused: bool) -> None:
        """Send a call's request. The connection must be idle."""
        self._call = call
        call.connection = self
        self._reused = reused
        self._answering = self._complete = self._chunked = False
        self._length = None
        self._head_bytes = self._fruitless = 0
        if len(call.body) <= WRITE_JOIN_BYTES:
            self.transport.write(call.head + call.body)
        else:
            self.transport.write(call.head)
            self.transport.write(call.body)
        if not reused:
            call.forget_request()

    def abort(self) -> None:
        self._call = None
        self.transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        self._poll.register(sock.fileno(), select.POLLIN)
        watch_peer(sock, bounded=True)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:
            # Bytes that nobody asked for: whatever they are, the next answer must not begin with them.
            self._owner.forget(self)
            self.transport.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._refuse(call, _say(error))
                return
            self._reusable = False
        if self._body or self._head is not None or self._complete:
            self._fruitless = 0
        else:
            self._fruitless += len(data)
            if self._fruitless > MAX_HEAD_BYTES:
                self._refuse(call, _TOO_LARGE)
                return
        self._deliver(call)
        if self._complete and self._call is not None:
            self._finish(call)

    def eof_received(self) -> None:
        """The worker closed its side; connection_lost follows and tells whether the answer was complete."""

    def connection_lost(self, exc: Exception | None) -> None:
        call, self._call = self._call, None
        if call is None:
            self._owner.forget(self)
            return
        until_close = self._answering and self._length is None and not self._chunked
        if until_close and exc is None:
            sink, call.sink = call.sink, None
            if sink is not None:
                sink.on_upstream_end()
        elif self._reused:
            call.restart()
        else:
            call.fail(Failure.RESET, f"the worker closed the connection{f' ({exc})' if exc else ''}")

    def _refuse(self, call: Carried, detail: str) -> None:
        """What goes on like this is no answer."""
        self._deliver(call)
        self.abort()
        call.fail(Failure.PROTOCOL, f"the worker's answer is not HTTP: {detail}")

    def _deliver(self, call: Carried) -> None:
        """Everything that one read brought goes on in one piece, outside the parser's callbacks."""
        head, parts, sink = self._head, self._body, call.sink
        if head is not None:
            self._head = None
            call.head = call.body = b""
            if sink is not None:
                sink.on_upstream_head(head)
                sink = call.sink
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if sink is not None:
                sink.on_upstream_body(data, final=self._complete)

    def _finish(self, call: Carried) -> None:
        """A complete answer: the connection is free before the exchange hears of it, for it may start the next call."""
        self._call = None
        if call.paused:
            call.resume_reading()
        call.connection = None
        if self._reusable:
            self._owner.release(self, self._loop.time())
        else:
            self.transport.abort()
        sink, call.sink = call.sink, None
        if sink is not None:
            sink.on_upstream_end()

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            raise _Surplus
        self._reused = False  # the worker has read the request: from here on its end is the worker's end

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(_TOO_LARGE)
        if self._answering:
            return  # a trailer: the client has the header already
        name = name.lower()
        if name not in HOP_BY_HOP:
            self._headers.append((name, value))
        elif name == b"content-length":
            self._length = int(value)
        elif name == b"transfer-encoding":
            self._chunked = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status >= 200:
            self._answering = True
            self._head = ResponseHead(status, headers, dict(headers))
        elif status == 101:
            raise ValueError("it switches protocols, which nobody asked for")

    def on_message_complete(self) -> None:
        self._complete = self._answering
        self._reusable = self._parser.should_keep_alive()  # the parser forgets it when it returns


def watch_peer(sock: socket.socket, *, bounded: bool = False) -> None:
    """Let the kernel notice a machine that has gone; small writes leave at once. `bounded`: it carries one answer, and
    is to hold little of it for a client that does not read."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNANSWERED_SECONDS * 1000))
        if bounded:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)


def _say(error: Exception) -> str:
    """The parser wraps what a callback raises."""
    return str(error.__context__ or error)
