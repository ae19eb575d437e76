"""The log format of every Tandem process: one JSON object a line, `time`, `level`, `logger`, `message` first."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime

from tandem_api.spans import read_context

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

_ENCODER = json.JSONEncoder(default=repr, separators=(",", ":"), ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """The four, then what the process is, then whatever the call passed as `extra`, for example `request_id`."""

    def __init__(self, process: Mapping[str, str] | None = None, *, plain_only: bool = False) -> None:
        """`plain_only` leaves out extras that are neither texts nor numbers: frameworks attach whole objects."""
        super().__init__()
        self._process = dict(process or {})
        self._plain_only = plain_only

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        extras = {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if self._plain_only:
            extras = {key: value for key, value in extras.items() if _is_plain(value)}
        fields |= extras
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return _ENCODER.encode(fields)


def find_trace(traceparent: bytes) -> str | None:
    """The id of the trace that a client's `traceparent` (W3C Trace Context) names; None where it is not one."""
    context = read_context(traceparent)
    return None if context is None else context.trace_id


def format_time(seconds: float | None = None) -> str:
    """A point in time, by default now, as every line has it: UTC, to the millisecond."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
