"""One client connection: hands its requests to the gateway one at a time and in order, writes what comes back.

While a request is being answered, reading never pauses, for a paused socket does not tell that its client went away,
and an abandoned generation costs a GPU; what a client sends ahead is kept unread, and one that sends too far ahead is
cut off. Between requests nobody waits for anything, so a client that sends faster than it reads is not read. Every
turn of the event loop does a bounded amount of one connection's work.

A client that closes its sending side has gone: nothing else tells a closed connection from a patient one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from ipaddress import IPv6Address, ip_address
from typing import Protocol, cast

from tandem_api.launch import GatewayTimeouts

from tandem_gateway.errors import BadRequest, GatewayFull, RequestError
from tandem_gateway.http.budget import UNCOUNTED_BYTES, Budget, Share
from tandem_gateway.http.reader import BODY, HEADER, IDLE, REFUSED, RequestReader
from tandem_gateway.http.request import MAX_HEADER_BYTES, Request
from tandem_gateway.http.response import CONTINUE

KEEP_ALIVE_SECONDS = 75.0
SETTLE_SECONDS = 1.0
"""After an answer that left the connection open: a client that asks again has done so by then."""
LINGER_SECONDS = 5.0
LINGER_BYTES = 64 * 1024 * 1024
"""After an error that ends the connection, input is read and dropped up to here: closing with unread input would reset
the connection and take the error with it."""
WRITE_BUFFER_BYTES = 64 * 1024
SOCKET_BYTES = 128 * 1024
"""The kernel keeps so much for a client that does not read, and counts it to the pod."""
SLICE_BYTES = 16 * 1024
"""Read at a time: the smallest requests are a few hundred to a slice."""
TURN_COST = 64
SLICE_COST = 8
"""What a slice takes of one turn of the event loop, in requests answered."""
MAX_UNREAD_BYTES = 64 * 1024
"""Kept of what a client sends between requests; the rest stays in the socket."""


class Bounds(Protocol):
    """What a connection may take."""

    timeouts: GatewayTimeouts
    max_body_bytes: int
    budget: Budget


class Handler(Protocol):
    """Who answers what comes over a connection."""

    @property
    def bounds(self) -> Bounds: ...

    def on_connect(self, connection: ClientConnection) -> None: ...

    def on_disconnect(self, connection: ClientConnection) -> None: ...

    def on_request(self, connection: ClientConnection, request: Request) -> None: ...

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None: ...


class Conversation(Protocol):
    """The exchange that a connection is busy with."""

    __slots__ = ()

    @property
    def held_bytes(self) -> int:
        """Kept in memory for it."""
        ...

    def stop(self, error: RequestError) -> None:
        """End it."""
        ...

    @property
    def delivering(self) -> bool:
        """Its answer is complete, and on its way."""
        ...

    def on_client_gone(self) -> None: ...

    def on_client_slow(self) -> None: ...

    def on_client_ready(self) -> None:
        """The client has taken everything that was written."""
        ...


class ClientConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._bounds = bounds = handler.bounds
        self.loop = asyncio.get_running_loop()
        self._reader = RequestReader(bounds.max_body_bytes)
        self._share = Share(bounds.budget, self)
        self._unread = bytearray()
        self._steps = 0
        self._scheduled = self._paused = self._ending = self._half_closed = False
        self._dropped = 0
        self._unsent_seen = 0
        self._taken_at = 0.0
        self.blocked = False
        """The client has not taken what was written, or not yet."""
        self.exchange: Conversation | None = None
        self.closed = False
        self.deadline = 0.0
        self.source = ""
        """Whom its client belongs to, as far as its address tells."""

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.source = read_source(transport.get_extra_info("peername"))
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES, low=0)
        with contextlib.suppress(OSError):
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES // 2)  # the kernel takes twice as much
        self.deadline = self.loop.time() + self._bounds.timeouts.header_seconds
        self._handler.on_connect(self)

    def data_received(self, data: bytes) -> None:
        reader, size = self._reader, len(data)
        if self._ending or reader.phase == REFUSED:
            self._drop(size)
            return
        if self.exchange is not None:
            self._unread += data
            if len(self._unread) > self._bounds.max_body_bytes + MAX_HEADER_BYTES or not self.account():
                self.transport.abort()
            return
        if not self._unread and not reader.ready:
            if size > SLICE_BYTES and size > reader.missing_bytes:
                # The rest is often the body that this slice begins, which needs no further care.
                self._read(data[:SLICE_BYTES])
                data = data[SLICE_BYTES:]
                size -= SLICE_BYTES
            if (size <= SLICE_BYTES or size <= reader.missing_bytes) and not reader.ready:
                self._read(data)
                size = 0
        if size:
            self._unread += data
        if self._scheduled:
            self._throttle()
        else:
            self._work()

    def eof_received(self) -> bool:
        self._half_closed = True
        exchange = self.exchange
        if exchange is None:
            return False
        if exchange.delivering:
            return True
        self.transport.abort()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.on_client_gone()
        self._unread.clear()
        self._share.hold(0)
        self._handler.on_disconnect(self)

    def pause_writing(self) -> None:
        self.blocked = True
        self._unsent_seen = self.unsent
        self._taken_at = self.loop.time()
        if self.exchange is not None:
            self.exchange.on_client_slow()

    def resume_writing(self) -> None:
        self.blocked = False
        if self.exchange is not None:
            self.exchange.on_client_ready()
        else:
            self.uncount()
            if not self._ending:
                self._schedule()

    # the gateway's side

    @property
    def unsent(self) -> int:
        """Bytes written that the kernel has not taken yet."""
        return 0 if self.closed else self.transport.get_write_buffer_size()

    def is_stuck(self, now: float) -> bool:
        """The client has taken nothing for as long as a worker may be silent."""
        unsent = self.unsent
        if unsent != self._unsent_seen:
            self._unsent_seen = unsent
            self._taken_at = now
        return unsent > 0 and now - self._taken_at >= self._bounds.timeouts.idle_seconds

    @property
    def refused_origin(self) -> bytes | None:
        """Origin of the page whose request could not be read, where its header tells."""
        return self._reader.refused_origin

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def refuse(self, error: RequestError) -> None:
        """Answer with `error` after what came before it, then end the connection."""
        self._reader.refuse(error)
        self._unread.clear()
        self._schedule()

    def finish(self, *, keep_alive: bool) -> None:
        """The current request is answered. Takes the next one, waits for it, or closes."""
        self.exchange = None
        if self.closed:
            return
        if not keep_alive or self._half_closed:
            self._end()
            return
        reader = self._reader
        if reader.ready or reader.refusal or self._unread:
            self._schedule()
        else:
            waiting = reader.phase == IDLE
            self.deadline = self.loop.time() + (KEEP_ALIVE_SECONDS if waiting else self._bounds.timeouts.body_seconds)
        if self._share.charged:
            self.account()

    def uncount(self) -> None:
        """Less is held than before."""
        if self._share.charged:
            self.account()

    def close_if_idle(self, now: float) -> bool:
        """Close a connection on which nobody asks. False where the next request may be on its way, after an answer."""
        reader = self._reader
        if self.closed or self.exchange is not None or reader.ready or self._unread or reader.phase != IDLE:
            return True
        if self.deadline - now > KEEP_ALIVE_SECONDS - SETTLE_SECONDS:
            return False
        self.transport.close()
        return True

    def tick(self, now: float) -> None:
        """Enforce the deadline of the phase that waits for the client. The exchange keeps its own."""
        if self.closed or self.exchange is not None:
            return
        if self.unsent and (self.blocked or self._ending):
            # The answers to what it sent come first: until it takes them it is neither late nor done.
            self.deadline = max(self.deadline, now + LINGER_SECONDS)
            if self.is_stuck(now):
                self.transport.abort()
            return
        if self._scheduled or now < self.deadline:
            return
        if self._ending or self._reader.phase == REFUSED:
            self.transport.abort()
        elif self._reader.phase == HEADER:
            self._time_out("the request header did not arrive in time")
        elif self._reader.phase == BODY:
            self._time_out("the request body did not arrive in time")
        else:
            self.transport.close()

    # work

    def _work(self) -> None:
        """A turn of reading and answering, then whatever is left in the next one, after everybody else's."""
        self._scheduled = False
        reader, cost = self._reader, 0
        while self.exchange is None and not (self.closed or self._ending or self.blocked):
            if cost >= TURN_COST:
                self._schedule()
                break
            if reader.ready:
                request = reader.ready.popleft()
                self._handler.on_request(self, request)
                cost += request.cost
            elif reader.refusal is not None:
                self._handler.on_refused(self, reader.refusal)
                self._end()
            elif reader.wants_continue:
                reader.wants_continue = False
                self.transport.write(CONTINUE)
            elif self._unread:
                cost += SLICE_COST
                size = max(SLICE_BYTES, reader.missing_bytes)
                data = bytes(self._unread[:size])
                del self._unread[:size]
                self._read(data)
            else:
                break
        if self._paused or self.blocked or self._unread:
            self._throttle()

    def _schedule(self) -> None:
        if not self._scheduled and not self.closed:
            self._scheduled = True
            self.loop.call_soon(self._work)

    def _read(self, data: bytes) -> None:
        reader = self._reader
        reader.feed(data)
        if reader.phase != IDLE and reader.steps != self._steps:
            self._steps = reader.steps
            timeouts = self._bounds.timeouts
            if reader.phase == HEADER:
                self.deadline = self.loop.time() + timeouts.header_seconds
            elif reader.phase == BODY:
                self.deadline = self.loop.time() + timeouts.body_seconds
        if (self._share.charged or len(data) + reader.body_bytes > UNCOUNTED_BYTES) and not self.account():
            reader.ready.clear()
            reader.refuse(GatewayFull("the gateway holds as many bytes as it may; try again shortly"))
            self.account()

    def account(self) -> bool:
        """Count what is held for this client. False when the gateway has no room for it."""
        exchange = self.exchange
        held = len(self._unread) + self._reader.body_bytes
        for request in self._reader.ready:
            held += len(request.body)
        if self.blocked or exchange is None:
            unsent = self.unsent
            held += unsent + (SOCKET_BYTES if unsent else 0)
        return self._share.hold(held if exchange is None else held + exchange.held_bytes)

    def leave(self) -> None:
        """Another client needs the connection, whose address has fewer."""
        if self.exchange is None:
            self.transport.abort()
            return
        self.exchange.stop(GatewayFull("the gateway has as many connections as it may, and most of this address"))
        self._end()

    def give_up(self) -> None:
        """Another client needs the room of what is held for this one, whose address holds most."""
        error = GatewayFull("the gateway holds as many bytes as it may, and most of them for this client's address")
        if self.exchange is not None:
            self.exchange.stop(error)
        else:
            self.refuse(error)
        if self.unsent > WRITE_BUFFER_BYTES:
            self.transport.abort()

    def _throttle(self) -> None:
        """Between requests: leave in the socket what would only be kept here."""
        pause = (
            self.exchange is None and not self._ending and (self.blocked or len(self._unread) > MAX_UNREAD_BYTES)
        )  # fmt: skip
        if pause != self._paused and not self.closed and not self.transport.is_closing():
            self._paused = pause
            self.transport.pause_reading() if pause else self.transport.resume_reading()

    def _time_out(self, message: str) -> None:
        self._reader.refuse(BadRequest(message, status=408, code="request_timeout"))
        self._work()

    def _end(self) -> None:
        """Close once the client has read the answer, or does not care to."""
        if self._ending:
            return
        self._ending = True
        if self.closed or self.transport.is_closing():
            return
        self._unread.clear()
        self._reader.ready.clear()
        self.account()
        self._throttle()
        self.deadline = self.loop.time() + LINGER_SECONDS
        self._unsent_seen = 0
        if self._half_closed:
            self.transport.close()
        elif self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, size: int) -> None:
        self._dropped += size
        if self._dropped > LINGER_BYTES:
            self.transport.abort()


def read_source(peer: tuple[str, ...] | None) -> str:
    """An IPv4 address, or the network of an IPv6 one, of which one client may have 2^64; empty where there is none."""
    try:
        address = ip_address(peer[0] if peer else "")
    except ValueError:
        return ""
    if isinstance(address, IPv6Address):
        return str(address.ipv4_mapped or IPv6Address(int(address) >> 64 << 64))
    return str(address)
