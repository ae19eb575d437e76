"""Frames of the native link: what a gateway and a worker say to each other over their one connection.

Every frame has a header of 12 bytes, in network order: version, kind, flags (16 bits), stream, length of the payload. A
stream is one request and its answer; stream 0 is the link itself. Each side greets first (`HELLO`), and takes nothing
before the other's greeting; a gateway's says who asks.

A side may send `WINDOW` bytes of a stream's `DATA` ahead, and more as the other grants it (`CREDIT`): a stream that
nobody takes stands still by itself, and costs its receiver no more than that. What a frame may not be ends the link,
with a `BYE` that says why.

Nothing here knows sockets. Both sides feed what they read to a `FrameReader`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from struct import Struct

from pydantic import Field

from tandem_api.base import Wire

VERSION = 1
WINDOW = 64 * 1024
"""Bytes of a stream's body that may be on their way, in each direction."""
MAX_PAYLOAD = WINDOW
MAX_HELLO = 4096
MAX_TELEMETRY = 16 * 1024
MAX_REASON = 512
MAX_STREAM = 2**32 - 1
PING_SECONDS = 1.0
"""A gateway asks for a sign of life so often."""
HUNG_SECONDS = 3.0
"""A worker that has said nothing for so long, neither an answer nor one to a ping, hangs."""
GATEWAY_SILENCE_SECONDS = 15.0
"""A gateway that has not even asked for a sign of life for so long has gone: its requests are ended."""
HELLO_SECONDS = 5.0
"""Whoever connects must have greeted within this time."""
TELEMETRY_SECONDS = 0.25
"""Between two samples of a worker, at least."""

_HEADER = Struct("!III")
_CREDIT = Struct("!I")
HEADER_BYTES = _HEADER.size
_LAST = 1
PING_BYTES = 8


def _tag(kind: int, flags: int = 0) -> int:
    """The first four bytes of a header, as one number."""
    return VERSION << 24 | kind << 16 | flags


HELLO = _tag(1)
REQUEST = _tag(2)
"""The head of a request, as in HTTP/1.1; its body follows in `DATA`."""
REQUEST_LAST = _tag(2, _LAST)
"""The same of a request without body."""
HEAD = _tag(3)
"""Status and headers of the answer."""
DATA = _tag(4)
DATA_LAST = _tag(4, _LAST)
"""The end of a body. May be empty."""
RESET = _tag(5)
"""The stream has ended before its end, for the reason given. Of a gateway: its client has gone."""
CREDIT = _tag(6)
"""So many more bytes of the stream's body may be sent."""
PING = _tag(7)
PONG = _tag(8)
TELEMETRY = _tag(9)
"""The worker's sample, as `GET /telemetry` gives it."""
DRAIN = _tag(10)
"""The worker takes no new requests and finishes those it has."""
BYE = _tag(11)
"""The link ends: a code of `Goodbye`, a colon and a sentence."""

_NAMES = {
    1: "HELLO", 2: "REQUEST", 3: "HEAD", 4: "DATA", 5: "RESET", 6: "CREDIT", 7: "PING", 8: "PONG", 9: "TELEMETRY",
    10: "DRAIN", 11: "BYE",
}  # fmt: skip

Rule = tuple[int, int, bool]
"""What a kind of frame may be: the least and the most bytes of payload, and whether it belongs to a stream."""
Frame = tuple[int, int, bytes]
"""One of the kinds above, the stream, the payload."""

_COMMON: dict[int, Rule] = {
    DATA: (1, MAX_PAYLOAD, True),
    DATA_LAST: (0, MAX_PAYLOAD, True),
    RESET: (0, MAX_REASON, True),
    CREDIT: (4, 4, True),
    BYE: (0, MAX_REASON, False),
}
FROM_GATEWAY: Mapping[int, Rule] = _COMMON | {
    HELLO: (2, MAX_HELLO, False),
    REQUEST: (1, MAX_PAYLOAD, True),
    REQUEST_LAST: (1, MAX_PAYLOAD, True),
    PING: (PING_BYTES, PING_BYTES, False),
}
FROM_WORKER: Mapping[int, Rule] = _COMMON | {
    HELLO: (2, MAX_HELLO, False),
    HEAD: (1, MAX_PAYLOAD, True),
    PONG: (PING_BYTES, PING_BYTES, False),
    TELEMETRY: (2, MAX_TELEMETRY, False),
    DRAIN: (0, 0, False),
}


class LinkError(Exception):
    """The other side sent what it may not: the link is over."""

    code = "protocol"


class VersionError(LinkError):
    """The other side speaks another version, or another protocol."""

    code = "version"


class Goodbye:
    """Why a side ends the link: the codes in `BYE`."""

    VERSION = VersionError.code
    PROTOCOL = LinkError.code
    UNAUTHORIZED = "unauthorized"
    FULL = "full"
    """There are as many links as may be."""
    SILENT = "silent"
    """The other side said nothing for too long."""
    CLOSING = "closing"
    """The process ends."""


NOT_BEGUN = "full: "
"""What the reason of a worker's `RESET` begins with where it has not begun with the request."""


class Hello(Wire):
    """A side's greeting."""

    token: str | None = Field(default=None, repr=False, max_length=256)
    """What a gateway shows, as in `names.HEADER_TOKEN`."""
    telemetry_seconds: float = Field(default=TELEMETRY_SECONDS, ge=TELEMETRY_SECONDS, le=3600, allow_inf_nan=False)
    """A gateway's wish: the time between two samples."""
    name: str = Field(default="", max_length=253)
    """The name of the pod that greets."""
    max_streams: int = Field(default=1, ge=1, le=MAX_STREAM)
    """A worker's: requests that it takes over this link at a time."""


class FrameReader:
    """Bytes to frames, however they were cut. Holds no more than one frame that is not complete."""

    __slots__ = ("_need", "_rules", "_tail", "error", "greeted")

    def __init__(self, rules: Mapping[int, Rule]) -> None:
        """`rules`: `FROM_GATEWAY` or `FROM_WORKER`, whichever the other side is."""
        self._rules = rules
        self._tail = bytearray()
        self._need = 0
        self.greeted = False
        """The other side's `HELLO` was among the frames."""
        self.error: LinkError | None = None
        """What followed the last frame is none: nothing is read any more."""

    @property
    def held_bytes(self) -> int:
        return len(self._tail)

    @property
    def missing_bytes(self) -> int:
        """What is still to come of the frame that is not complete, as far as is known."""
        return self._need - len(self._tail) if self._tail else 0

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that are complete now, in order. Look at `error` after them."""
        frames: list[Frame] = []
        if self.error is not None:
            return frames
        tail = self._tail
        if tail:
            tail += data
            if len(tail) < self._need:
                return frames
            data = bytes(tail)
            tail.clear()
        unpack, rules = _HEADER.unpack_from, self._rules
        position, size = 0, len(data)
        self._need = HEADER_BYTES
        while size - position >= HEADER_BYTES:
            tag, stream, length = unpack(data, position)
            rule = rules.get(tag)
            if rule is None or not rule[0] <= length <= rule[1] or (stream > 0) is not rule[2] or not self.greeted:
                self.error = self._judge(tag, stream, length)
                if self.error is not None:
                    return frames
            end = position + HEADER_BYTES + length
            if end > size:
                self._need = HEADER_BYTES + length
                break
            if tag == HELLO:
                if self.greeted:
                    self.error = LinkError("a second HELLO")
                    return frames
                self.greeted = True
            frames.append((tag, stream, data[position + HEADER_BYTES : end]))
            position = end
        if position < size:
            tail += data[position:] if position else data
        return frames

    def _judge(self, tag: int, stream: int, length: int) -> LinkError | None:
        """What is wrong with a header; None: nothing, it greets."""
        version, kind = tag >> 24, tag >> 16 & 0xFF
        if version != VERSION:
            return VersionError(
                f"it speaks version {version} of the link, or something else; this is version {VERSION}"
            )
        rule, name = self._rules.get(tag), _NAMES.get(kind, f"kind {kind}")
        if rule is None:
            return LinkError(f"a frame {name} with flags {tag & 0xFFFF:#x} is not for this side")
        if not self.greeted and tag not in (HELLO, BYE):
            return LinkError(f"a frame {name} before any HELLO")
        low, high, on_stream = rule
        if not low <= length <= high:
            return LinkError(f"a frame {name} of {length} bytes; it has {low} to {high}")
        if (stream > 0) is not on_stream:
            return LinkError(
                f"a frame {name} on stream {stream}; it belongs to {'a stream' if on_stream else 'stream 0'}"
            )
        return None


def encode(tag: int, stream: int = 0, payload: bytes = b"") -> bytes:
    """A frame. `payload` must be of a size that the kind may have."""
    return _HEADER.pack(tag, stream, len(payload)) + payload


def encode_header(tag: int, stream: int, length: int) -> bytes:
    """The header of a frame whose payload is sent after it."""
    return _HEADER.pack(tag, stream, length)


def encode_credit(stream: int, count: int) -> bytes:
    return _HEADER.pack(CREDIT, stream, 4) + _CREDIT.pack(count)


def read_credit(payload: bytes) -> int:
    return _CREDIT.unpack(payload)[0]


def encode_hello(hello: Hello) -> bytes:
    return encode(HELLO, 0, hello.to_json().encode())


def read_hello(payload: bytes) -> Hello:
    """Raises LinkError."""
    try:
        return Hello.model_validate_json(payload)
    except ValueError:
        raise LinkError("its HELLO is not the JSON object that it should be") from None


def encode_reason(tag: int, stream: int, text: str) -> bytes:
    """A `RESET` or `BYE`; a long text is cut."""
    return encode(tag, stream, text.encode("utf-8", "replace")[:MAX_REASON])


def read_reason(payload: bytes) -> str:
    """Never fails: what is not UTF-8 or cannot be printed is replaced."""
    return "".join(c if c.isprintable() else "?" for c in payload.decode("utf-8", "replace"))


Fields = list[tuple[bytes, bytes]]
_FIELDS = rb"(?:[a-z0-9!#$%&'*+.^_`|~-]+: [^\x00\r\n]*\r\n)*"
_REQUEST_HEAD = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.1\r\n(" + _FIELDS + rb")\r\n")
_RESPONSE_HEAD = re.compile(rb"([2-9][0-9][0-9])\r\n(" + _FIELDS + rb")")


def read_request_head(payload: bytes) -> tuple[bytes, bytes, Fields]:
    """Method, target and headers, whose names are lower case. Raises LinkError."""
    found = _REQUEST_HEAD.fullmatch(payload)
    if found is None:
        raise LinkError("a REQUEST that is not the head of an HTTP/1.1 request with lower-case field names")
    return found[1], found[2], _split(found[3])


def encode_response_head(status: int, fields: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The payload of a `HEAD`. Raises LinkError where a reader would: it is too large, or no header."""
    lines = [b"%d\r\n" % status]
    lines += [b"%b: %b\r\n" % (name.lower(), value) for name, value in fields]
    payload = b"".join(lines)
    if len(payload) > MAX_PAYLOAD:
        raise LinkError(f"an answer with a header of {len(payload)} bytes; the link takes {MAX_PAYLOAD}")
    if payload.count(b"\r\n") != len(lines) or _RESPONSE_HEAD.fullmatch(payload) is None:
        raise LinkError("an answer whose status or headers cannot be sent")
    return payload


def read_response_head(payload: bytes) -> tuple[int, Fields]:
    """Status and headers, whose names are lower case. Raises LinkError."""
    found = _RESPONSE_HEAD.fullmatch(payload)
    if found is None:
        raise LinkError("a HEAD that is not a status and headers")
    return int(found[1]), _split(found[2])


def _split(block: bytes) -> Fields:
    fields: Fields = []
    for line in block.split(b"\r\n")[:-1]:
        name, _, value = line.partition(b": ")
        fields.append((name, value))
    return fields
