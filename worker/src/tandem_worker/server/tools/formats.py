"""Which format a model writes tool calls in, and what follows from it: parser, visible marks, grammar."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem_worker.server.structured.compiler import HEADER, embed_json_schema
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import TEXT_BYTES
from tandem_worker.server.text.output import TextParser
from tandem_worker.server.tools import delimited, harmony, hermes, pythonic, xml_call
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.delimited import DEEPSEEK, KIMI, DelimitedParser, Marks
from tandem_worker.server.tools.harmony import HarmonyParser
from tandem_worker.server.tools.hermes import HermesParser
from tandem_worker.server.tools.llama import PYTHON_TAG, LlamaParser
from tandem_worker.server.tools.parameters import Parameters, Size, move_references, text_value
from tandem_worker.server.tools.pythonic import PythonicParser
from tandem_worker.server.tools.xml_call import XmlParser

MAX_CALLS = 32
"""Calls of one constrained answer: a grammar without an end would let a weak model call for ever."""

MAX_REMARKS = 8
"""Messages before the answer proper of a constrained Harmony answer."""
MAX_OPEN = 16
"""Parameters of a function whose schema names none."""

_CLOSABLE = frozenset({
    "$defs", "$schema", "additionalProperties", "default", "definitions", "description", "examples", "items",
    "maxItems", "minItems", "properties", "required", "title", "type",
})  # fmt: skip
"""Keywords beside which a list of properties can be taken for all of them."""

WriteMark = Callable[[str], str]
"""Writes a mark in a grammar: the token where it is one, else its characters."""
WriteCalls = Callable[[Sequence[Tool], str, WriteMark, Size], tuple[list[str], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    name: str
    marks: tuple[str, ...]
    """Texts that must stay visible to the parser although their tokens are special."""
    new_parser: Callable[[ToolOptions], TextParser]
    calls: WriteCalls
    """(tools, repetition, mark writer, size) → rules of a grammar, and the name of the rule for the calls. Raises
    GrammarError."""
    text: str = r"/(.|\n)*/"
    """Lark expression of an answer, or the part of it, that is no call."""
    text_before_calls: bool = True
    frame: Callable[[WriteMark], tuple[list[str], str, str]] = lambda write: ([], "", "")
    """Mark writer → rules, and two Lark expressions: what may stand before everything, and what begins an answer."""
    read_opening: Callable[[str], str] = lambda prompt: ""
    """The end of a prompt that the parser reads before the answer."""
    always: bool = False
    """All answers have this format, whether there are tools or not, and it splits reasoning off itself."""


def detect(vocabulary: Mapping[str, int], template: str) -> ToolFormat | None:
    """The format of a model, from its special tokens first and its chat template second; None when unknown."""
    if harmony.CHANNEL in vocabulary and harmony.MESSAGE in vocabulary:
        return HARMONY_FORMAT
    if DEEPSEEK.section_begin in vocabulary:
        return DEEPSEEK_FENCED_FORMAT if "```json" in template else DEEPSEEK_FORMAT
    if KIMI.section_begin in vocabulary:
        return KIMI_FORMAT
    if xml_call.FUNCTION in template:
        return XML_FORMAT
    if hermes.BEGIN in vocabulary or hermes.BEGIN in template:
        return HERMES_FORMAT
    if pythonic.BEGIN in vocabulary and '"parameters"' not in template:
        return PYTHONIC_FORMAT
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
    most_bytes: int = TEXT_BYTES,
) -> str:
    """Lark grammar of the answers that `options` allow: text and calls, or (required) calls alone.

    With `answer_schema` an answer without calls is JSON of that schema. Without `enforce_schemas` the arguments are any
    JSON object, except of tools that are strict. Raises GrammarError for a schema that the format cannot hold, and as
    soon as formats that repeat parts of schemas have written `most_bytes`.
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
    rules, before, head = tool_format.frame(write)
    options_of_answer: list[str] = []
    if options.mode != "required":
        if answer_schema is not None:
            options_of_answer.append(f"{head} answer")
            rules = [*rules, f"answer: {embed_json_schema(answer_schema)}"]
        else:
            options_of_answer.append(f"{head} TEXT")
            rules = [*rules, f"TEXT: {tool_format.text}"]
    if tools:
        call_rules, calls = tool_format.calls(tools, repetition, write, Size(most_bytes))
        text_before = options.mode == "auto" and answer_schema is None and tool_format.text_before_calls
        options_of_answer.append(f"{'TEXT? ' if text_before else ''}{calls}")
        rules = [*rules, *call_rules]
    start = f"start: {before} ({' | '.join(options_of_answer)})"
    return HEADER + "\n".join([start, *rules]) + "\n"


def _call_object(tool: Tool, key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, key: move_references(_arguments(tool), f"#/properties/{key}")},
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


def _hermes_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    call = f'call: {write(hermes.BEGIN)} "\\n" body "\\n" {write(hermes.END)} "\\n"?'
    return [f"calls: call{repetition}", call, *_json_calls(tools, "arguments")], "calls"


def _llama_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    more = f'("; " body){{0,{MAX_CALLS - 1}}}' if repetition else ""
    return [f"calls: body {more}", *_json_calls(tools, "parameters")], "calls"


def _generic_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    closed = [dataclasses.replace(tool, parameters=_close(tool.parameters)) for tool in tools]
    return _llama_calls(closed, repetition, write, size)


def _close(schema: Any) -> Any:
    """The schema with no properties but those that it lists, where it does not say that there may be others.

    A model that never learned to call functions fills an open object with properties until it has no room left. Schemas
    with keywords that could ask for others stay as they are.
    """
    if not isinstance(schema, dict) or not schema.keys() <= _CLOSABLE:
        return schema
    closed = dict(schema)
    if "items" in schema:
        closed["items"] = _close(schema["items"])
    if isinstance(properties := schema.get("properties"), dict):
        closed["properties"] = {key: _close(value) for key, value in properties.items()}
        required = schema.get("required", [])
        if isinstance(required, list) and all(isinstance(name, str) and name in properties for name in required):
            closed.setdefault("additionalProperties", False)
    return closed


def _delimited_calls(marks: Marks, fenced: bool) -> WriteCalls:
    def rules(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
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


def _harmony_frame(write: WriteMark) -> tuple[list[str], str, str]:
    """A few thoughts and remarks may come before the answer."""
    channel, message = write(harmony.CHANNEL), write(harmony.MESSAGE)
    remark = (
        f'remark: {channel} ("analysis" | "commentary") {message} REMARK {write(harmony.END)} '
        f'{write(harmony.START)} "{harmony.ROLE}"'
    )
    return [remark, r"REMARK: /(.|\n)*/"], f"remark{{0,{MAX_REMARKS}}}", f'{channel} "final" {message}'


def _harmony_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    channel, message = write(harmony.CHANNEL), write(harmony.MESSAGE)
    kind = f'({write(harmony.CONSTRAIN)}? "json")?'
    options: list[str] = []
    bodies: list[str] = []
    for index, tool in enumerate(tools):
        name = json.dumps(f"to=functions.{tool.name}")[1:-1]
        in_channel = f'{channel} "commentary {name}" " "? {kind}'
        in_role = f'" {name}" {channel} "commentary" " "? {kind}'
        options.append(f"({in_channel} | {in_role}) {message} arguments_{index}")
        bodies.append(f"arguments_{index}: {embed_json_schema(_arguments(tool))}")
    return [f"call: {' | '.join(options)}", *bodies], "call"  # one: its end token ends the answer


def _pythonic_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    more = f'(", " call){{0,{MAX_CALLS - 1}}}' if repetition else ""
    rules = [f'calls: "[" call {more} "]"', f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        parameters = Parameters(tool.parameters, size)
        keys = list(parameters.properties)

        def rule_of(key: str, index: int = index, keys: list[str] = keys) -> str:
            return f"argument_{index}_{keys.index(key)}"

        arguments = parameters.sequence(rule_of, '", "')
        if parameters.open:
            arguments = f'(any_{index} (", " any_{index}){{0,{MAX_OPEN - 1}}})?'
            rules += [
                f'any_{index}: /[a-zA-Z_][a-zA-Z0-9_]*/ "=" value_{index}',
                f"value_{index}: {embed_json_schema({})}",
            ]
        rules.append(f'call_{index}: {json.dumps(tool.name + "(")} {arguments} ")"')
        for key in keys:
            if not key.isidentifier():
                raise GrammarError(f"'{key}' cannot be written as the name of a Python argument")
            rules.append(f"{rule_of(key)}: {json.dumps(key + '=')} {rule_of(key)}_value")
            flag = parameters.properties[key] == {"type": "boolean"}
            rules.append(f"{rule_of(key)}_value: " + ('"True" | "False"' if flag else parameters.json_value(key)))
    return rules, "calls"


def _xml_calls(tools: Sequence[Tool], repetition: str, write: WriteMark, size: Size) -> tuple[list[str], str]:
    call = f'call: {write(hermes.BEGIN)} "\\n" function "\\n" {write(hermes.END)} "\\n"?'
    rules = [f"calls: call{repetition}", call, f"function: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    end = json.dumps(f"\n{xml_call.PARAMETER_END}\n")
    for index, tool in enumerate(tools):
        parameters = Parameters(tool.parameters, size)
        keys = list(parameters.properties)

        def rule_of(key: str, index: int = index, keys: list[str] = keys) -> str:
            return f"argument_{index}_{keys.index(key)}"

        arguments = parameters.sequence(rule_of)
        if parameters.open:
            arguments = f"any_{index}{{0,{MAX_OPEN}}}"
            name = f'{json.dumps(xml_call.PARAMETER)} /[a-zA-Z0-9_.-]+/ ">\\n"'
            rules += [f"any_{index}: {name} ANY_{index} {end}", f"ANY_{index}: {text_value({}, xml_call.CLOSING)}"]
        begin = json.dumps(f"{xml_call.FUNCTION}{tool.name}>\n")
        rules.append(f"call_{index}: {begin} {arguments} {json.dumps(xml_call.FUNCTION_END)}")
        for key in keys:
            value = f"VALUE_{index}_{keys.index(key)}"
            if xml_call.is_text(parameters.properties[key]):
                rules.append(f"{value}: {text_value(parameters.properties[key], xml_call.CLOSING)}")
            else:
                value = value.lower()
                rules.append(f"{value}: {parameters.json_value(key)}")
            rules.append(f"{rule_of(key)}: {json.dumps(f'{xml_call.PARAMETER}{key}>' + chr(10))} {value} {end}")
    return rules, "calls"


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
PYTHONIC_FORMAT = ToolFormat(
    name="pythonic",
    marks=(pythonic.BEGIN, pythonic.END),
    new_parser=lambda options: PythonicParser([tool.name for tool in options.tools], parallel=options.parallel),
    calls=_pythonic_calls,
    text=r"/[^\[\s](.|\n)*/",
    text_before_calls=False,
)
XML_FORMAT = ToolFormat(
    name="qwen3_coder",
    marks=(hermes.BEGIN, hermes.END),
    new_parser=lambda options: XmlParser(
        {tool.name: tool.parameters for tool in options.tools}, parallel=options.parallel
    ),
    calls=_xml_calls,
)
HARMONY_FORMAT = ToolFormat(
    name="harmony",
    marks=harmony.MARKS,
    new_parser=lambda options: HarmonyParser(calls=options.mode != "none", parallel=options.parallel),
    calls=_harmony_calls,
    text_before_calls=False,
    frame=_harmony_frame,
    read_opening=harmony.read_opening,
    always=True,
)
GENERIC_FORMAT = dataclasses.replace(LLAMA_FORMAT, name="generic", marks=(), calls=_generic_calls)
"""For required calls of models that have no format of their own: the grammar makes them."""
FORMATS: Mapping[str, ToolFormat] = {
    item.name: item
    for item in (
        HERMES_FORMAT, LLAMA_FORMAT, DEEPSEEK_FORMAT, DEEPSEEK_FENCED_FORMAT, KIMI_FORMAT, PYTHONIC_FORMAT, XML_FORMAT,
        HARMONY_FORMAT,
    )
}  # fmt: skip
