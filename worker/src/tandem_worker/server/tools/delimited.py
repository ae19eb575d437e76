"""Calls between special tokens: DeepSeek V3, R1 and V3.1, and Kimi K2.

A section holds calls; a call is a header, a separator and the arguments as JSON:

    DeepSeek V3.1:  ⟨calls begin⟩⟨call begin⟩NAME⟨sep⟩{...}⟨call end⟩⟨calls end⟩
    DeepSeek V3/R1: ⟨calls begin⟩⟨call begin⟩function⟨sep⟩NAME\\n```json\\n{...}\\n```⟨call end⟩⟨calls end⟩
    Kimi K2:        ⟨section begin⟩⟨call begin⟩functions.NAME:0⟨argument begin⟩{...}⟨call end⟩⟨section end⟩
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from tandem_worker.server.text.output import Parsed, ToolDelta
from tandem_worker.server.text.stops import cut_at_mark
from tandem_worker.server.tools.stepping import SteppingParser

FENCE_BEGIN, FENCE_END = "```json\n", "\n```"
_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+):\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str
    numbered_ids: bool
    """The header is the id of the call, `functions.NAME:INDEX`, and later turns refer to it."""

    def all(self) -> tuple[str, ...]:
        """All marks, in the order in which they appear in an answer."""
        return (self.section_begin, self.section_end, self.call_begin, self.separator, self.call_end)


DEEPSEEK = Marks(
    section_begin="<｜tool▁calls▁begin｜>",
    section_end="<｜tool▁calls▁end｜>",
    call_begin="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_end="<｜tool▁call▁end｜>",
    numbered_ids=False,
)
KIMI = Marks(
    section_begin="<|tool_calls_section_begin|>",
    section_end="<|tool_calls_section_end|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    numbered_ids=True,
)


class _In(Enum):
    TEXT = auto()
    SECTION = auto()
    HEADER = auto()
    FENCED_NAME = auto()
    ARGUMENTS = auto()


class DelimitedParser(SteppingParser):
    def __init__(self, marks: Marks, *, parallel: bool = True) -> None:
        super().__init__(parallel=parallel)
        self._marks = marks
        self._state = _In.TEXT
        self._ends: tuple[str, ...] = ()
        self._has_arguments = False

    def flush(self) -> Parsed:
        out = Parsed()
        if not self.complete:
            if self._state is _In.TEXT:
                out.content = self._buffer
            elif self._state is _In.ARGUMENTS and self._buffer:
                out.tools.append(ToolDelta(self._numbers.index, self._buffer))
        self._buffer = ""
        return out

    def _step(self, out: Parsed) -> bool:
        marks = self._marks
        match self._state:
            case _In.TEXT:
                before, mark, self._buffer = cut_at_mark(self._buffer, [marks.section_begin], drop_space=True)
                out.content += before
                if mark is not None:
                    self._state = _In.SECTION
            case _In.SECTION:
                _, mark, self._buffer = cut_at_mark(self._buffer, [marks.call_begin, marks.section_end])
                if mark is not None:
                    self._state = _In.HEADER if mark == marks.call_begin else _In.TEXT
            case _In.HEADER:
                mark = self._read_header(out)
            case _In.FENCED_NAME:
                mark = self._read_fenced_name(out)
            case _In.ARGUMENTS:
                before, mark, self._buffer = cut_at_mark(self._buffer, self._ends)
                self._tell(out, before)
                if mark is not None:
                    self._end_call(out)
        return mark is not None and bool(self._buffer)

    def _read_header(self, out: Parsed) -> str | None:
        marks = self._marks
        if marks.separator not in self._buffer:
            return None
        header, _, self._buffer = self._buffer.partition(marks.separator)
        header = header.strip()
        if not marks.numbered_ids and header == "function":
            self._state = _In.FENCED_NAME
            return marks.separator
        match = _KIMI_ID.fullmatch(header) if marks.numbered_ids else None
        self._begin_call(out, match["name"] if match else header, header if match else None, (marks.call_end,))
        return marks.separator

    def _read_fenced_name(self, out: Parsed) -> str | None:
        if FENCE_BEGIN not in self._buffer:
            return None
        name, _, self._buffer = self._buffer.partition(FENCE_BEGIN)
        end = self._marks.call_end
        self._begin_call(out, name.strip(), None, (FENCE_END + end, FENCE_END + "\n" + end, end))
        return FENCE_BEGIN

    def _begin_call(self, out: Parsed, name: str, call_id: str | None, ends: tuple[str, ...]) -> None:
        out.tools.append(self._numbers.begin(name, call_id))
        self._ends = ends
        self._has_arguments = False
        self._state = _In.ARGUMENTS

    def _tell(self, out: Parsed, arguments: str) -> None:
        if not self._has_arguments:
            arguments = arguments.lstrip()
        if arguments:
            self._has_arguments = True
            out.tools.append(ToolDelta(self._numbers.index, arguments))

    def _end_call(self, out: Parsed) -> None:
        if not self._has_arguments:
            out.tools.append(ToolDelta(self._numbers.index, "{}"))
        self.complete = not self._parallel
        self._state = _In.SECTION
