"""One request and its answer over a link, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol
from urllib.parse import unquote

from starlette.types import Message
from tandem_api import link
from tandem_api.link import Fields

Scope = dict[str, Any]


class StreamLink(Protocol):
    """The link that a stream is on."""

    blocked: bool
    """Its gateway takes nothing: more has been written than the socket holds."""

    def touch(self, stream: LinkStream) -> None:
        """It has something to send; at the end of this turn of the event loop it is asked for it."""
        ...

    def put(self, frame: bytes) -> None:
        """Send a frame at the end of this turn."""
        ...


class LinkStream:
    """A conversation of ASGI. What the application sends within one turn of the event loop leaves as one frame."""

    __slots__ = (
        "_body", "_body_ended", "_credit", "_head", "_is_head_request", "_last", "_parts", "_received", "_told",
        "_waiters", "_wire", "answering", "gone", "number",
    )  # fmt: skip

    def __init__(self, wire: StreamLink, number: int, *, method: bytes, body_follows: bool) -> None:
        self._wire = wire
        self.number = number
        self.gone = False
        """Nobody waits for the answer any more."""
        self.answering = False
        """The application has begun its answer."""
        self._is_head_request = method == b"HEAD"
        self._body: list[bytes] = []
        self._received = 0
        """Bytes of the body that are here and were not given to the application."""
        self._body_ended = not body_follows
        self._told = False
        """The application has the end of the body."""
        self._credit = link.WINDOW
        self._head = b""
        self._parts: list[bytes | memoryview] = []
        self._last = False
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def complete(self) -> bool:
        """The application has sent its answer to the end."""
        return self._last

    # the gateway's side

    def take_body(self, data: bytes, *, last: bool) -> None:
        """Raises LinkError where the gateway sends more than it may."""
        self._received += len(data)
        if self._body_ended or self._received > link.WINDOW:
            raise link.LinkError(f"stream {self.number} has more of a body than it may")
        if data:
            self._body.append(data)
        self._body_ended = last
        self.wake()

    def take_credit(self, count: int) -> None:
        """Raises LinkError where it is more than can have been taken."""
        self._credit += count
        if self._credit > link.WINDOW:
            raise link.LinkError(f"stream {self.number} is granted more than there is")
        self.wake()

    def leave(self) -> None:
        """The gateway wants no more of it."""
        self.gone = True
        self._parts.clear()
        self._body.clear()
        self.wake()

    def wake(self) -> None:
        """Whoever waits for the gateway looks again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def collect(self, out: list[bytes | memoryview]) -> None:
        """Add the frames of what was sent since the last call."""
        head, self._head = self._head, b""
        parts, self._parts = self._parts, []
        if self.gone:
            return
        if head:
            out.append(head)
        if parts or self._last:
            size = sum(map(len, parts))
            out.append(link.encode_header(link.DATA_LAST if self._last else link.DATA, self.number, size))
            out += parts

    # the application's side

    async def receive(self) -> Message:
        """ASGI's."""
        while not self.gone and not self._body and not (self._body_ended and not self._told) and not self._last:
            await self._changed()
        if self.gone or self._told or (self._last and not self._body):
            return {"type": "http.disconnect"}
        body, self._body = b"".join(self._body), []
        self._received = 0
        self._told = self._body_ended
        if not self._body_ended:
            self._wire.put(link.encode_credit(self.number, len(body)))
        return {"type": "http.request", "body": body, "more_body": not self._body_ended}

    async def send(self, message: Message) -> None:
        """ASGI's. Returns when the part may be sent: a gateway whose client is slow grants nothing."""
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self.answering = True
            fields: Fields = list(message["headers"])
            self._head = link.encode(link.HEAD, self.number, link.encode_response_head(message["status"], fields))
            self._wire.touch(self)
            return
        data: bytes | memoryview = b"" if self._is_head_request else message.get("body", b"")
        last = not message.get("more_body", False)
        while data and (len(data) > self._credit or self._wire.blocked):
            room = 0 if self._wire.blocked else self._credit
            if room:
                data = memoryview(data)  # what is left of a large answer is not copied for each part that leaves
                self._add(data[:room])
                data = data[room:]
            await self._changed()
            if self.gone:
                return
        if data:
            self._add(data)
        if last:
            self._last = True
            self._wire.touch(self)
            self.wake()

    def _add(self, data: bytes | memoryview) -> None:
        self._credit -= len(data)
        if not self._parts:
            self._wire.touch(self)
        self._parts.append(data)

    async def _changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter


def build_scope(method: bytes, target: bytes, fields: Fields, client: Any, server: Any) -> Scope:
    """What a server of HTTP tells the application."""
    raw_path, _, query = target.partition(b"?")
    path = raw_path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "server": server,
        "client": client,
        "root_path": "",
        "method": method.decode("ascii"),
        "path": unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "headers": fields,
        "state": {},
    }
