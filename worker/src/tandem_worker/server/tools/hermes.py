"""`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5, Qwen3 and models trained after them."""

from __future__ import annotations

from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.text.stops import cut_at_mark
from tandem_worker.server.tools.json_call import JsonCall
from tandem_worker.server.tools.stepping import SteppingParser

BEGIN, END = "<tool_call>", "</tool_call>"


class _In(Enum):
    TEXT = auto()
    CALL = auto()
    TAIL = auto()


class HermesParser(SteppingParser):
    def __init__(self, *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._state = _In.TEXT
        self._call = JsonCall()
        self._told = False

    def flush(self) -> Parsed:
        out = Parsed()
        if self.complete:
            return out
        if self._state is _In.TEXT:
            out.content = self._buffer
        elif self._state is _In.CALL and not self._told:
            out.content = BEGIN + "".join(self._call.raw) + self._buffer
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        match self._state:
            case _In.TEXT:
                before, mark, self._buffer = cut_at_mark(self._buffer, [BEGIN], drop_space=True)
                out.content += before
                if mark is None:
                    return False
                self._state, self._call, self._told = _In.CALL, JsonCall(), False
                return bool(self._buffer)
            case _In.CALL:
                return self._read_call(out)
            case _In.TAIL:
                # Whatever a model writes between the object and the closing mark is not for the client.
                _, mark, self._buffer = cut_at_mark(self._buffer, [END])
                if mark is not None:
                    self._state = _In.TEXT
                return mark is not None and bool(self._buffer)

    def _read_call(self, out: Parsed) -> bool:
        call = self._call
        self._buffer = self._buffer[call.feed(self._buffer) :]
        if call.name is not None:
            if not self._told:
                self._told = True
                out.tools.append(self._numbers.begin(call.name))
            arguments = call.take_arguments()
            if arguments:
                out.tools.append(ToolDelta(self._numbers.index, arguments))
        if call.done:
            self.complete = not self._parallel
            self._state = _In.TAIL
        elif call.broken:
            if self._told:
                self._state = _In.TAIL
            else:
                out.content += BEGIN + "".join(call.raw)
                self._state = _In.TEXT
        else:
            return False
        return bool(self._buffer)
