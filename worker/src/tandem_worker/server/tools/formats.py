"""Which format a model writes tool calls in, and what follows from it: parser, visible marks, grammar."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_worker.server.output import TextParser
from tandem_worker.server.tools import delimited, hermes
from tandem_worker.server.tools.delimited import DEEPSEEK, KIMI, DelimitedParser, Marks
from tandem_worker.server.tools.hermes import HermesParser
from tandem_worker.server.tools.llama import PYTHON_TAG, LlamaParser
from tandem_worker.server.toolspec import Tool, ToolOptions
from tandem_worker.structured.compiler import embed_json_schema

MAX_CALLS = 32
"""Calls of one constrained answer: a grammar without an end would let a weak model call for ever."""

WriteMark = Callable[[str], str]
"""Writes a mark in a grammar: the token where it is one, else its characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    marks: tuple[str, ...]
    """Texts that must stay visible to the parser although their tokens are special."""
    new_parser: Callable[[ToolOptions], TextParser]
    calls: Callable[[Sequence[Tool], str, WriteMark], tuple[list[str], str]]
    """(tools, repetition, mark writer) → rules of a grammar, and the name of the rule for the calls."""
    text: str = r"/(.|\n)*/"
    """Lark expression of an answer, or the part of it, that is no call."""
    text_before_calls: bool = True


def detect(vocabulary: Mapping[str, int], template: str) -> ToolFormat | None:
    """The format of a model, from its special tokens first and its chat template second; None when unknown."""
    if DEEPSEEK.section_begin in vocabulary:
        return DEEPSEEK_FENCED_FORMAT if "```json" in template else DEEPSEEK_FORMAT
    if KIMI.section_begin in vocabulary:
        return KIMI_FORMAT
    if hermes.BEGIN in vocabulary or hermes.BEGIN in template:
        return HERMES_FORMAT
    if PYTHON_TAG in vocabulary or '"parameters"' in template:
        return LLAMA_FORMAT
    return None


def build_grammar(
    tool_format: ToolFormat,
    options: ToolOptions,
    vocabulary: Mapping[str, int],
    *,
    answer_schema: Mapping[str, Any] | None = None,
    enforce_schemas: bool = True,
) -> str:
    """Lark grammar of the answers that `options` allow: text and calls, or (required) calls alone.

    With `answer_schema` an answer without calls is JSON of that schema. Without `enforce_schemas` the arguments are any
    JSON object, except of tools that are strict.
    """

    def write(mark: str) -> str:
        return f"<[{vocabulary[mark]}]>" if mark in vocabulary else json.dumps(mark)

    tools = [
        tool if tool.strict or enforce_schemas else Tool(
            name=tool.name, parameters={"type": "object"}, strict=False, definition=tool.definition
        )
        for tool in options.callable_tools
    ]  # fmt: skip
    repetition = f"{{1,{MAX_CALLS}}}" if options.parallel else ""
    rules, calls = tool_format.calls(tools, repetition, write)
    if options.mode == "required":
        start = f"start: {calls}"
    elif answer_schema is not None:
        start = f"start: answer | {calls}"
        rules = [*rules, f"answer: {embed_json_schema(answer_schema)}"]
    else:
        start = f"start: TEXT | {'TEXT? ' if tool_format.text_before_calls else ''}{calls}"
        rules = [*rules, f"TEXT: {tool_format.text}"]
    return "\n".join(["%llguidance {}", start, *rules]) + "\n"


def _call_object(tool: Tool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: _arguments(tool)},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _arguments(tool: Tool) -> dict[str, Any]:
    """Arguments are an object even where the schema leaves that open."""
    return {"type": "object", **tool.parameters}


def _json_calls(tools: Sequence[Tool], key: str) -> list[str]:
    bodies = [f"call_{index}: {embed_json_schema(_call_object(tool, key))}" for index, tool in enumerate(tools)]
    names = " | ".join(f"call_{index}" for index in range(len(tools)))
    return [f"body: {names}", *bodies]


def _hermes_calls(tools: Sequence[Tool], repetition: str, write: WriteMark) -> tuple[list[str], str]:
    call = f'call: {write(hermes.BEGIN)} "\\n" body "\\n" {write(hermes.END)} "\\n"?'
    return [f"calls: call{repetition}", call, *_json_calls(tools, "arguments")], "calls"


def _llama_calls(tools: Sequence[Tool], repetition: str, write: WriteMark) -> tuple[list[str], str]:
    more = f'("; " body){{0,{MAX_CALLS - 1}}}' if repetition else ""
    return [f"calls: body {more}", *_json_calls(tools, "parameters")], "calls"


def _delimited_calls(marks: Marks, fenced: bool) -> Callable[[Sequence[Tool], str, WriteMark], tuple[list[str], str]]:
    def rules(tools: Sequence[Tool], repetition: str, write: WriteMark) -> tuple[list[str], str]:
        calls = f"calls: {write(marks.section_begin)} call{repetition} {write(marks.section_end)}"
        options: list[str] = []
        bodies: list[str] = []
        for index, tool in enumerate(tools):
            separator = write(marks.separator)
            if marks.numbered_ids:
                header = f"{json.dumps(f'functions.{tool.name}:')} NUMBER {separator}"
            elif fenced:
                header = f'"function" {separator} {json.dumps(tool.name + chr(10) + delimited.FENCE_BEGIN)}'
            else:
                header = f"{json.dumps(tool.name)} {separator}"
            tail = json.dumps(delimited.FENCE_END) if fenced else ""
            options.append(f"{header} arguments_{index} {tail}")
            bodies.append(f"arguments_{index}: {embed_json_schema(_arguments(tool))}")
        call = f'call: {write(marks.call_begin)} ({" | ".join(options)}) {write(marks.call_end)} "\\n"?'
        number = ["NUMBER: /[0-9]{1,3}/"] if marks.numbered_ids else []
        return [calls, call, *bodies, *number], "calls"

    return rules


HERMES_FORMAT = ToolFormat(
    name="hermes",
    marks=(hermes.BEGIN, hermes.END),
    new_parser=lambda options: HermesParser(parallel=options.parallel),
    calls=_hermes_calls,
)
LLAMA_FORMAT = ToolFormat(
    name="llama",
    marks=(PYTHON_TAG,),
    new_parser=lambda options: LlamaParser([tool.name for tool in options.tools], parallel=options.parallel),
    calls=_llama_calls,
    text=r"/[^{\s](.|\n)*/",
    text_before_calls=False,
)
DEEPSEEK_FORMAT = ToolFormat(
    name="deepseek",
    marks=DEEPSEEK.all(),
    new_parser=lambda options: DelimitedParser(DEEPSEEK, parallel=options.parallel),
    calls=_delimited_calls(DEEPSEEK, fenced=False),
)
DEEPSEEK_FENCED_FORMAT = ToolFormat(
    name="deepseek_v3",
    marks=DEEPSEEK.all(),
    new_parser=DEEPSEEK_FORMAT.new_parser,  # one parser reads both, a model is held to its own
    calls=_delimited_calls(DEEPSEEK, fenced=True),
)
KIMI_FORMAT = ToolFormat(
    name="kimi",
    marks=KIMI.all(),
    new_parser=lambda options: DelimitedParser(KIMI, parallel=options.parallel),
    calls=_delimited_calls(KIMI, fenced=False),
)
FORMATS: Mapping[str, ToolFormat] = {
    item.name: item for item in (HERMES_FORMAT, LLAMA_FORMAT, DEEPSEEK_FORMAT, DEEPSEEK_FENCED_FORMAT, KIMI_FORMAT)
}
