"""Logs as one JSON object a line, with whatever a call passes as `extra`."""

from __future__ import annotations

import datetime
import json
import logging
import sys

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_QUIET = ("kopf", "aiohttp.access", "asyncio", "urllib3")


class JSONFormatter(logging.Formatter):
    """`time`, `level`, `logger`, `message`, then the extras."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD and _is_plain(value)}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up_logging(level: str) -> None:
    """Send every logger's records to standard error as JSON. Frameworks speak from their warnings up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.WARNING)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)
