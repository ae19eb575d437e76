"""What the parsers of tool calls share: text is kept in a buffer, and transitions take from it. Pure."""

from __future__ import annotations

from tandem_worker.server.text.output import Parsed
from tandem_worker.server.tools.numbering import CallNumbers


class SteppingParser:
    """Formats supply `_step` and `flush`, and set `complete` after a call when only one is allowed."""

    reasoning = False

    def __init__(self, *, parallel: bool) -> None:
        self.complete = False
        self._parallel = parallel
        self._buffer = ""
        self._numbers = CallNumbers()

    def feed(self, text: str) -> Parsed:
        """What the next text of the answer adds; text that may yet become a mark is kept back."""
        self._buffer += text
        out = Parsed()
        while not self.complete and self._buffer and self._step(out):
            pass
        return out

    def _step(self, out: Parsed) -> bool:
        """One transition; false when more text is needed."""
        raise NotImplementedError
