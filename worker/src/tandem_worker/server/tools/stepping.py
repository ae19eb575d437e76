"""What the parsers of tool calls share: text is kept in a buffer, and transitions take from it. Pure."""

from __future__ import annotations

from tandem_worker.server.text.output import Parsed, ToolDelta


class CallNumbers:
    """Indices of the tool calls of one choice."""

    __slots__ = ("index",)

    def __init__(self) -> None:
        self.index = -1
        """Number of the current call; -1 before the first."""

    def begin(self, name: str, call_id: str | None = None) -> ToolDelta:
        """The delta that opens the next call. `call_id`: where the model itself has written one."""
        self.index += 1
        return ToolDelta(self.index, id=call_id, name=name)


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
