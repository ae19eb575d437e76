"""Indices and ids of the tool calls of one choice."""

from __future__ import annotations

import secrets

from tandem_worker.server.text.output import ToolDelta


class CallNumbers:
    __slots__ = ("index",)

    def __init__(self) -> None:
        self.index = -1
        """Number of the current call; -1 before the first."""

    def begin(self, name: str, call_id: str | None = None) -> ToolDelta:
        """The delta that opens the next call."""
        self.index += 1
        return ToolDelta(self.index, id=call_id or f"call_{secrets.token_hex(12)}", name=name)
