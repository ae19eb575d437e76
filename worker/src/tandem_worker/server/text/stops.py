"""Stop strings and stop regexes, found across token and chunk boundaries. Pure.

The result depends on the text alone, never on how it was cut: what is complete first wins, and of two that are complete
at the same character the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tandem_worker.server.text.patterns import Patterns, PatternSearch

MAX_WITHHELD = 1024
"""Characters. A stop string has no more; of a longer match of a regex the beginning is out before it is one."""


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Of each beginning of `stop`, by its length less one: how much of its end is a shorter beginning."""
    borders = [0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length - 1]
        borders.append(length + (stop[length] == character))
    return tuple(borders)


def _follow(stop: str, begun: int, text: str) -> tuple[int, int]:
    """How much of `stop` has begun at the end of `text`, where `begun` of it had before; and where in `text` it was
    complete, -1 when it was not. Whatever the texts are, a character costs two comparisons on average."""
    if not begun and stop[0] not in text:
        return 0, -1
    borders = _borders(stop)
    for index, character in enumerate(text):
        while begun and stop[begun] != character:
            begun = borders[begun - 1]
        begun += stop[begun] == character
        if begun == len(stop):
            return begun, index
    return begun, -1


class StopMatcher:
    """Withholds text while it may be the beginning of a stop; drops the stop and what follows."""

    __slots__ = ("_begun", "_held", "_keep", "_search", "_stops", "matched", "stopped")

    def __init__(self, stops: Sequence[str], patterns: Patterns | None = None, *, keep: bool = False) -> None:
        """`keep`: the stop itself is part of the text."""
        self._keep = keep
        self.matched: str | None = None
        """The stop string, or the regex."""
        self._stops = tuple(stops)
        self._begun = [0] * len(self._stops)
        self._search = None if patterns is None else PatternSearch(patterns)
        self._held = ""
        self.stopped = False

    @property
    def has_patterns(self) -> bool:
        """Whether a regex may end the text: that costs much more than strings do."""
        return self._search is not None

    def skip(self, text: str) -> None:
        """Text before all that is fed, in which nothing stops. A regex knows that it was there."""
        if self._search is not None:
            self._search.skip(text)

    def feed(self, text: str) -> str:
        """Text that may be sent now. After a match `stopped` is true and nothing more is returned."""
        if self.stopped:
            return ""
        # Of the best match: after how much it was certain, where it begins and ends, and what it is.
        first: tuple[int, int, int, str] | None = None
        for number, stop in enumerate(self._stops):
            self._begun[number], last = _follow(stop, self._begun[number], text)
            if last >= 0:
                end = len(self._held) + last + 1
                match = (end, end - len(stop), end, stop)
                first = match if first is None else min(first, match)
        begun = max(self._begun, default=0)
        if self._search is not None:
            found = self._find(text)
            first = min((match for match in (first, found) if match is not None), default=None)
            begun = max(begun, self._search.begun)
        text = self._held + text
        if first is not None:
            return self._stop(text, *first)
        cut = max(0, len(text) - min(begun, MAX_WITHHELD))
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was withheld, when the text ended. That may be what a regex waited for: then `stopped` is true."""
        found = None if self.stopped else self._find(None)
        if found is not None:
            return self._stop(self._held, *found)
        held, self._held = self._held, ""
        return held

    def _find(self, text: str | None) -> tuple[int, int, int, str] | None:
        """A regex's match in what is withheld and `text` after it, or (None) where the text ends."""
        search = self._search
        if search is None:
            return None
        origin = search.position - len(self._held)
        found = search.finish() if text is None else search.feed(text)
        if found is None:
            return None
        certain, start, end, number = found
        return certain - origin, start - origin, end - origin, search.patterns.texts[number]

    def _stop(self, text: str, certain: int, start: int, end: int, what: str) -> str:
        self.stopped = True
        self.matched = what
        self._held = ""
        return text[: end if self._keep else max(0, start, certain - 1 - MAX_WITHHELD)]
