"""Logs for machines: one JSON object a line on standard error.

Every line has `time`, `level`, `logger`, `message`, what the process is (`pod`, `role`, `model`), and whatever the call
passed as `extra`, for example `request_id`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


class JsonFormatter(logging.Formatter):
    def __init__(self, process: Mapping[str, str]) -> None:
        super().__init__()
        self._process = dict(process)

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._process,
        }
        fields.update((key, value) for key, value in vars(record).items() if key not in _STANDARD)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()


def configure_logging(level: str, process: Mapping[str, str]) -> None:
    """Send every logger's lines of at least `level` to standard error. An unknown level means INFO."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process))
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level.upper(), logging.INFO), handlers=[handler], force=True)
    for noisy in ("httpx", "httpx2", "httpcore", "httpcore2", "filelock", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
