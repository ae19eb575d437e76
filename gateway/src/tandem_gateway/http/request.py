"""One request as read from a client, and what its header may say."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_api.names import HEADER_LENIENT, HEADER_ROUTE

from tandem_gateway.errors import BadRequest, RequestError

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 128
_KEPT = frozenset(
    (
        b"accept",
        b"access-control-request-headers",
        b"access-control-request-method",
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"content-type",
        b"expect",
        b"host",
        b"origin",
        b"traceparent",
        b"tracestate",
        b"transfer-encoding",
        b"x-request-id",
        b"x-session-affinity",
        HEADER_LENIENT.encode(),
        HEADER_ROUTE.encode(),
    )
)


_ONCE = {
    b"host": "the Host header occurs twice",
    b"content-length": "Content-Length must be one decimal number",
    b"transfer-encoding": "Transfer-Encoding must be exactly 'chunked'",
}
"""Fields of which a second one is refused, and how."""


_SELDOM = frozenset((b"content-encoding", b"expect", b"transfer-encoding"))
"""Fields that most requests do not have, and that change how they are read."""


@dataclass(slots=True)
class Request:
    """A request. Header names are lower case; only those the gateway uses are kept. Its body comes last."""

    method: bytes
    path: str
    headers: dict[bytes, bytes]
    http10: bool
    content_length: int | None
    """None: it has no body, or one in chunks."""
    keep_alive: bool = False
    body: bytes = b""
    query: str = ""
    """What follows the path's question mark."""
    cost: int = 1
    """What answering it takes, in small answers; whoever answers it here may find that it is more."""
    answer_fields: bytes = b""
    """Lines for the header of its answer, whoever gives it; each after a line break."""


def read_header(
    method: bytes, url: bytes, fields: list[tuple[bytes, bytes]], *, http10: bool, max_body_bytes: int
) -> Request:
    """Judge a complete header. Strict where two readers could disagree on a message's length.

    Raises:
        BadRequest: it cannot be told what the request is, or it is larger than may be.
    """
    kept: dict[bytes, bytes] = {}
    for field, value in fields:
        name = field.lower()
        if name in _KEPT:
            if name in kept and name in _ONCE:
                raise BadRequest(_ONCE[name])
            kept[name] = value
    if b"host" not in kept and not http10:
        raise BadRequest("the Host header is missing")
    if not _SELDOM.isdisjoint(kept):
        _check_seldom(kept, http10=http10)
    given, length = kept.get(b"content-length"), None
    if given is not None:
        if not given.isdigit():
            raise BadRequest(_ONCE[b"content-length"])
        length = int(given)
        if length > max_body_bytes:
            raise too_large(max_body_bytes)
    if url.startswith(b"/") and b"?" not in url:
        return Request(method, url.decode("latin-1"), kept, http10, length)
    query = url.partition(b"?")[2].decode("latin-1")
    return Request(method, read_path(url), kept, http10, length, query=query)


def _check_seldom(kept: dict[bytes, bytes], *, http10: bool) -> None:
    """Judge fields that say how the body is to be read. Raises BadRequest."""
    if b"content-encoding" in kept and kept[b"content-encoding"].lower() != b"identity":
        raise BadRequest("compressed request bodies are not supported; send them as they are", status=415)
    if b"expect" in kept and kept[b"expect"].lower() != b"100-continue":
        raise BadRequest("only 'Expect: 100-continue' is supported", status=417)
    if b"transfer-encoding" not in kept:
        return
    if kept[b"transfer-encoding"].strip().lower() != b"chunked":
        raise BadRequest(_ONCE[b"transfer-encoding"])
    if b"content-length" in kept:
        raise BadRequest("Content-Length and Transfer-Encoding exclude each other")
    if http10:
        raise BadRequest("HTTP/1.0 knows no Transfer-Encoding")


def read_path(url: bytes) -> str:
    """The path of a request target, which a client may also write in absolute form, as it would to a proxy."""
    if not url.startswith(b"/"):
        scheme, separator, rest = url.partition(b"://")
        if separator and scheme.lower() in (b"http", b"https"):
            url = rest[rest.find(b"/") :] if b"/" in rest.partition(b"?")[0] else b"/"
    return url.partition(b"?")[0].decode("latin-1")


def build_plain_head(request: Request, url: bytes, *, closes: bool) -> bytes:
    """The header again, with what the gateway uses of it and nothing else."""
    lines = [request.method + b" " + url + b" HTTP/1.1\r\n"]
    lines += [b"%b: %b\r\n" % item for item in request.headers.items() if item[0] != b"expect"]
    return b"".join(lines) + (b"connection: close\r\n\r\n" if closes else b"\r\n")


def header_too_large() -> RequestError:
    return BadRequest(
        f"the request header is too large; at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} fields are read",
        status=431,
    )


def too_large(limit: int) -> RequestError:
    return BadRequest(f"the request body is too large; at most {limit} bytes are accepted", status=413)
