"""Stop strings, and marks such as `<tool_call>`, found across token and chunk boundaries. Pure.

The result depends on the text alone, never on how it was cut: the stop string that is complete first wins, and of two
that are complete at the same character the longer one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


def held_back(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a mark."""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return longest


def cut_at_mark(text: str, marks: Sequence[str], *, drop_space: bool = False) -> tuple[str, str | None, str]:
    """Split at the first mark: (text before it, the mark, the rest).

    Without a mark: (text that is certainly before one, None, what must be kept until more text is there). With
    `drop_space` white space before a mark is dropped, so it is kept too until it is known what follows.
    """
    found = min(((text.find(mark), mark) for mark in marks if mark in text), default=None)
    if found is not None:
        start, mark = found
        before = text[:start]
        return before.rstrip() if drop_space else before, mark, text[start + len(mark) :]
    cut = len(text) - held_back(text, marks)
    if drop_space:
        cut = len(text[:cut].rstrip())
    return text[:cut], None, text[cut:]


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """For each beginning of `stop`, by its length less one: how much of its end is a shorter beginning."""
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
    """Withholds text while it may be the beginning of a stop string; drops the stop string and what follows."""

    __slots__ = ("_begun", "_held", "_keep", "_stops", "matched", "stopped")

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        """`keep`: the stop string itself is part of the text."""
        self._keep = keep
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._stops = tuple(stops)
        self._begun = [0] * len(self._stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that may be sent now. After a match `stopped` is true and nothing more is returned."""
        if self.stopped:
            return ""
        first: tuple[int, int, str] | None = None  # (end, start, stop string) of the best match
        for number, stop in enumerate(self._stops):
            self._begun[number], last = _follow(stop, self._begun[number], text)
            if last >= 0:
                end = len(self._held) + last + 1
                match = (end, end - len(stop), stop)
                first = match if first is None else min(first, match)
        text = self._held + text
        if first is not None:
            end, start, self.matched = first
            self.stopped = True
            self._held = ""
            return text[: end if self._keep else start]
        cut = len(text) - max(self._begun, default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """What was withheld, when the text ended without a stop string."""
        held, self._held = self._held, ""
        return held
