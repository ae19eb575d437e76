"""Stop strings, found across token and chunk boundaries. Pure.

The result depends on the text alone, never on how it was cut: the stop string that is complete first wins, and of
two that are complete at the same character the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


class StopMatcher:
    """Withholds text while it may be the beginning of a stop string; drops the stop string and what follows."""

    __slots__ = ("_held", "_keep", "_stops", "matched", "stopped")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string itself is part of the text."""
        self._keep = keep
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that may be sent now. After a match `stopped` is true and nothing more is returned."""
        if self.stopped:
            return ""
        text = self._held + text
        first: tuple[int, int, str] | None = None  # (end, start, stop string) of the best match
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                match = (start + len(stop), start, stop)
                first = match if first is None else min(first, match)
        if first is not None:
            self.stopped = True
            self._held = ""
            self.matched = first[2]
            return text[: first[0] if self._keep else first[1]]
        length = held_back(text, self._stops)
        cut = len(text) - length
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was withheld, when the text ended without a stop string."""
        held, self._held = self._held, ""
        return held
