"""One gateway's link: frames in, requests to the application, everything that one turn of the event loop brought out in
one write.

A turn reads a bounded part of what one link sends, and nothing while its gateway takes nothing: what is answered waits
in memory, and whoever asks without reading would decide how much of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Coroutine
from typing import Any, Protocol, cast

import orjson
from starlette.types import ASGIApp
from tandem_api import link
from tandem_api.keys import KeyRing, admits
from tandem_api.link import Frame, FrameReader, Goodbye, LinkError
from tandem_api.openai import error_body

from tandem_worker.server.wire.link.stream import LinkStream, Scope, build_scope
from tandem_worker.server.wire.serving import MAX_HEADER_BYTES, MAX_HEADERS

MAX_UNSENT_BYTES = 256 * 1024
"""Beyond it nobody sends: the gateway, or the way to it, is slower than all streams together."""
SLICE_BYTES = 8 * 1024
"""Read in one turn of the event loop, besides the rest of a frame: two hundred of the smallest requests, twenty usual
ones. With fewer, the answers to those that came together would no longer leave in one write."""
_UNANSWERED_SECONDS = 15
_FAREWELL_SECONDS = 1.0
"""A gateway has this long to take the reason for which its link is ended."""
_log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The listener that a link belongs to."""

    app: ASGIApp
    name: str
    max_streams: int

    def ring(self) -> KeyRing:
        """Keys that are good now."""
        ...

    def on_open(self, connection: GatewayLink) -> bool:
        """False: there are too many."""
        ...

    def on_greeted(self, connection: GatewayLink) -> None:
        """It is a gateway's."""
        ...

    def on_end(self, connection: GatewayLink) -> None:
        """It is gone."""
        ...

    def take_place(self, connection: GatewayLink) -> str | None:
        """For one more request of this link; else why there is none."""
        ...

    def return_place(self) -> None:
        """One has ended."""
        ...

    def count(self, reason: str) -> bool:
        """A link was refused or ended for this reason. False: the log tells it often enough."""
        ...


class GatewayLink(asyncio.Protocol):
    """One gateway's link."""

    transport: asyncio.Transport

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(link.FROM_GATEWAY)
        self.streams: dict[int, LinkStream] = {}
        self.unfinished: dict[int, LinkStream] = {}
        """Those whose requests have not come to their end, oldest first."""
        self.blocked = False
        self.greeted = False
        self.name = ""
        """The gateway's."""
        self._token: str | None = None
        """The one that it has shown."""
        self.withdrawn_at: float | None = None
        """When its key had ceased to be good."""
        self.telemetry_seconds = link.TELEMETRY_SECONDS
        self.telemetry_due = 0.0
        self.heard_at = self._loop.time()
        self._newest = 0
        self._unread = b""
        """What came and waits for its turn."""
        self._paused = False
        self._out: list[bytes | memoryview] = []
        self._touched: list[LinkStream] = []
        self._flushing = False
        self._ended = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask for a place, and wait for a greeting."""
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_SECONDS * 1000)
        if not self._owner.on_open(self):
            self.end(Goodbye.FULL, "this worker has as many links as it may")
            return
        self._deadline = self._loop.call_later(link.HELLO_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        """Take what there is, or begin with it."""
        self.heard_at = self._loop.time()
        if len(data) <= SLICE_BYTES and not self._unread:
            self._read(data)
        else:
            # Reading has stopped where something waits, but for what was on its way.
            waits, self._unread = bool(self._unread), self._unread + data
            if not waits:
                self._work()

    def _work(self) -> None:
        """A slice of what waits, and the next one after everybody else's turn."""
        if self._ended:
            return
        size = max(SLICE_BYTES, self._reader.missing_bytes)
        data, self._unread = self._unread[:size], self._unread[size:]
        self._read(data)
        if self._unread:
            self._loop.call_soon(self._work)
        self._throttle()

    def _throttle(self) -> None:
        """Leave in the socket what would only be kept here."""
        pause = self.blocked or bool(self._unread)
        if pause != self._paused and not self._ended:
            self._paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _read(self, data: bytes) -> None:
        """Take the frames; what is none ends the link."""
        try:
            for frame in self._reader.feed(data):
                if self._ended:
                    return
                self._take(frame)
            if self._reader.error is not None:
                raise self._reader.error
        except LinkError as error:
            self.end(error.code, str(error))

    def pause_writing(self) -> None:
        """Nobody sends for now, and nobody is listened to."""
        self.blocked = True
        self._throttle()

    def resume_writing(self) -> None:
        """Those that wait go on. That the gateway takes something is a sign of life, too."""
        self.blocked = False
        self.heard_at = self._loop.time()
        self._throttle()
        for stream in tuple(self.streams.values()):
            stream.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody waits for its answers any more."""
        self._close()
        self._owner.on_end(self)

    # frames

    def _take(self, frame: Frame) -> None:
        """Raises LinkError."""
        tag, number, payload = frame
        if tag == link.CREDIT:
            stream = self._find(number)
            if stream is not None:
                stream.take_credit(link.read_credit(payload))
        elif tag in (link.DATA, link.DATA_LAST):
            stream = self._find(number)
            if stream is not None:
                stream.take_body(payload, last=tag == link.DATA_LAST)
                if tag == link.DATA_LAST:
                    self.unfinished.pop(number, None)
        elif tag in (link.REQUEST, link.REQUEST_LAST):
            self._begin(number, payload, body_follows=tag == link.REQUEST)
        elif tag == link.RESET:
            stream = self._find(number)
            if stream is not None:
                stream.leave()
        elif tag == link.PING:
            self.put(link.encode(link.PONG, 0, payload))
        elif tag == link.HELLO:
            self._greet(payload)
        else:  # BYE
            _log.info("a gateway ends its link", extra={"gateway": self.name, "reason": link.read_reason(payload)})
            self._close()
            self.transport.close()

    def _find(self, number: int) -> LinkStream | None:
        """None: it has ended here, which the gateway may not know yet. Raises LinkError."""
        if number > self._newest:
            raise LinkError(f"stream {number} has not begun")
        return self.streams.get(number)

    def _greet(self, payload: bytes) -> None:
        """Raises LinkError."""
        hello = link.read_hello(payload)
        if not admits(self._owner.ring(), hello.token):
            self.end(Goodbye.UNAUTHORIZED, "a worker takes links that show its model's key")
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self.greeted, self.name, self._token = True, hello.name, hello.token
        self.telemetry_seconds = hello.telemetry_seconds
        own = link.Hello(name=self._owner.name[:253], max_streams=self._owner.max_streams)
        self.put(link.encode_hello(own))
        self._owner.on_greeted(self)

    def _begin(self, number: int, payload: bytes, *, body_follows: bool) -> None:
        """Raises LinkError."""
        if number <= self._newest:
            raise LinkError(f"stream {number} begins after stream {self._newest}")
        self._newest = number
        method, target, fields = link.read_request_head(payload)
        reason = self._owner.take_place(self)
        if reason is not None:
            self._refuse(number, reason)
            return
        stream = LinkStream(self, number, method=method, body_follows=body_follows)
        self.streams[number] = stream
        if body_follows:
            self.unfinished[number] = stream
        if len(fields) > MAX_HEADERS or len(payload) > MAX_HEADER_BYTES:
            run = _refuse_headers(stream)
        else:
            scope = build_scope(method, target, fields, self._address("peername"), self._address("sockname"))
            run = self._run(stream, scope)
        task = self._loop.create_task(self._conclude(stream, run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, number: int, text: str) -> None:
        """Nobody has begun with it."""
        self.put(link.encode_reason(link.RESET, number, f"{link.NOT_BEGUN}{text}"))

    def give_up(self) -> bool:
        """End the oldest request that has not come to its end and has had no answer. False: there is none."""
        while self.unfinished:
            number = next(iter(self.unfinished))
            stream = self.unfinished.pop(number)
            if not stream.answering and not stream.gone:
                stream.leave()
                self._refuse(number, "this link has more requests than its share, and another one needs the place")
                return True
        return False

    def _address(self, side: str) -> tuple[Any, ...] | None:
        found = self.transport.get_extra_info(side)
        return found[:2] if found else None

    async def _run(self, stream: LinkStream, scope: Scope) -> None:
        await self._owner.app(scope, stream.receive, stream.send)

    async def _conclude(self, stream: LinkStream, run: Coroutine[Any, Any, None]) -> None:
        reason = "the answer broke off"
        try:
            await run
        except LinkError as error:
            reason = str(error)
            _log.error("an answer cannot be sent: %s", error)
        except Exception:
            # The application has told of it where it did not expect it, and half an answer is out.
            _log.exception("a request over the link failed")
        finally:
            if not stream.complete and not stream.gone:
                stream.leave()
                self.put(link.encode_reason(link.RESET, stream.number, reason))
            self._owner.return_place()
            self.streams.pop(stream.number, None)
            self.unfinished.pop(stream.number, None)
            self._leave_if_withdrawn()

    # keys

    def judge(self, ring: KeyRing, now: float) -> None:
        """These keys are good now. Without one of them the link ends, with the last of its answers: each request shows
        a key of its own, and is judged by that.
        """
        if admits(ring, self._token):
            self.withdrawn_at = None
        elif self.withdrawn_at is None:
            self.withdrawn_at = now
            self._leave_if_withdrawn()

    def _leave_if_withdrawn(self) -> None:
        if self.withdrawn_at is not None and not self.streams:
            self.end_unauthorized()

    def end_unauthorized(self) -> None:
        """Its gateway may greet anew, with a key that is good."""
        self.end(Goodbye.UNAUTHORIZED, "the key that this link has shown is no longer good")

    # sending

    def put(self, frame: bytes) -> None:
        """Send a frame at the end of this turn of the event loop."""
        if self._ended:
            return
        self._out.append(frame)
        self._schedule()

    def touch(self, stream: LinkStream) -> None:
        """Send what the stream has at the end of this turn."""
        self._touched.append(stream)
        self._schedule()

    def _schedule(self) -> None:
        # All requests that a step of the engine wakes send before this runs.
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        touched, self._touched = self._touched, []
        for stream in dict.fromkeys(touched):
            stream.collect(out)
        if out and not self._ended:
            self.transport.write(b"".join(out))

    # endings

    def end(self, code: str, text: str) -> None:
        """Say why, and close."""
        if self._ended:
            return
        if self._owner.count(code):
            peer = self.transport.get_extra_info("peername")
            _log.warning("a link was ended: %s", text, extra={"gateway": self.name, "peer": str(peer), "code": code})
        self._flush()
        self.transport.write(link.encode_reason(link.BYE, 0, f"{code}: {text}"))
        self._close()
        self.transport.close()
        self._loop.call_later(_FAREWELL_SECONDS, self.transport.abort)

    def _close(self) -> None:
        self._ended = True
        self._unread = b""
        if self._deadline is not None:
            self._deadline.cancel()
        for stream in tuple(self.streams.values()):
            stream.leave()

    def _too_slow(self) -> None:
        self.end("timeout", f"no HELLO within {link.HELLO_SECONDS:g} s")

    def cancel(self) -> None:
        """End what still runs, whatever it does."""
        for task in tuple(self._tasks):
            task.cancel()
        self.transport.abort()


async def _refuse_headers(stream: LinkStream) -> None:
    text = f"The request header is too large: at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} fields are read."
    body = orjson.dumps(error_body(text, kind="invalid_request_error", code="headers_too_large"))
    await stream.send(
        {"type": "http.response.start", "status": 431, "headers": [(b"content-type", b"application/json")]}
    )
    await stream.send({"type": "http.response.body", "body": body})
