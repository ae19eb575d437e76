"""One request as read from a client, and what its header may say."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_api.names import HEADER_LENIENT, HEADER_ROUTE

from tandem_gateway.errors import BadRequest, RequestError

MAX_HEADER_BYTES = 32 * 1024
MAX_HEADERS = 128
_KEPT = frozenset(
    (
        b"accept",
        b"content-encoding",
        b"content-type",
        b"expect",
        b"host",
        b"traceparent",
        b"tracestate",
        b"x-request-id",
        b"x-session-affinity",
        HEADER_LENIENT.encode(),
        HEADER_ROUTE.encode(),
    )
)


@dataclass(slots=True)
class Request:
    """A complete request. Header names are lower case; only those the gateway uses are kept."""

    method: bytes
    path: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool
    http10: bool


@dataclass(slots=True)
class HeaderReader:
    """Collects a header field by field and judges it. Strict where two readers could disagree on a message's length."""

    max_body_bytes: int
    url: bytes = b""
    kept: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    size: int = 0
    received: int = 0
    """Bytes read while it was unfinished: a single field without end never reaches `add`."""
    count: int = 0
    content_length: int | None = None
    chunked: bool = False
    refusal: RequestError | None = None

    def add_url(self, part: bytes) -> None:
        self.url += part
        self._grow(len(part))

    def add(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.count += 1
        self._grow(len(name) + len(value))
        if name in _KEPT:
            if name in self.kept and name == b"host":
                self._refuse("the Host header occurs twice")
            self.kept[name] = value
        elif name == b"content-length":
            self._add_length(value)
        elif name == b"transfer-encoding":
            if self.chunked or value.strip().lower() != b"chunked":
                self._refuse("Transfer-Encoding must be exactly 'chunked'")
            self.chunked = True

    def add_trailer(self, name: bytes, value: bytes) -> bool:
        """A field behind the body: counted and dropped, for nothing in a request may be changed after it was judged.
        True when there are too many."""
        self.count += 1
        self.size += len(name) + len(value)
        return self._too_large

    def receive(self, size: int) -> bool:
        """Count bytes read while it is unfinished. True when there are too many."""
        self.received += size
        return self.received > MAX_HEADER_BYTES

    def finish(self, *, http10: bool) -> None:
        """Judge the complete header; `refusal` tells the outcome."""
        if self.chunked and self.content_length is not None:
            self._refuse("Content-Length and Transfer-Encoding exclude each other")
        if self.chunked and http10:
            self._refuse("HTTP/1.0 knows no Transfer-Encoding")
        if b"host" not in self.kept and not http10:
            self._refuse("the Host header is missing")
        if self.content_length is not None and self.content_length > self.max_body_bytes:
            self.refusal = self.refusal or too_large(self.max_body_bytes)
        encoding = self.kept.get(b"content-encoding", b"identity").lower()
        if encoding != b"identity":
            self.refusal = self.refusal or BadRequest(
                "compressed request bodies are not supported; send them as they are", status=415
            )
        if self.kept.get(b"expect", b"100-continue").lower() != b"100-continue":
            self.refusal = self.refusal or BadRequest("only 'Expect: 100-continue' is supported", status=417)

    @property
    def _too_large(self) -> bool:
        return self.size > MAX_HEADER_BYTES or self.count > MAX_HEADERS

    def _add_length(self, value: bytes) -> None:
        if self.content_length is not None or not value.isdigit():
            self._refuse("Content-Length must be one decimal number")
            return
        self.content_length = int(value)

    def _grow(self, size: int) -> None:
        self.size += size
        if self._too_large:
            self.refusal = self.refusal or header_too_large()

    def _refuse(self, message: str) -> None:
        self.refusal = self.refusal or BadRequest(message)


def read_path(url: bytes) -> str:
    """The path of a request target, which a client may also write in absolute form, as it would to a proxy."""
    if not url.startswith(b"/"):
        scheme, separator, rest = url.partition(b"://")
        if separator and scheme.lower() in (b"http", b"https"):
            url = rest[rest.find(b"/") :] if b"/" in rest.partition(b"?")[0] else b"/"
    return url.partition(b"?")[0].decode("latin-1")


def build_plain_head(method: bytes, header: HeaderReader) -> bytes:
    """The header again, with what the gateway uses of it and nothing else."""
    lines = [method + b" " + header.url + b" HTTP/1.1\r\n"]
    lines += [b"%b: %b\r\n" % item for item in header.kept.items() if item[0] != b"expect"]
    if header.chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    elif header.content_length is not None:
        lines.append(b"content-length: %d\r\n" % header.content_length)
    return b"".join(lines) + b"\r\n"


def header_too_large() -> RequestError:
    return BadRequest(
        f"the request header is too large; at most {MAX_HEADER_BYTES} bytes and {MAX_HEADERS} fields are read",
        status=431,
    )


def too_large(limit: int) -> RequestError:
    return BadRequest(f"the request body is too large; at most {limit} bytes are accepted", status=413)
