"""The CORS protocol of the Fetch standard: what browsers are told of who may read an answer. Pure.

It is the browser that keeps pages from answers, by these headers. Requests of other programs, and those that a browser
sends without asking, are answered whether their origin is listed or not.
"""

from __future__ import annotations

import re

from tandem_api.launch import CORSRules
from tandem_api.names import (
    HEADER_DECODE_WORKER,
    HEADER_IGNORED,
    HEADER_PREFILL_WORKER,
    HEADER_QUEUE_SECONDS,
    HEADER_REQUEST_ID,
    HEADER_ROUTE,
)

from tandem_gateway.errors import BadRequest
from tandem_gateway.http.request import Request

ANY = "*"
_METHOD = b"access-control-request-method"
_HEADERS = b"access-control-request-headers"
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~-]+([ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)
_READABLE = (
    "retry-after", HEADER_REQUEST_ID, HEADER_DECODE_WORKER, HEADER_PREFILL_WORKER, HEADER_QUEUE_SECONDS, HEADER_IGNORED,
    HEADER_ROUTE,
)  # fmt: skip
_EXPOSED = b"\r\naccess-control-expose-headers: " + ", ".join(_READABLE).encode()
_VARY = b"\r\nvary: origin"


def is_preflight(request: Request) -> bool:
    """A browser asks whether it may send a page's request."""
    headers = request.headers
    return request.method == b"OPTIONS" and b"origin" in headers and _METHOD in headers


class CORSPolicy:
    """Header lines, each with the line break before it, as they follow other lines of a header."""

    def __init__(self, rules: CORSRules) -> None:
        self._any = ANY in rules.allow_origins and not rules.allow_credentials
        self._origins = frozenset(origin.encode() for origin in rules.allow_origins)
        self._headers = ", ".join(rules.allow_headers).encode()
        self._more = b"\r\naccess-control-allow-credentials: true" if rules.allow_credentials else b""
        self._max_age = int(rules.max_age_seconds)

    def fields(self, origin: bytes | None) -> bytes:
        """Header fields of an answer to a request of a page of `origin`."""
        allowed = self._allow(origin)
        if not allowed:
            return _VARY
        return allowed + _EXPOSED

    def answer_preflight(self, request: Request) -> bytes:
        """Header fields of the answer to a preflight, which has no body. The browser compares method and headers with
        it.

        Raises:
            BadRequest: 403, the origin may not.
        """
        origin, asked = request.headers[b"origin"], request.headers.get(_HEADERS, b"")
        allowed = self._allow(origin)
        if not allowed:
            shown = origin.decode("latin-1")[:200]
            raise BadRequest(
                f"pages of the origin {shown!r} may not use this model from a browser: who runs the model lists them "
                "in 'spec.gateway.cors.allowOrigins' of the InferenceModel",
                status=403,
                code="origin_not_allowed",
            )
        names = self._headers or (asked if _NAMES.fullmatch(asked) else b"")
        lines = allowed + b"\r\naccess-control-allow-methods: GET, HEAD, POST, DELETE"
        if names:
            lines += b"\r\naccess-control-allow-headers: " + names
        return lines + b"\r\naccess-control-max-age: %d\r\nvary: %b, %b" % (self._max_age, _METHOD, _HEADERS)

    def _allow(self, origin: bytes | None) -> bytes:
        """Nothing where the origin is not allowed."""
        if self._any:
            return b"\r\naccess-control-allow-origin: *"
        if origin not in self._origins:
            return b""
        return b"\r\naccess-control-allow-origin: " + origin + self._more + _VARY
