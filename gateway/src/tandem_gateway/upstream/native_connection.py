"""The socket of a native link, the calls on it, and what tells a worker that hangs from one that is slow.

All answers come over one connection, so nothing may ever stop its reading: a call whose client is slow keeps what
comes, at most `link.WINDOW` bytes, and grants the worker no more. What leaves within one turn of the event loop leaves
in one write.
"""

from __future__ import annotations

import asyncio
import re
from typing import Protocol, cast

from tandem_api import link
from tandem_api.link import FrameReader, Goodbye, Hello, LinkError

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.upstream.base import Failure, Sink
from tandem_gateway.upstream.http1_connection import HOP_BY_HOP, watch_peer

STALLED_SECONDS = 1.0
"""After so long between two looks at the clock it was this process that stood still, not the worker."""
UNANSWERED_SECONDS = 15.0
"""A worker that answers no ping for so long reads nothing, whatever it says."""
FAREWELL_SECONDS = 1.0
"""A worker has this long to take the reason for which its link is ended."""
_GRANT_AT = link.WINDOW // 2
_CODE = re.compile(r"([a-z]{1,16}): (.*)", re.DOTALL)
_KNOWN = frozenset(value for name, value in vars(Goodbye).items() if name.isupper())
_DATA, _DATA_LAST = link.DATA, link.DATA_LAST


class LinkEnded(Exception):
    """A link that did not come about, or is over."""

    def __init__(self, code: str, detail: str) -> None:
        """`code`: one of `Goodbye`, or `hung`, `closed`, `connect`, `local`, `stranger`."""
        super().__init__(detail)
        self.code = code


class Owner(Protocol):
    """The link that a connection belongs to."""

    def on_sample(self, payload: bytes) -> None: ...

    def on_drain(self) -> None: ...

    def on_idle(self, connection: LinkConnection) -> None:
        """Its last call has ended."""
        ...

    def on_lost(self, connection: LinkConnection, end: LinkEnded, calls: list[NativeCall]) -> None:
        """It is over after it had been greeted; the calls have not ended yet."""
        ...


class NativeCall:
    """One request on a stream. `sink` is None once the call has ended."""

    __slots__ = (
        "_held", "_last", "_paused", "answering", "body", "connection", "credit", "flows", "head", "number", "room",
        "sink",
    )  # fmt: skip

    def __init__(self, sink: Sink, head: bytes, body: bytes) -> None:
        self.sink: Sink | None = sink
        self.head = head
        self.body: bytes | memoryview = body
        """What has not been sent of it."""
        self.connection: LinkConnection | None = None
        self.number = 0
        self.credit = link.WINDOW
        """Bytes of the request that the worker takes now."""
        self.room = link.WINDOW
        """Bytes of the answer that the worker may send now."""
        self.answering = False
        """The head of the answer is here."""
        self.flows = False
        """The head is here, and what comes goes on at once."""
        self._paused = False
        self._held = bytearray()
        """What came while it did not."""
        self._last = False
        """It is all that comes."""

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    @property
    def resent(self) -> bool:
        return False

    def cancel(self) -> None:
        self.sink = None
        self.head = self.body = b""
        self._held.clear()
        if self.connection is not None:
            self.connection.drop(self)

    def fail(self, failure: Failure, detail: str) -> None:
        sink, self.sink = self.sink, None
        self.head = self.body = b""
        self.connection = None
        self._held.clear()
        if sink is not None:
            sink.on_upstream_failure(failure, detail)

    def pause_reading(self) -> None:
        self._paused = True
        self.flows = False

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            asyncio.get_running_loop().call_soon(self._release)

    def begin(self) -> None:
        """The head of the answer is here."""
        self.answering = True
        self.flows = not self._paused

    def take(self, data: bytes, *, last: bool) -> None:
        """A part of the answer. Raises LinkError where it may not come."""
        self.room -= len(data)
        if not self.answering or self.room < 0:
            raise LinkError(f"stream {self.number} has a part of an answer that it may not have")
        if self.flows:
            self._deliver(data, last=last)
            return
        self._held += data
        self._last = last

    def _release(self) -> None:
        """What was held back, unless the client is slow again."""
        if self._paused or self.flows or not self.answering or self.sink is None:
            return
        self.flows = True
        data = bytes(self._held)
        self._held.clear()
        self._deliver(data, last=self._last)

    def _deliver(self, data: bytes, *, last: bool) -> None:
        if last:
            self.connection = None
        elif self.room <= _GRANT_AT and self.connection is not None:
            self.connection.put(link.encode_credit(self.number, link.WINDOW - self.room))
            self.room = link.WINDOW
        if data and self.sink is not None:
            self.sink.on_upstream_body(data, final=last)
        if last:
            sink, self.sink = self.sink, None
            if sink is not None:
                sink.on_upstream_end()


class LinkConnection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, owner: Owner, hello: Hello) -> None:
        """`hello`: this gateway's greeting."""
        self._owner = owner
        self._hello = hello
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(link.FROM_WORKER)
        self.greeted: asyncio.Future[Hello] = self._loop.create_future()
        """Fails with LinkEnded."""
        self.calls: dict[int, NativeCall] = {}
        self._newest = 0
        self._out: list[bytes] = []
        self._flushing = False
        self._end: LinkEnded | None = None
        self._lost = False
        self._sample: bytes | None = None
        """The worker's newest, which waits for the clock: it may send as many as it likes."""
        self._silence = link.HUNG_SECONDS + min(link.PING_SECONDS, hello.telemetry_seconds)
        """When it began to be silent is known no better than by the last of what it says of its own accord."""
        self._heard_at = self._answered_at = self._ticked_at = self._pinged_at = self._loop.time()
        self._pings = 0
        self.ping_seconds: float | None = None
        """Between the last ping and its answer."""

    @property
    def ended(self) -> LinkEnded | None:
        return self._end

    @property
    def full(self) -> bool:
        """It has as many calls as the worker takes, or no more numbers for them."""
        return len(self.calls) >= self.greeted.result().max_streams or self._newest >= link.MAX_STREAM

    @property
    def worn(self) -> bool:
        """Another connection has to take its place."""
        return self._end is not None or self._newest >= link.MAX_STREAM

    def carry(self, call: NativeCall) -> None:
        """Send a call's request. It must be greeted, and not full."""
        self._newest = call.number = self._newest + 1
        call.connection = self
        self.calls[call.number] = call
        self._out.append(link.encode(link.REQUEST if call.body else link.REQUEST_LAST, call.number, call.head))
        call.head = b""
        if call.body:
            self._send_body(call)
        self._schedule()

    def drop(self, call: NativeCall) -> None:
        """Nobody wants its answer."""
        call.connection = None
        if self.calls.pop(call.number, None) is not None:
            self.put(link.encode(link.RESET, call.number))
            if not self.calls:
                self._owner.on_idle(self)

    def tick(self, now: float) -> None:
        """Called a few times a second: ask for signs of life, and end the link where there are none."""
        sample, self._sample = self._sample, None
        if sample is not None:
            self._owner.on_sample(sample)
        if now - self._ticked_at > STALLED_SECONDS:
            self._heard_at = self._answered_at = now  # what came meanwhile is still unread
        self._ticked_at = now
        if now - self._heard_at > self._silence:
            self.end(LinkEnded("hung", f"the worker gave no sign of life for {link.HUNG_SECONDS:g} s"), say=False)
        elif now - self._answered_at > UNANSWERED_SECONDS:
            self.end(LinkEnded("hung", f"the worker read nothing for {UNANSWERED_SECONDS:g} s"), say=False)
        elif now - self._pinged_at >= link.PING_SECONDS:
            self._pinged_at = now
            self._pings += 1
            self.put(link.encode(link.PING, 0, self._pings.to_bytes(link.PING_BYTES, "big")))

    def end(self, end: LinkEnded, *, say: bool = True) -> None:
        """Close it; `say` why."""
        if self._end is not None:
            return
        self._flush()
        self._end = end
        if say:
            self.transport.write(link.encode_reason(link.BYE, 0, f"{end.code}: {end}"))
            self.transport.close()
            self._loop.call_later(FAREWELL_SECONDS, self.transport.abort)
        else:
            self.transport.abort()
        # Its calls wait for nothing that the worker does; but the one that this is about has to return first.
        self._loop.call_soon(self._lose)

    def put(self, frame: bytes) -> None:
        """Send a frame at the end of this turn of the event loop."""
        self._out.append(frame)
        self._schedule()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        watch_peer(transport.get_extra_info("socket"))
        self.transport.write(link.encode_hello(self._hello))

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        calls = self.calls
        error = None
        try:
            for tag, number, payload in self._reader.feed(data):
                # This runs once per token.
                if (
                    tag == _DATA
                    and (call := calls.get(number)) is not None
                    and call.flows
                    and (room := call.room - len(payload)) > _GRANT_AT
                    and (sink := call.sink) is not None
                ):
                    call.room = room
                    sink.on_upstream_body(payload, final=False)
                elif self._end is None:
                    self._take(tag, number, payload)
        except LinkError as found:
            error = found
        error = error or self._reader.error
        if error is not None:
            self.end(LinkEnded(error.code, f"what came over the link is not of it: {error}"))

    def eof_received(self) -> None:
        """connection_lost follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._end = self._end or LinkEnded("closed", f"the worker closed the link{f' ({exc})' if exc else ''}")
        self._lose()

    def _lose(self) -> None:
        end = self._end
        assert end is not None
        if self._lost:
            return
        self._lost = True
        calls = list(self.calls.values())
        self.calls.clear()
        if not self.greeted.done():
            self.greeted.set_exception(end)
            self.greeted.exception()  # whoever waited may have gone
        elif not self.greeted.cancelled():
            self._owner.on_lost(self, end, calls)

    # frames

    def _take(self, tag: int, number: int, payload: bytes) -> None:
        """Everything but the middle of an answer. Raises LinkError."""
        if tag == link.HELLO:
            hello = link.read_hello(payload)
            if not self.greeted.done():
                self.greeted.set_result(hello)
        elif tag == link.PONG:
            self._answered_at = self._loop.time()
            if int.from_bytes(payload, "big") == self._pings:
                self.ping_seconds = self._loop.time() - self._pinged_at
        elif tag == link.TELEMETRY:
            self._sample = payload
        elif tag == link.DRAIN:
            self._owner.on_drain()
        elif tag == link.BYE:
            found = _CODE.fullmatch(link.read_reason(payload))
            code, text = found.groups() if found is not None else ("closed", "it says no why")
            self.end(LinkEnded(code if code in _KNOWN else "closed", f"the worker ended the link: {text}"), say=False)
        elif number > self._newest:
            raise LinkError(f"stream {number} has not begun")
        elif (call := self.calls.get(number)) is not None:
            self._take_of(call, tag, payload)

    def _take_of(self, call: NativeCall, tag: int, payload: bytes) -> None:
        """Raises LinkError."""
        if tag == link.HEAD:
            if call.answering:
                raise LinkError(f"stream {call.number} has two heads")
            status, fields = link.read_response_head(payload)
            call.begin()
            fields = [field for field in fields if field[0] not in HOP_BY_HOP]
            if call.sink is not None:
                call.sink.on_upstream_head(ResponseHead(status, fields, dict(fields)))
        elif tag == _DATA:
            call.take(payload, last=False)
        elif tag == _DATA_LAST:
            if call.answering:
                del self.calls[call.number]
            call.take(payload, last=True)
            if not self.calls:
                self._owner.on_idle(self)
        elif tag == link.CREDIT:
            call.credit += link.read_credit(payload)
            if call.credit > link.WINDOW:
                raise LinkError(f"stream {call.number} is granted more than there is")
            if call.body:
                self._send_body(call)
        else:  # RESET
            del self.calls[call.number]
            reason = link.read_reason(payload)
            failure = Failure.CONNECT if reason.startswith(link.NOT_BEGUN) and not call.answering else Failure.RESET
            call.fail(failure, f"the worker ended the request: {reason}")
            if not self.calls:
                self._owner.on_idle(self)

    def _send_body(self, call: NativeCall) -> None:
        """As much as the worker takes now. The body must not be empty."""
        body, count = call.body, min(call.credit, len(call.body))
        if not count:
            return
        last = count == len(body)
        self.put(link.encode_header(_DATA_LAST if last else _DATA, call.number, count))
        self._out.append(bytes(body) if last else bytes(memoryview(body)[:count]))
        call.body = b"" if last else memoryview(body)[count:]
        call.credit -= count

    def _schedule(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        out, self._out = self._out, []
        if out and self._end is None:
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))
