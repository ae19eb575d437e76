"""Finding marks such as `<tool_call>` in text that arrives in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.server.text.stops import held_back


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
