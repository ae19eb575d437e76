"""Llama 4 and smaller Llama 3.2: the whole answer is `[NAME(key="value", n=3), ...]`, maybe between python marks.

An answer that starts like a list but does not call one of the request's functions is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.tools.python_literal import KeywordArguments
from tandem_worker.server.tools.stepping import SteppingParser

BEGIN, END = "<|python_start|>", "<|python_end|>"
_OPENING = re.compile(r"\s*([\w.-]*)\s*(\(?)")


class _In(Enum):
    START = auto()
    NAME = auto()
    ARGUMENTS = auto()
    BETWEEN = auto()
    TAIL = auto()
    TEXT = auto()


class PythonicParser(SteppingParser):
    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._names = frozenset(names)
        self._state = _In.START
        self._before = ""  # what stood before a call: shown if it is none
        self._arguments = KeywordArguments()

    def flush(self) -> Parsed:
        out = Parsed()
        if not self.complete and self._state in (_In.START, _In.NAME):
            out.content = self._before + self._buffer
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        match self._state:
            case _In.START:
                return self._start()
            case _In.NAME:
                return self._read_name(out)
            case _In.ARGUMENTS:
                return self._read_arguments(out)
            case _In.BETWEEN:
                return self._between()
            case _In.TAIL:
                return self._skip(END, _In.TEXT)
            case _In.TEXT:
                out.content += self._before + self._buffer
                self._before = self._buffer = ""
                return False

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or (len(rest) < len(BEGIN) and BEGIN.startswith(rest)):
            return False
        if rest.startswith(BEGIN):
            self._buffer = rest.removeprefix(BEGIN)  # the mark is no text
            return True
        if rest[0] != "[":
            self._state = _In.TEXT
            return True
        self._before, self._buffer = self._buffer[: len(self._buffer) - len(rest) + 1], rest[1:]
        self._state = _In.NAME
        return True

    def _read_name(self, out: Parsed) -> bool:
        match = _OPENING.match(self._buffer)
        assert match is not None
        name, opened = match[1], bool(match[2])
        if opened and name in self._names:
            out.tools.append(self._numbers.begin(name))
            self._before, self._buffer = "", self._buffer[match.end() :]
            self._arguments, self._state = KeywordArguments(), _In.ARGUMENTS
            return True
        if not opened and match.end() == len(self._buffer) and any(known.startswith(name) for known in self._names):
            return False
        self._state = _In.TEXT
        return True

    def _read_arguments(self, out: Parsed) -> bool:
        taken = self._arguments.feed(self._buffer)
        self._buffer = self._buffer[taken:]
        text = self._arguments.take()
        if text:
            out.tools.append(ToolDelta(self._numbers.index, text))
        if self._arguments.done:
            self.complete = not self._parallel
            self._state = _In.BETWEEN
        elif self._arguments.broken:
            self._state = _In.TEXT
        return self._state is not _In.ARGUMENTS

    def _between(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest:
            return False
        if rest[0] == ",":
            self._before, self._buffer, self._state = rest[0], rest[1:], _In.NAME
        elif rest[0] == "]":
            self._buffer, self._state = rest[1:], _In.TAIL
        else:
            self._state = _In.TEXT
        return True

    def _skip(self, mark: str, following: _In) -> bool:
        """White space and the mark, if it is there."""
        rest = self._buffer.lstrip()
        if len(rest) < len(mark) and mark.startswith(rest):
            return False
        if rest.startswith(mark):
            self._buffer = rest.removeprefix(mark).lstrip()
            return bool(self._buffer)
        self._buffer, self._state = rest, following
        return True
