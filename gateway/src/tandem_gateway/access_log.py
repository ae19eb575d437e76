"""The access log: one JSON line per request on standard output, written a few times a second in one piece."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

import orjson

from tandem_gateway.exchange import Exchange

Write = Callable[[bytes], None]

MAX_PENDING = 512
"""Lines. Beyond this they are written at once."""


class AccessLog:
    def __init__(self, write: Write | None = None) -> None:
        self._pending: list[bytes] = []
        self._write = write or _write_stdout

    def add(self, exchange: Exchange, now: float) -> None:
        self._pending.append(build_record(exchange, now))
        if len(self._pending) >= MAX_PENDING:
            self.flush()

    def flush(self) -> None:
        if self._pending:
            self._pending.append(b"")
            data = b"\n".join(self._pending)
            self._pending = []
            self._write(data)


def _write_stdout(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def build_record(exchange: Exchange, now: float) -> bytes:
    """One line of the access log. Put together by hand: this runs once per request, and most of it needs no escaping.

    The request id matches a harmless pattern, the path is one of a few; names come from elsewhere and are escaped.
    """
    decode, prefill = exchange.worker_names()
    usage = exchange.usage or {}
    details: Any = usage.get("prompt_tokens_details")
    cached: Any = cast(dict[str, Any], details).get("cached_tokens") if isinstance(details, dict) else None
    started = exchange.started_at
    first = exchange.first_byte_at
    return _LINE % (
        time.time(),
        exchange.request_id,
        exchange.request.path.encode(),
        exchange.status,
        _quote(exchange.error),
        _quote(decode),
        _quote(prefill),
        exchange.attempts,
        b"true" if exchange.inquiry.stream else b"false",
        b"%.2f" % ((first - started) * 1000) if first else b"null",
        (now - started) * 1000,
        _number(usage.get("prompt_tokens")),
        _number(cached),
        _number(usage.get("completion_tokens")),
        exchange.events,
        exchange.bytes_out,
    )


_LINE = (
    b'{"time":%.3f,"msg":"request","request_id":"%b","path":"%b","status":%d,"error":%b,"decode":%b,"prefill":%b,'
    b'"attempts":%d,"stream":%b,"ttft_ms":%b,"duration_ms":%.2f,"prompt_tokens":%b,"cached_tokens":%b,'
    b'"completion_tokens":%b,"events":%d,"bytes":%d}'
)


def _number(value: Any) -> bytes:
    return b"%d" % value if type(value) is int else b"null"


@lru_cache(maxsize=1024)
def _quote(text: str | None) -> bytes:
    return orjson.dumps(text)
