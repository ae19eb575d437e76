"""The header of a request as a worker of Tandem's own gets it."""

from __future__ import annotations

from tandem_api.names import (
    HEADER_KV_SOURCE,
    HEADER_LENIENT,
    HEADER_PREFILL,
    HEADER_REQUEST_ID,
    HEADER_RESUME,
    HEADER_STEP_SECONDS,
)

from tandem_gateway.http.request import Request
from tandem_gateway.scheduling import Choice

_PREFILL = HEADER_PREFILL.encode()
_REQUEST_ID = HEADER_REQUEST_ID.encode()
_RESUME_LINE = HEADER_RESUME.encode() + b": %d\r\n"
_BEGINS = _RESUME_LINE % 0
_KV_SOURCE = HEADER_KV_SOURCE.encode()
_STEP_SECONDS = HEADER_STEP_SECONDS.encode()
_REQUEST_HEAD = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" + _REQUEST_ID + b": %b\r\ncontent-length: %d\r\n\r\n"
_FORWARDED = frozenset((b"content-type", b"accept", b"traceparent", b"tracestate", HEADER_LENIENT.encode()))
"""What a worker may learn of the client's header. Never other x-tandem ones, which name machines to connect to and tell
who asks."""


def build_request_head(
    request: Request, choice: Choice, request_id: bytes, own_lines: bytes, length: int, journal_bytes: int | None
) -> bytes:
    """The header that goes to the decode worker. Built from an allow-list; the body follows unchanged.

    `own_lines` are the gateway's token and the name of the prompt, `length` is that of the body with the journal.
    `journal_bytes` of it come before the request's own, where it is for a stream: 0 where that begins. None: the answer
    has no journal.
    """
    more = own_lines
    for name, value in request.headers.items():
        if name in _FORWARDED:
            more += b"%b: %b\r\n" % (name, value)
    if choice.prefill:
        addresses = b",".join([endpoint.prefill_address for endpoint in choice.prefill])
        more += _PREFILL + b": " + addresses + b"\r\n"
    elif choice.conversion is not None:
        more += _STEP_SECONDS + b": %.6f\r\n" % choice.conversion.step_seconds
    if choice.source is not None:
        tokens = choice.cached_tokens
        more += _KV_SOURCE + b": " + choice.source.prefill_address + b";tokens=%d\r\n" % tokens
    if journal_bytes is not None:
        more += _RESUME_LINE % journal_bytes if journal_bytes else _BEGINS
    return _REQUEST_HEAD % (request.method, request.path.encode(), choice.decode.host, more, request_id, length)
