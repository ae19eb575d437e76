"""Bytes of one client, as requests: strict, incremental, and with no more than a few requests read ahead.

Pure: no socket and no clock. `feed` is called with slices, so that what a single call can cost is bounded whatever the
slice holds; a refusal ends the reading, because the framing behind it is not to be trusted.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

import httptools

from tandem_gateway.errors import BadRequest, RequestError
from tandem_gateway.http.request import (
    HeaderReader,
    Request,
    build_plain_head,
    header_too_large,
    read_path,
    too_large,
)

FRAMING_BYTES = 256 * 1024
"""Of chunk headers, extensions and trailers, beyond a quarter of the body: chunks of a byte each would cost us more
than they cost their sender."""
_VERSIONS = frozenset(("1.0", "1.1"))


class Phase(IntEnum):
    IDLE = 0
    HEADER = 1
    BODY = 2
    REFUSED = 3


class RequestReader:
    """Fills `ready` with complete requests, in order; `refusal` comes after them and is the last."""

    def __init__(self, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._header = HeaderReader(max_body_bytes)
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._framed = 0
        """Bytes that arrived since the header was complete."""
        self._upgrading = False
        self._messages = 0
        self.phase = Phase.IDLE
        self.steps = 0
        """Grows whenever `phase` is entered anew: a message begins, its header is complete, it ends."""
        self.ready: deque[Request] = deque()
        self.refusal: RequestError | None = None
        self.wants_continue = False
        """The client waits for leave to send its body."""

    @property
    def body_bytes(self) -> int:
        """Held of the body that is being read."""
        return self._body_bytes

    @property
    def missing_bytes(self) -> int:
        """Known to be still to come of the body that is being read."""
        if self.phase is not Phase.BODY or self._header.content_length is None:
            return 0
        return self._header.content_length - self._body_bytes

    def feed(self, data: bytes) -> None:
        """Read on. Does nothing after a refusal."""
        before, size = self._messages, len(data)
        if self.phase is Phase.BODY:
            self._framed += size
        while data and self.refusal is None:
            data = self._parse(data)
        if self.refusal is not None:
            return
        if self._messages != before:
            self._framed = 0
        elif self.phase is Phase.HEADER:
            # All of this read belongs to the unfinished header: a field without end never reaches `on_header`.
            if self._header.receive(size):
                self.refuse(header_too_large())
        elif self._header.chunked and self._framed > self._body_bytes + self._body_bytes // 4 + FRAMING_BYTES:
            self.refuse(BadRequest("the chunks of the request body are too small, or their trailers too large"))

    def _parse(self, data: bytes) -> bytes:
        """What is left to be parsed: something only where the client has offered another protocol."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self.refusal is None:
                return self._decline_upgrade() + data[offer.args[0] :]
        except httptools.HttpParserError as error:
            self.refuse(BadRequest(f"the request is not valid HTTP: {error}"))
        return b""

    def refuse(self, error: RequestError) -> None:
        """Nothing after this is read."""
        self.refusal = self.refusal or error
        self.phase = Phase.REFUSED
        self.wants_continue = False
        self._body = []
        self._body_bytes = 0

    def _decline_upgrade(self) -> bytes:
        """Read the request as if it had offered nothing: some clients offer HTTP/2 with every first request.

        The parser stops at such an offer, before the body; a fresh one gets the same header without it.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse(BadRequest("this is not a proxy"))
            return b""
        self._parser = httptools.HttpRequestParser(self)
        return build_plain_head(method, self._header)

    # httptools

    def on_message_begin(self) -> None:
        if self.phase is Phase.REFUSED:
            return
        self.phase = Phase.HEADER
        self.steps += 1
        self._header = HeaderReader(self._max_body_bytes)

    def on_url(self, url: bytes) -> None:
        self._header.add_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is Phase.HEADER:
            self._header.add(name, value)
        elif self.phase is Phase.BODY and self._header.add_trailer(name, value):
            self.refuse(header_too_large())

    def on_headers_complete(self) -> None:
        if self.phase is Phase.REFUSED:
            return
        header = self._header
        version = self._parser.get_http_version()
        header.finish(http10=version == "1.0")
        if version not in _VERSIONS:
            self.refuse(BadRequest(f"HTTP/{version} is not spoken here; use HTTP/1.1", status=505))
            return
        if header.refusal is not None:
            self.refuse(header.refusal)
            return
        self.phase = Phase.BODY
        self.steps += 1
        self._framed = 0
        self._upgrading = self._parser.should_upgrade()
        self.wants_continue = b"expect" in header.kept

    def on_body(self, body: bytes) -> None:
        if self.phase is Phase.REFUSED:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._max_body_bytes:
            self.refuse(too_large(self._max_body_bytes))
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.phase is Phase.REFUSED or self._upgrading:
            return
        self._messages += 1
        header = self._header
        http10 = self._parser.get_http_version() == "1.0"
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        keep_alive = not http10 and self._parser.should_keep_alive()
        method, path = self._parser.get_method(), read_path(header.url)
        self.ready.append(Request(method, path, header.kept, body, keep_alive, http10))
        self._body = []
        self._body_bytes = 0
        self.wants_continue = False
        self.phase = Phase.IDLE
        self.steps += 1
