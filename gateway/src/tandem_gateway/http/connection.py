"""One client connection: reads requests strictly and in order, hands each to the gateway, writes what comes back.

One request is answered at a time; requests that a client pipelines wait in `_ready`. Reading never pauses, for a
paused socket does not tell that its client went away, and an abandoned generation costs a GPU. Instead a client that
sends too far ahead is cut off, which bounds what it can make the gateway hold. A client that closes its sending side
has gone: nothing else tells a closed connection from a patient one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from enum import IntEnum
from typing import Protocol, cast

import httptools
from tandem_api.launch import GatewayTimeouts

from tandem_gateway.errors import BadRequest, RequestError
from tandem_gateway.http.request import (
    MAX_HEADER_BYTES,
    HeaderReader,
    Request,
    build_plain_head,
    header_too_large,
    too_large,
)
from tandem_gateway.http.response import CONTINUE

KEEP_ALIVE_SECONDS = 75.0
LINGER_SECONDS = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""After an error that ends the connection, input is read and dropped up to here: closing with unread input would reset
the connection and take the error with it."""
WRITE_BUFFER_BYTES = 64 * 1024


class Phase(IntEnum):
    IDLE = 0
    HEADER = 1
    BODY = 2
    DISCARD = 3


class Handler(Protocol):
    """What a connection needs of the gateway."""

    timeouts: GatewayTimeouts
    max_body_bytes: int

    def on_connect(self, connection: ClientConnection) -> None: ...

    def on_disconnect(self, connection: ClientConnection) -> None: ...

    def on_request(self, connection: ClientConnection, request: Request) -> None: ...

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None: ...


class Conversation(Protocol):
    """The exchange that a connection is busy with."""

    def on_client_gone(self) -> None: ...

    def on_client_slow(self) -> None: ...

    def on_client_ready(self) -> None: ...


class ClientConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._ready: deque[Request | RequestError] = deque()
        self._header = HeaderReader(handler.max_body_bytes)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._phase = Phase.IDLE
        self._dropped = 0
        self._ahead = 0
        self._upgrading = False
        self._messages = 0
        self.exchange: Conversation | None = None
        self.closed = False
        self.deadline = 0.0

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.deadline = self._loop.time() + self._handler.timeouts.header_seconds
        self._handler.on_connect(self)

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.DISCARD:
            self._drop(len(data))
            return
        if self.exchange is not None:
            self._ahead += len(data)
            if self._ahead > self._handler.max_body_bytes + MAX_HEADER_BYTES:
                self.transport.abort()
                return
        before = self._messages
        self._feed(data)
        if self._phase is Phase.HEADER and self._messages == before:
            # All of this read belongs to the unfinished header.
            self._header.received += len(data)
            if self._header.received > MAX_HEADER_BYTES:
                self._refuse(header_too_large())
        if self._ready or self.exchange is not None:
            self._advance()

    def eof_received(self) -> bool:
        if self.exchange is not None:
            self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._ready.clear()
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_client_gone()
        self._handler.on_disconnect(self)

    def pause_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.on_client_slow()

    def resume_writing(self) -> None:
        if self.exchange is not None:
            self.exchange.on_client_ready()

    # httptools

    def on_message_begin(self) -> None:
        if self._phase is Phase.DISCARD:
            return
        self._phase = Phase.HEADER
        self._header = HeaderReader(self._handler.max_body_bytes)
        self._body = []
        self._body_bytes = 0
        self.deadline = self._loop.time() + self._handler.timeouts.header_seconds

    def on_url(self, url: bytes) -> None:
        self._header.add_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header.add(name, value)

    def on_headers_complete(self) -> None:
        if self._phase is Phase.DISCARD:
            return
        header = self._header
        header.finish(http10=self._parser.get_http_version() == "1.0")
        if header.refusal is not None:
            self._refuse(header.refusal)
            return
        self._phase = Phase.BODY
        self.deadline = self._loop.time() + self._handler.timeouts.body_seconds
        self._upgrading = self._parser.should_upgrade()
        if b"expect" in header.kept and self.exchange is None:
            self.transport.write(CONTINUE)

    def on_body(self, body: bytes) -> None:
        if self._phase is Phase.DISCARD:
            self._dropped += len(body)
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._handler.max_body_bytes:
            self._refuse(too_large(self._handler.max_body_bytes))
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._messages += 1
        if self._phase is Phase.DISCARD or self._upgrading:
            return
        header = self._header
        http10 = self._parser.get_http_version() == "1.0"
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        path = header.url.partition(b"?")[0].decode("latin-1")
        keep_alive = not http10 and self._parser.should_keep_alive()
        self._ready.append(Request(self._parser.get_method(), path, header.kept, body, keep_alive, http10))
        self._body = []
        self._phase = Phase.IDLE

    # the gateway's side

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def finish(self, *, keep_alive: bool) -> None:
        """The current request is answered. Takes the next one, waits for it, or closes."""
        self.exchange = None
        if self.closed:
            return
        if not keep_alive:
            self._linger()
            return
        if self._ready:
            # On a fresh stack: a long pipeline must not become a deep recursion.
            self._loop.call_soon(self._advance)
        elif self._phase is Phase.DISCARD:
            self._linger()
        else:
            self._ahead = 0
            waiting = self._phase is Phase.IDLE
            self.deadline = self._loop.time() + (KEEP_ALIVE_SECONDS if waiting else self._handler.timeouts.body_seconds)

    def close_if_idle(self) -> None:
        if self.exchange is None and not self._ready and self._phase is Phase.IDLE:
            self.transport.close()

    def tick(self, now: float) -> None:
        """Enforce the deadline of the phase that waits for the client. The exchange keeps its own."""
        if self.exchange is not None or self._ready or now < self.deadline or self.closed:
            return
        if self._phase is Phase.HEADER:
            self._time_out("the request header did not arrive in time")
        elif self._phase is Phase.BODY:
            self._time_out("the request body did not arrive in time")
        else:
            self.transport.abort() if self._phase is Phase.DISCARD else self.transport.close()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._phase is not Phase.DISCARD:
                self._decline_upgrade(data[offer.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(BadRequest(f"the request is not valid HTTP: {error}"))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read the request as if it had offered nothing: some clients offer HTTP/2 with every first request.

        The parser stops at such an offer, before the body; a fresh one gets the same header without it.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(BadRequest("this is not a proxy"))
            return
        self._parser = httptools.HttpRequestParser(self)
        self._feed(build_plain_head(method, self._header) + rest)

    def _time_out(self, message: str) -> None:
        self._refuse(BadRequest(message, status=408, code="request_timeout"))
        self._advance()

    def _advance(self) -> None:
        """Start the next request if none runs."""
        while self._ready and self.exchange is None and not self.closed:
            item = self._ready.popleft()
            if isinstance(item, Request):
                self._handler.on_request(self, item)
            else:
                self._handler.on_refused(self, item)
                self._linger()
                return

    def _refuse(self, error: RequestError) -> None:
        """Answer with `error` after what came before it, then end the connection: its framing is not to be trusted."""
        self._stop_reading()
        self._ready.append(error)

    def _stop_reading(self) -> None:
        self._phase = Phase.DISCARD
        self._body = []

    def _linger(self) -> None:
        """Close once the client has read the answer, or does not care to."""
        if self.closed or self.transport.is_closing():
            return
        self._ready.clear()
        self._phase = Phase.DISCARD
        self.deadline = self._loop.time() + LINGER_SECONDS
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self.transport.abort()
