"""Lines to a descriptor, written by a thread of their own: whoever reads them may stop, the gateway does not.

What does not fit into a bounded queue is dropped and counted, and the count is told as soon as there is room again.
"""

from __future__ import annotations

import os
import select
import threading
from queue import SimpleQueue

import orjson
from tandem_api.logs import format_time

MAX_QUEUED_BYTES = 4 * 1024 * 1024
CLOSE_SECONDS = 1.0
"""The end of the process waits this long for a reader that has stopped."""


class LineWriter:
    """`write` is for one thread at a time and never blocks."""

    def __init__(self, descriptor: int, name: str, *, max_queued_bytes: int = MAX_QUEUED_BYTES) -> None:
        self._descriptor = descriptor
        self._max_queued_bytes = max_queued_bytes
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        # Each counter has one writer, so that neither needs a lock.
        self._queued = 0
        self._written = 0
        self._untold = 0
        self.dropped = 0
        """Lines, since the start."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def backlog(self) -> int:
        """Bytes not yet written."""
        return self._queued - self._written

    def write(self, lines: bytes) -> None:
        """`lines` ends with a line feed."""
        if self.backlog + len(lines) > self._max_queued_bytes:
            count = lines.count(b"\n")
            self.dropped += count
            self._untold += count
            return
        if self._untold:
            notice = {
                "time": format_time(), "level": "warning", "logger": __name__,
                "message": "log lines were dropped: nobody read them", "count": self._untold,
            }  # fmt: skip
            lines = orjson.dumps(notice) + b"\n" + lines
            self._untold = 0
        self._queued += len(lines)
        self._queue.put(lines)

    def close(self) -> None:
        """Write what is left, if somebody still reads."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (lines := self._queue.get()) is not None:
            self._write(lines)
            self._written += len(lines)

    def _write(self, lines: bytes) -> None:
        view = memoryview(lines)
        while view:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                # Somebody else, who shares the descriptor, made it so.
                select.select([], [self._descriptor], [])
            except OSError:
                return  # the reader has gone for good, and with it the only place to say so
