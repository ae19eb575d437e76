"""Splits `<think>…</think>` off the answer. Pure.

Whether the text starts inside the reasoning is known from the prompt: some templates end with `<think>`. White space
around the reasoning belongs to neither part.
"""

from __future__ import annotations

from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, TextParser
from tandem_worker.server.text.stops import cut_at_mark

BEGIN, END = "<think>", "</think>"


class _In(Enum):
    START = auto()
    REASONING_START = auto()
    REASONING = auto()
    ANSWER_START = auto()
    ANSWER = auto()


class ReasoningParser:
    """Reasoning first, then what `inner` makes of the answer (None: all of it is content)."""

    def __init__(self, inner: TextParser | None, *, inside: bool) -> None:
        self._inner = inner
        self._state = _In.REASONING_START if inside else _In.START
        self._buffer = ""

    @property
    def reasoning(self) -> bool:
        return self._state in (_In.REASONING_START, _In.REASONING)

    @property
    def complete(self) -> bool:
        return self._inner is not None and self._inner.complete

    def feed(self, text: str) -> Parsed:
        if self._state is _In.ANSWER:
            return self._answer(text)
        self._buffer += text
        out = Parsed()
        while self._step(out):
            pass
        return out

    def flush(self) -> Parsed:
        out = Parsed()
        if self._state is _In.REASONING:
            out.reasoning = self._buffer
        elif self._state is _In.START:
            out = self._answer(self._buffer)
        self._buffer = ""
        if self._inner is not None:
            out.add(self._inner.flush())
        return out

    def _answer(self, text: str) -> Parsed:
        return Parsed(content=text) if self._inner is None else self._inner.feed(text)

    def _step(self, out: Parsed) -> bool:
        """One transition; false when more text is needed."""
        match self._state:
            case _In.START:
                rest = self._buffer.lstrip()
                if not rest or (len(rest) < len(BEGIN) and BEGIN.startswith(rest)):
                    return False
                if rest.startswith(BEGIN):
                    self._state, self._buffer = _In.REASONING_START, rest.removeprefix(BEGIN)
                else:
                    self._state = _In.ANSWER
                return True
            case _In.REASONING_START | _In.ANSWER_START:
                self._buffer = self._buffer.lstrip()
                if not self._buffer:
                    return False
                self._state = _In.REASONING if self._state is _In.REASONING_START else _In.ANSWER
                return True
            case _In.REASONING:
                before, mark, self._buffer = cut_at_mark(self._buffer, [END], drop_space=True)
                out.reasoning += before
                if mark is not None:
                    self._state = _In.ANSWER_START
                return mark is not None
            case _In.ANSWER:
                text, self._buffer = self._buffer, ""
                if text:
                    out.add(self._answer(text))
                return False
