"""Indices of the tool calls of one choice."""

from __future__ import annotations

from tandem_worker.server.text.output import ToolDelta


class CallNumbers:
    __slots__ = ("index",)

    def __init__(self) -> None:
        self.index = -1
        """Number of the current call; -1 before the first."""

    def begin(self, name: str, call_id: str | None = None) -> ToolDelta:
        """The delta that opens the next call. `call_id`: where the model itself has written one."""
        self.index += 1
        return ToolDelta(self.index, id=call_id, name=name)
