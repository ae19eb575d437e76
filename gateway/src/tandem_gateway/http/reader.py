"""Bytes of one client, as requests: strict, incremental, and with no more than a few requests read ahead.

Pure: no socket and no clock. `feed` is called with slices, so that what a single call can cost is bounded whatever the
slice holds; a refusal ends the reading, because the framing behind it is not to be trusted.
"""

from __future__ import annotations

from collections import deque

import httptools

from tandem_gateway.errors import BadRequest, RequestError
from tandem_gateway.http.request import (
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    Request,
    build_plain_head,
    header_too_large,
    read_header,
    too_large,
)

FRAMING_BYTES = 256 * 1024
"""Bytes of chunk headers, extensions and trailers, beyond a quarter of the body: chunks of a byte each would cost us
more than they cost their sender."""
_VERSIONS = frozenset(("1.0", "1.1"))

# What is being read. Plain numbers: members of an enumeration are slow to get at.
IDLE = 0
HEADER = 1
BODY = 2
REFUSED = 3


class RequestReader:
    """Fills `ready` with complete requests, in order; `refusal` comes after them and is the last."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._url: list[bytes] = []
        self.on_url = self._url.append
        """httptools calls it with every part of a target."""
        self._parser = httptools.HttpRequestParser(self)
        self._fields: list[tuple[bytes, bytes]] = []
        self._request: Request | None = None
        """The request whose body is being read."""
        self._body: list[bytes] = []
        self._read_bytes = 0
        """Bytes of an unfinished header, by earlier reads: a single field without end never reaches `on_header`."""
        self._trailer_bytes = self._trailers = 0
        self._framed = 0
        """Bytes that arrived since the header was complete."""
        self._upgrading = False
        self._messages = 0
        self._size = 0
        """Bytes of this read."""
        self.phase = IDLE
        self.steps = 0
        """Grows whenever a client is waited for anew: a message begins, its header is complete."""
        self.ready: deque[Request] = deque()
        self.refusal: RequestError | None = None
        self.wants_continue = False
        """The client waits for leave to send its body."""
        self.body_bytes = 0
        """Held of the body that is being read."""
        self.refused_origin: bytes | None = None
        """The origin of the page whose request was refused, for what browsers are to be told."""

    @property
    def missing_bytes(self) -> int:
        """Known to be still to come of the body that is being read."""
        request = self._request
        if self.phase != BODY or request is None or request.content_length is None:
            return 0
        return request.content_length - self.body_bytes

    def feed(self, data: bytes) -> None:
        """Read on. Does nothing after a refusal."""
        before = self._messages
        self._size = size = len(data)
        if self.phase == BODY:
            self._framed += size
        while data and self.refusal is None:
            try:
                self._parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                data = b"" if self.refusal is not None else self._decline_upgrade() + data[offer.args[0] :]
            except httptools.HttpParserError as error:
                self.refuse(BadRequest(f"the request is not valid HTTP: {error}"))
        if self.phase == IDLE or self.refusal is not None:
            return
        if self._messages != before:
            self._framed = 0
        elif self.phase == HEADER:
            # All of this read belongs to the unfinished header.
            self._read_bytes += size
            if self._read_bytes > MAX_HEADER_BYTES:
                self.refuse(header_too_large())
        elif self._framed > self.body_bytes + self.body_bytes // 4 + FRAMING_BYTES:
            self.refuse(BadRequest("the chunks of the request body are too small, or their trailers too large"))

    def refuse(self, error: RequestError) -> None:
        """Nothing after this is read."""
        if self.refusal is None:
            self.refused_origin = next((value for name, value in self._fields if name.lower() == b"origin"), None)
        self.refusal = self.refusal or error
        self.phase = REFUSED
        self.wants_continue = False
        self._body = []
        self.body_bytes = 0

    def _decline_upgrade(self) -> bytes:
        """Read the request as if it had offered nothing: some clients offer HTTP/2 with every first request.

        The parser stops at such an offer, before the body; a fresh one gets the same header without it.
        """
        request = self._request
        assert request is not None
        if request.method == b"CONNECT":
            self.refuse(BadRequest("this is not a proxy"))
            return b""
        closes = any(name.lower() == b"connection" and b"close" in value.lower() for name, value in self._fields)
        head = build_plain_head(request, b"".join(self._url), closes=closes)
        self._parser = httptools.HttpRequestParser(self)
        return head

    # httptools

    def on_message_begin(self) -> None:
        if self.phase == REFUSED:
            return
        self.phase = HEADER
        self.steps += 1
        self._read_bytes = 0
        self._trailer_bytes = self._trailers = 0
        self._url.clear()
        self._fields = []
        self._request = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the header, or of trailers: those are counted and dropped, for nothing in a request may be changed
        after it was judged."""
        request = self._request
        if request is None:
            self._fields.append((name, value))
            return
        self._trailers += 1
        self._trailer_bytes += len(name) + len(value)
        if self._trailer_bytes > MAX_HEADER_BYTES or self._trailers > MAX_HEADERS:
            self.refuse(header_too_large())

    def on_headers_complete(self) -> None:
        if self.phase == REFUSED:
            return
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self.refuse(BadRequest(f"HTTP/{version} is not spoken here; use HTTP/1.1", status=505))
            return
        fields = self._fields
        # The sum is taken only where it can be too much: nearly all headers come in one small read.
        if len(fields) > MAX_HEADERS or (self._read_bytes + self._size > MAX_HEADER_BYTES and self._is_too_large()):
            self.refuse(header_too_large())
            return
        method, limit = self._parser.get_method(), self._max_body_bytes
        try:
            request = read_header(method, b"".join(self._url), fields, http10=version == "1.0", max_body_bytes=limit)
        except RequestError as error:
            self.refuse(error)
            return
        self._request = request
        self.phase = BODY
        self.steps += 1
        self._upgrading = self._parser.should_upgrade()
        self.wants_continue = b"expect" in request.headers

    def _is_too_large(self) -> bool:
        return sum(map(len, self._url)) + sum(len(name) + len(value) for name, value in self._fields) > MAX_HEADER_BYTES

    def on_body(self, body: bytes) -> None:
        if self.phase == REFUSED:
            return
        self.body_bytes += len(body)
        if self.body_bytes > self._max_body_bytes:
            self.refuse(too_large(self._max_body_bytes))
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        request, parts = self._request, self._body
        if self.phase == REFUSED or self._upgrading or request is None:
            return
        self._messages += 1
        request.body = parts[0] if len(parts) == 1 else b"".join(parts)
        request.keep_alive = not request.http10 and self._parser.should_keep_alive()
        self.ready.append(request)
        self._body = []
        self.body_bytes = self._framed = 0
        self.wants_continue = False
        self.phase = IDLE
