"""Events of the process itself, as JSON lines on standard error. Requests are in the access log."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

from tandem_gateway.line_writer import LineWriter

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "taskName"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "msg": record.getMessage(),
        }
        fields.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str).decode()


class LineHandler(logging.Handler):
    """Records through a writer that never blocks: the process's own events must not stop its traffic."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode() + b"\n")
        except Exception:  # as every handler: a record that cannot be formatted ends nothing
            self.handleError(record)


def configure_logging(level: str) -> LineWriter:
    """To standard error. The caller closes the writer when the process ends."""
    writer = LineWriter(2, "log")
    handler = LineHandler(writer)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return writer
