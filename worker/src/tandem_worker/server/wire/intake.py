"""Reads the bodies of requests, and bounds what all of them together may hold."""

from __future__ import annotations

import asyncio
from typing import Never

from starlette.types import Receive, Scope

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.wire.http import (
    MAX_BODY_BYTES,
    TOO_MANY_LARGE_REQUESTS,
    BodyTooLargeError,
    ClientGoneError,
    content_length,
)

SMALL_BODY_BYTES = 32 * 1024
"""Bodies up to this size are not counted, so that nobody's large ones keep them out."""
MAX_HELD_BYTES = 8 * MAX_BODY_BYTES
BODY_SECONDS = 60.0
"""A client must have sent its complete body within this time of its header."""


class BodyIntake:
    """Bytes of large bodies that are being received, or held until their request is prepared. On the event loop."""

    def __init__(self) -> None:
        self.held_bytes = 0

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """The body; `release` it when it is done with. Raises RequestError (400, 408, 413, 429), ClientGoneError."""
        if (content_length(scope) or 0) > MAX_BODY_BYTES:
            _refuse_size()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body, more = await _receive_chunk(receive)
                if more:
                    body = await self._read_rest(body, receive)
                elif len(body) > SMALL_BODY_BYTES:
                    self._hold(len(body))
        except TimeoutError as error:
            raise RequestError(
                f"The request body was not complete after {BODY_SECONDS:g} s.", code="body_timeout", status=408
            ) from error
        if not body:
            raise RequestError("The request has no body; a JSON object is expected.", code="invalid_json")
        return body

    def release(self, body: bytes) -> None:
        """The body is held no longer. Small ones were never counted."""
        if len(body) > SMALL_BODY_BYTES:
            self.held_bytes -= len(body)

    async def _read_rest(self, first: bytes, receive: Receive) -> bytes:
        chunks, size, held, more = [first], len(first), 0, True
        try:
            while more:
                chunk, more = await _receive_chunk(receive)
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_BODY_BYTES:
                    _refuse_size()
                if size > SMALL_BODY_BYTES:
                    self._hold(size - held)
                    held = size
        except BaseException:
            self.held_bytes -= held
            raise
        return b"".join(chunks)

    def _hold(self, num_bytes: int) -> None:
        """Raises RequestError."""
        if self.held_bytes + num_bytes > MAX_HELD_BYTES:
            raise RequestError(
                "This worker is preparing as many large requests as it can hold; try again later.",
                code=TOO_MANY_LARGE_REQUESTS,
                status=429,
            )
        self.held_bytes += num_bytes


async def _receive_chunk(receive: Receive) -> tuple[bytes, bool]:
    """The next part of the body, and whether more follows. Raises ClientGoneError."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _refuse_size() -> Never:
    raise BodyTooLargeError
