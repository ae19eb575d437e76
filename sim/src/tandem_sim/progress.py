"""What a long run is at: one line that is written over on a terminal, else a line every few seconds."""

from __future__ import annotations

import sys
import time
from typing import TextIO

_LOGGED_SECONDS = 5.0
_DRAWN_SECONDS = 0.1


class Progress:
    """On stderr, so that the table on stdout stays clean. Nothing shows of a run of less than a moment."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._drawn = 0

    def tell(self, text: str, share: float) -> None:
        """`share` of what the text names is done."""
        now = time.monotonic()
        if now - self._last < (_DRAWN_SECONDS if self._terminal else _LOGGED_SECONDS):
            return
        self._last = now
        line = f"{now - self._began:4.0f} s  {text}: {share:.0%}"
        self._write(f"\r{line:<{self._drawn}}" if self._terminal else f"{line}\n")
        self._drawn = len(line)

    def clear(self) -> None:
        """Take the line away."""
        if self._terminal and self._drawn:
            self._write(f"\r{'':<{self._drawn}}\r")
            self._drawn = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
