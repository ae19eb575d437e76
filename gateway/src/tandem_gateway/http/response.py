"""Responses as bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from tandem_api.names import HEADER_REQUEST_ID, HEADER_RESUME

from tandem_gateway.errors import RequestError

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_REQUEST_ID = HEADER_REQUEST_ID.encode()
_OWN = frozenset((_REQUEST_ID, HEADER_RESUME.encode()))
"""Fields of a worker's header that it says to the gateway alone or the gateway says itself."""
_REQUEST_ID_LINE = _REQUEST_ID + b": "


@dataclass(slots=True)
class ResponseHead:
    """What a worker said before the body. Header names are lower case; hop-by-hop fields are left out."""

    status: int
    headers: list[tuple[bytes, bytes]]
    fields: dict[bytes, bytes]
    """The same, of fields that occur several times the last."""
    rewrite: Callable[[bytes], bytes] | None = None
    """What the client gets of an answer in one piece; None: the answer itself."""
    usage: dict[str, Any] | None = None
    """The usage of a stream that the client does not see it in."""


def build_head(head: ResponseHead, request_id: bytes, framing: bytes, *, keep_alive: bool) -> bytes:
    """A worker's header as the client gets it. `framing` is the line (or nothing) that tells the body's end, and what
    else the gateway adds; each after a line break."""
    text = STATUS_LINES.get(head.status) or b"HTTP/1.1 %d Unknown\r\n" % head.status
    for name, value in head.headers:
        if name not in _OWN:
            text += name + b": " + value + b"\r\n"
    end = b"\r\n\r\n" if keep_alive else b"\r\nconnection: close\r\n\r\n"
    return text + _REQUEST_ID_LINE + request_id + framing + end


def build_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def build_plain(status: int, kind: str, body: bytes, *, keep_alive: bool) -> bytes:
    """A complete response to somebody who is no client of the model: probes and scrapes."""
    lines = [
        STATUS_LINES[status],
        b"content-type: %b\r\ncontent-length: %d\r\n" % (kind.encode(), len(body)),
        b"\r\n" if keep_alive else b"connection: close\r\n\r\n",
        body,
    ]
    return b"".join(lines)


def build_json(
    status: int,
    payload: object,
    request_id: bytes,
    *,
    keep_alive: bool,
    headers: tuple[tuple[str, str], ...] = (),
    more: bytes = b"",
    with_body: bool = True,
) -> bytes:
    """A complete response made by the gateway itself. `more` are lines of the header, each after a line break.
    `with_body` is False for HEAD."""
    body = orjson.dumps(payload)
    fields = [(b"content-type", b"application/json")]
    fields += [(name.lower().encode(), value.encode()) for name, value in headers]
    length = b"\r\ncontent-length: %d" % len(body)
    head = build_head(ResponseHead(status, fields, {}), request_id, length + more, keep_alive=keep_alive)
    return head + body if with_body else head


def build_error(
    error: RequestError, request_id: bytes, *, keep_alive: bool, more: bytes = b"", with_body: bool = True
) -> bytes:
    return build_json(
        error.status,
        error.body(),
        request_id,
        keep_alive=keep_alive,
        headers=error.headers,
        more=more,
        with_body=with_body,
    )


def build_empty(request_id: bytes, more: bytes, *, keep_alive: bool) -> bytes:
    """A response of status 204, which has no body."""
    return build_head(ResponseHead(204, [], {}), request_id, more, keep_alive=keep_alive)
