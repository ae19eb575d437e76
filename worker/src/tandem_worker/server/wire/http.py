"""The ASGI edge: headers in, JSON and errors out."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Scope, Send
from tandem_api import names
from tandem_api.names import HEADER_RETRY, RETRY_FULL, RETRY_REQUEST, RETRY_WORKER
from tandem_api.openai import ErrorType, error_body

from tandem_worker.engine.errors import EngineStoppedError, RequestError

MAX_BODY_BYTES = 8 * 1024 * 1024

MAX_PREFILL_ENDPOINTS = 8
MAX_KV_SOURCE = 300
_KV_SOURCE = re.compile(r"([A-Za-z0-9_.\-\[\]:]+:\d{1,5})(?:; ?tokens=(\d{1,9}))?")
MAX_STEP_SECONDS = 60.0

_ENDPOINT = re.compile(r"[A-Za-z0-9_.\-\[\]:]+:\d{1,5}")
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_LENGTH = re.compile(r"[0-9]{1,19}")
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_KINDS: Mapping[int, ErrorType] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}

TOO_MANY_LARGE_REQUESTS = "too_many_large_requests"
"""Code of an error that small requests do not meet."""
_QUOTED_CHARACTERS = 2000
_JOINED_BYTES = 1024 * 1024

Headers = dict[str, str]


class BodyTooLargeError(RequestError):
    def __init__(self) -> None:
        super().__init__(
            f"The request body is larger than {MAX_BODY_BYTES // (1024 * 1024)} MiB.",
            code="request_too_large",
            status=413,
        )


class ClientGoneError(Exception):
    """The client closed the connection: nobody reads the answer. Never leaves the server package."""


class ServiceError(Exception):
    """The server's own failure before an answer began: HTTP 500 or 503."""

    def __init__(self, message: str, *, status: int = 500, retry: str | None = None) -> None:
        """`retry`: the value of `names.HEADER_RETRY`."""
        super().__init__(message)
        self.status = status
        self.retry = retry


def header(scope: Scope, name: str) -> str | None:
    """Value of the first header `name`, which is lower case; None without one."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return value.decode("latin-1")
    return None


def content_length(scope: Scope) -> int | None:
    """Bytes of the body, as the request says; None where it does not. Raises RequestError.

    Neither a link nor the parser of HTTP bounds its digits, for zeros may lead.
    """
    value = header(scope, "content-length")
    if value is None:
        return None
    if not _LENGTH.fullmatch(value):
        raise RequestError("The header content-length must be a number of bytes, of at most 19 digits.")
    return int(value)


def request_id(scope: Scope) -> str:
    """The client's `x-request-id` when it is printable and short, else a new one."""
    given = header(scope, names.HEADER_REQUEST_ID)
    if given is not None and _REQUEST_ID.fullmatch(given.encode("latin-1")):
        return given
    return f"req-{secrets.token_hex(12)}"


def prefill_endpoints(scope: Scope) -> tuple[str, ...]:
    """The prefill workers that the gateway names. Raises RequestError."""
    value = header(scope, names.HEADER_PREFILL)
    if value is None:
        return ()
    endpoints = tuple(part.strip() for part in value.split(",") if part.strip())
    if len(endpoints) > MAX_PREFILL_ENDPOINTS or not all(_ENDPOINT.fullmatch(part) for part in endpoints):
        raise RequestError(
            f"The header {names.HEADER_PREFILL} must be a comma-separated list of at most {MAX_PREFILL_ENDPOINTS} "
            "host:port pairs.",
            param=names.HEADER_PREFILL,
        )
    return endpoints


def read_kv_source(scope: Scope) -> tuple[str, int]:
    """The worker that has blocks of this prompt, and how many tokens of it, as the gateway says; empty: it names none.
    Raises RequestError."""
    value = header(scope, names.HEADER_KV_SOURCE)
    if value is None:
        return "", 0
    found = _KV_SOURCE.fullmatch(value.strip())
    if found is None or len(found[1]) > MAX_KV_SOURCE:
        raise RequestError(
            f"The header {names.HEADER_KV_SOURCE} must be one host:port of at most {MAX_KV_SOURCE} characters, and may "
            "say behind ;tokens= how many tokens are there, for example 10.0.0.7:7000;tokens=4096.",
            param=names.HEADER_KV_SOURCE,
        )
    return found[1], int(found[2] or 0)


def read_step_seconds(scope: Scope) -> float | None:
    """How long steps may be with a part of this prompt, as the gateway says; None: as long as others. Raises
    RequestError.
    """
    value = header(scope, names.HEADER_STEP_SECONDS)
    if value is None:
        return None
    if not _DECIMAL.fullmatch(value) or not 0 < float(value) <= MAX_STEP_SECONDS:
        raise RequestError(
            f"The header {names.HEADER_STEP_SECONDS} must be a number of seconds above 0 and at most "
            f"{MAX_STEP_SECONDS:g}, for example 0.05.",
            param=names.HEADER_STEP_SECONDS,
        )
    return float(value)


def encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """As ASGI takes them. Raises UnicodeEncodeError for text beyond Latin-1."""
    return [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()]


async def send_start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    """Send the status and the headers; the body follows in messages of its own."""
    await send({"type": "http.response.start", "status": status, "headers": encode_headers(headers)})


async def send_bytes(
    send: Send,
    status: int,
    body: bytes,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> None:
    """A whole response."""
    all_headers = {"content-type": content_type, "content-length": str(len(body)), **(headers or {})}
    await send_start(send, status, all_headers)
    await send({"type": "http.response.body", "body": body})


async def send_parts(send: Send, parts: Sequence[bytes], *, headers: Mapping[str, str] | None = None) -> None:
    """JSON in parts, which are joined only where they are small."""
    size = sum(map(len, parts))
    all_headers = {"content-type": "application/json", "content-length": str(size), **(headers or {})}
    await send_start(send, 200, all_headers)
    rest = [b"".join(parts)] if size <= _JOINED_BYTES else parts
    for part in rest[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": rest[-1]})


async def send_json(send: Send, value: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
    """Send a whole response whose body is `value` as JSON."""
    await send_bytes(send, status, orjson.dumps(value), headers=headers)


def _clip(text: str) -> str:
    """A refusal may quote the request, which may be long."""
    return text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}…"


def describe_error(error: Exception) -> tuple[int, dict[str, Any], Headers]:
    """Status, OpenAI error body and extra headers of an error."""
    match error:
        case RequestError():
            kind = _KINDS.get(error.status, "invalid_request_error")
            extra = {"retry-after": "1"} if error.status == 429 else {}
            if error.code == TOO_MANY_LARGE_REQUESTS:
                extra[HEADER_RETRY] = RETRY_REQUEST
            elif error.code == "queue_full":
                extra[HEADER_RETRY] = RETRY_FULL
            param = None if error.param is None else _clip(error.param)
            return error.status, error_body(_clip(str(error)), kind=kind, param=param, code=error.code), extra
        case EngineStoppedError():
            message = str(error) or "This worker is shutting down."
            return (
                503,
                error_body(message, kind="overloaded_error", code="worker_stopping"),
                {HEADER_RETRY: RETRY_WORKER},
            )
        case ServiceError():
            extra = {} if error.retry is None else {HEADER_RETRY: error.retry}
            kind = _KINDS.get(error.status, "server_error")
            return error.status, error_body(str(error), kind=kind), extra
        case RecursionError():
            message = "The request is nested too deeply."
            return 400, error_body(message, kind="invalid_request_error", code="invalid_json"), {}
        case _:
            return 500, error_body("The server had an internal error.", kind="server_error", code="internal_error"), {}
