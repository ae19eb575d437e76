"""The access log: one JSON line per request on standard output, written a few times a second in one piece."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
    """One line of the access log."""
    decode, prefill = exchange.worker_names()
    usage = exchange.usage or {}
    details: Any = usage.get("prompt_tokens_details")
    started = exchange.started_at
    ttft = exchange.first_byte_at - started if exchange.first_byte_at else None
    return orjson.dumps(
        {
            "time": round(time.time(), 3),
            "msg": "request",
            "request_id": exchange.request_id.decode("latin-1"),
            "path": exchange.request.path,
            "status": exchange.status,
            "error": exchange.error,
            "decode": decode,
            "prefill": prefill,
            "attempts": exchange.attempts,
            "stream": exchange.inquiry.stream,
            "ttft_ms": None if ttft is None else round(ttft * 1000, 2),
            "duration_ms": round((now - started) * 1000, 2),
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": cast(dict[str, Any], details).get("cached_tokens") if isinstance(details, dict) else None,
            "completion_tokens": usage.get("completion_tokens"),
            "events": exchange.events,
            "bytes": exchange.bytes_out,
        },
        default=str,
    )
