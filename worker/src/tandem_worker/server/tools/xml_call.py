"""Qwen3-Coder: calls as tags, whose parameters are plain text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

Texts become JSON strings while they are written; other parameters are JSON values, complete ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.text.stops import cut_at_mark
from tandem_worker.server.tools.hermes import BEGIN, END
from tandem_worker.server.tools.python_literal import read_literal
from tandem_worker.server.tools.stepping import SteppingParser

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
CLOSING = r"<\/?(parameter|function)"
"""Regex of what no value may contain."""
# A value ends before the next tag too, where its own closing one was forgotten.
_VALUE_ENDS = tuple(space + mark for mark in (PARAMETER_END, PARAMETER, FUNCTION_END) for space in ("\n", ""))


class _In(Enum):
    TEXT = auto()
    OPEN = auto()
    NAME = auto()
    BODY = auto()
    KEY = auto()
    VALUE_START = auto()
    VALUE = auto()
    TAIL = auto()


def is_text(schema: object) -> bool:
    """The parameter is a string whatever stands there."""
    if not isinstance(schema, Mapping):
        return False
    if "type" in schema:
        return schema["type"] == "string"
    choices = schema.get("enum")
    return isinstance(choices, list) and bool(choices) and all(isinstance(item, str) for item in choices)


class XmlParser(SteppingParser):
    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], *, parallel: bool = True) -> None:
        """`schemas`: of each function's parameters; they tell texts from numbers."""
        super().__init__(parallel=parallel)
        self._schemas = schemas
        self._state = _In.TEXT
        self._name = ""
        self._num_parameters = 0
        self._text = False
        self._value = ""  # of a parameter that is no text

    def flush(self) -> Parsed:
        out = Parsed()
        if not self.complete:
            match self._state:
                case _In.TEXT:
                    out.content = self._buffer
                case _In.OPEN:
                    out.content = BEGIN + self._buffer
                case _In.NAME:
                    out.content = FUNCTION + self._buffer
                case _In.VALUE if self._text:
                    self._tell(out, _quoted(self._buffer))
                case _In.VALUE:
                    self._tell(out, self._value + self._buffer)
                case _:
                    pass
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        match self._state:
            case _In.TEXT:
                before, mark, self._buffer = cut_at_mark(self._buffer, [BEGIN, FUNCTION], drop_space=True)
                out.content += before
                if mark is not None:
                    self._state = _In.OPEN if mark == BEGIN else _In.NAME
            case _In.OPEN:
                mark = self._open(out)
            case _In.NAME:
                mark = self._begin_call(out)
            case _In.BODY:
                mark = self._read_tag(out)
            case _In.KEY:
                mark = self._begin_value(out)
            case _In.VALUE_START:
                self._buffer, self._state = self._buffer.removeprefix("\n"), _In.VALUE
                return True
            case _In.VALUE:
                mark = self._read_value(out)
            case _In.TAIL:
                return self._tail()
        return mark is not None

    def _open(self, out: Parsed) -> str | None:
        """Behind `<tool_call>`: a function, or something that is no call."""
        found = min(((self._buffer.find(mark), mark) for mark in (FUNCTION, END) if mark in self._buffer), default=None)
        if found is None:
            return None
        start, mark = found
        inside, self._buffer = self._buffer[:start], self._buffer[start + len(mark) :]
        if mark == END:
            out.content += BEGIN + inside + END
        self._state = _In.NAME if mark == FUNCTION else _In.TEXT
        return mark

    def _take_until(self, end: str) -> str | None:
        if end not in self._buffer:
            return None
        text, _, self._buffer = self._buffer.partition(end)
        return text

    def _begin_call(self, out: Parsed) -> str | None:
        name = self._take_until(">")
        if name is not None:
            self._name, self._num_parameters, self._state = name.strip(), 0, _In.BODY
            out.tools.append(self._numbers.begin(self._name))
            self._tell(out, "{")
        return name

    def _read_tag(self, out: Parsed) -> str | None:
        _, mark, self._buffer = cut_at_mark(self._buffer, [PARAMETER, FUNCTION_END, END])
        if mark == PARAMETER:
            self._state = _In.KEY
        elif mark is not None:
            self._tell(out, "}")
            self.complete = not self._parallel
            self._state = _In.TEXT if mark == END else _In.TAIL
        return mark

    def _begin_value(self, out: Parsed) -> str | None:
        key = self._take_until(">")
        if key is None:
            return None
        key = key.strip()
        properties = self._schemas.get(self._name, {}).get("properties")
        self._text = is_text(properties.get(key)) if isinstance(properties, Mapping) else False
        self._value = ""
        self._tell(out, f"{', ' if self._num_parameters else ''}{json.dumps(key)}: " + ('"' if self._text else ""))
        self._num_parameters += 1
        self._state = _In.VALUE_START
        return key

    def _read_value(self, out: Parsed) -> str | None:
        before, mark, self._buffer = cut_at_mark(self._buffer, _VALUE_ENDS)
        if self._text:
            self._tell(out, _quoted(before))
        else:
            self._value += before
        if mark is None:
            return None
        self._tell(out, '"' if self._text else _to_json(self._value))
        if PARAMETER_END not in mark:
            self._buffer = mark + self._buffer
        self._state = _In.BODY
        return mark

    def _tail(self) -> bool:
        """Behind a function: its `</tool_call>`, or, where that was forgotten, whatever comes."""
        rest = self._buffer.lstrip()
        if len(rest) < len(END) and END.startswith(rest):
            return False
        if rest.startswith(END):
            self._buffer = rest.removeprefix(END)
        self._state = _In.TEXT
        return True

    def _tell(self, out: Parsed, arguments: str) -> None:
        if arguments:
            out.tools.append(ToolDelta(self._numbers.index, arguments))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _to_json(text: str) -> str:
    """A value that models write as JSON, at times as Python, and at times as a bare word."""
    value: Any = text
    for read in (json.loads, read_literal):
        try:
            value = read(text.strip())
            break
        except (ValueError, RecursionError):
            continue
    return json.dumps(value, ensure_ascii=False)
