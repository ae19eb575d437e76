"""Events of the process itself, as JSON lines on standard error. Requests are in the access log."""

from __future__ import annotations

import logging

from tandem_api.logs import JsonFormatter

from tandem_gateway.records.line_writer import LineWriter


class LineHandler(logging.Handler):
    """Records through a writer that never blocks: the process's own events must not stop its traffic."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._writer.write(self.format(record).encode(errors="backslashreplace") + b"\n")
        except Exception:  # as every handler: a record that cannot be formatted ends nothing
            self.handleError(record)


def configure_logging(level: str) -> LineWriter:
    """To standard error. The caller closes the writer when the process ends."""
    writer = LineWriter(2, "log")
    handler = LineHandler(writer)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    return writer
