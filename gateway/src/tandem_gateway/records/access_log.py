"""The access log: one JSON line per request on standard output, written a few times a second in one piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson
from tandem_api.logs import find_trace, format_time

from tandem_gateway.http.sse import find_cached
from tandem_gateway.records.contract import RecordedExchange

Write = Callable[[bytes], None]

MAX_PENDING = 512
"""Lines. Beyond this they are written at once."""
MAX_PATH = 200
"""Characters that are logged of a path that nothing is behind."""


class AccessLog:
    def __init__(self, write: Write) -> None:
        """`write` must not block: it is called between two requests."""
        self._pending: list[bytes] = []
        self._write = write

    def add(self, exchange: RecordedExchange, now: float) -> None:
        """Write the line of a request that went to a worker, or waited for one."""
        self._add(build_record(exchange, now))

    def add_own(self, path: str, status: int, request_id: bytes, error: str | None, size: int) -> None:
        """Write the line of the gateway's own answer. `path` is empty where the request could not be read."""
        named = orjson.dumps(path[:MAX_PATH] or None)
        self._add(_OWN_LINE % (_now(), request_id, named, status, _quote(error), size))

    def _add(self, line: bytes) -> None:
        self._pending.append(line)
        if len(self._pending) >= MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._pending.append(b"")
            data = b"\n".join(self._pending)
            self._pending = []
            self._write(data)


def build_record(exchange: RecordedExchange, now: float) -> bytes:
    """One line of the access log. Put together by hand: this runs once per request, and most of it needs no escaping.

    The request id matches a harmless pattern, the path is one of a few; names come from elsewhere and are escaped.
    """
    decode, prefill = exchange.worker_names()
    usage = exchange.usage or {}
    started = exchange.started_at
    first = exchange.first_byte_at
    parent = exchange.request.headers.get(b"traceparent")
    trace = None if parent is None else find_trace(parent)
    return _LINE % (
        _now(),
        exchange.request_id,
        b"null" if trace is None else b'"%b"' % trace.encode(),
        exchange.request.path.encode(),
        exchange.status,
        _quote(exchange.error),
        _quote(decode),
        _quote(prefill),
        b"true" if exchange.converted else b"false",
        exchange.attempts,
        exchange.resumes,
        b"%.2f" % (exchange.queue_seconds * 1000) if exchange.queue_seconds else b"null",
        b"true" if exchange.inquiry.stream else b"false",
        b"%.2f" % ((first - started) * 1000) if first else b"null",
        (now - started) * 1000,
        _number(usage.get("prompt_tokens")),
        _number(find_cached(usage)),
        _number(usage.get("completion_tokens")),
        exchange.events,
        exchange.bytes_out,
    )


_BEGIN = b'{"time":"%b","level":"info","logger":"access","message":"request","request_id":"%b",'
_LINE = _BEGIN + (
    b'"trace_id":%b,"path":"%b","status":%d,"error":%b,"decode":%b,"prefill":%b,"converted":%b,"attempts":%d,"resumes":%d,"queue_ms":%b,"stream":%b,"ttft_ms":%b,'
    b'"duration_ms":%.2f,"prompt_tokens":%b,"cached_tokens":%b,"completion_tokens":%b,"events":%d,"bytes":%d}'
)
_OWN_LINE = _BEGIN + b'"path":%b,"status":%d,"error":%b,"bytes":%d}'


def _now() -> bytes:
    now = time.time()
    whole = int(now)
    return b"%b.%03dZ" % (_second(whole), (now - whole) * 1000)


@lru_cache(maxsize=2)
def _second(whole: int) -> bytes:
    """Making it costs more than the rest of a line, and a thousand lines may share it."""
    return format_time(whole).partition(".")[0].encode()


def _number(value: Any) -> bytes:
    return b"%d" % value if type(value) is int else b"null"


@lru_cache(maxsize=1024)
def _quote(text: str | None) -> bytes:
    return orjson.dumps(text)
