"""Llama 3 and 4: the whole answer is `{"name": ..., "parameters": {...}}`, maybe after `<|python_tag|>`.

Several calls are separated by semicolons. An answer that starts like a JSON object but does not name one of the
request's functions is content.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.tools.json_call import JsonCall
from tandem_worker.server.tools.stepping import SteppingParser

PYTHON_TAG = "<|python_tag|>"


class _In(Enum):
    START = auto()
    CALL = auto()
    BETWEEN = auto()
    TEXT = auto()


class LlamaParser(SteppingParser):
    def __init__(self, names: Collection[str], *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._names = frozenset(names)
        self._state = _In.START
        self._before = ""  # what stood before the call: shown if it is none
        self._call = JsonCall()
        self._told = False

    def flush(self) -> Parsed:
        out = Parsed()
        if self.complete:
            return out
        if self._state is _In.CALL and not self._told:
            out.content = self._before + "".join(self._call.raw) + self._buffer
        elif self._state is _In.START:
            out.content = self._buffer
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        match self._state:
            case _In.START:
                return self._start()
            case _In.CALL:
                return self._read_call(out)
            case _In.BETWEEN:
                rest = self._buffer.lstrip(" \t\r\n;,")
                self._before, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
                if not rest:
                    self._buffer = self._before
                    return False
                self._begin(_In.CALL if rest[0] == "{" else _In.TEXT)
                return True
            case _In.TEXT:
                out.content += self._buffer
                self._buffer = ""
                return False

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if not rest or (len(rest) < len(PYTHON_TAG) and PYTHON_TAG.startswith(rest)):
            return False
        if rest.startswith(PYTHON_TAG):
            self._before, self._buffer = PYTHON_TAG, rest.removeprefix(PYTHON_TAG)
            self._begin(_In.CALL)
        elif rest[0] == "{":
            self._before, self._buffer = self._buffer[: len(self._buffer) - len(rest)], rest
            self._begin(_In.CALL)
        else:
            self._state = _In.TEXT
        return bool(self._buffer)

    def _begin(self, state: _In) -> None:
        self._state = state
        self._call = JsonCall()
        self._told = False

    def _read_call(self, out: Parsed) -> bool:
        call = self._call
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if call.name is not None and not self._told:
            if call.name not in self._names:
                return self._not_a_call(out)
            self._told = True
            out.tools.append(self._numbers.begin(call.name))
        if self._told:
            arguments = call.take_arguments()
            if arguments:
                out.tools.append(ToolDelta(self._numbers.index, arguments))
        if call.done:
            self.complete = not self._parallel
            self._state = _In.BETWEEN
        elif call.broken:
            if not self._told:
                return self._not_a_call(out)
            self._state = _In.BETWEEN
        else:
            return False
        return bool(self._buffer)

    def _not_a_call(self, out: Parsed) -> bool:
        # The tag is no text: code for a built-in tool is shown without it.
        before = "" if self._before == PYTHON_TAG else self._before
        out.content += before + "".join(self._call.raw)
        self._state = _In.TEXT
        return bool(self._buffer)
