"""Formats whose calls are no JSON object: Harmony, Python calls, XML tags; cutting the text changes nothing."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.dialects.openai.chunks import join_tool_deltas
from tandem_worker.server.structured.compiler import MOST_READ, embed_json_schema
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.text.output import Parsed, TextParser
from tandem_worker.server.tools import parameters
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.formats import FORMATS, build_grammar, detect
from tandem_worker.server.tools.harmony import HarmonyParser, read_opening
from tandem_worker.server.tools.pythonic import PythonicParser
from tandem_worker.server.tools.xml_call import XmlParser

Result = tuple[str, str, list[tuple[str, Any]]]
Calls = list[tuple[str, dict[str, Any]]]
NAMES = ["get_weather", "f"]
SCHEMA = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def harmony(calls: Calls) -> str:
    """One after the other, as if each were not the end of the answer."""
    text = "<|channel|>analysis<|message|>Hm.<|end|>"
    for name, arguments in calls:
        text += f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        text += json.dumps(arguments) + "<|call|>"
    return text


def pythonic(calls: Calls) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls]
    return f"[{', '.join(written)}]"


def xml(calls: Calls) -> str:
    def write(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    blocks: list[str] = []
    for name, arguments in calls:
        body = "".join(f"<parameter={key}>\n{write(value)}\n</parameter>\n" for key, value in arguments.items())
        blocks.append(f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>")
    return "\n".join(blocks)


DIALECTS: dict[str, tuple[Callable[[], TextParser], Callable[[Calls], str]]] = {
    "harmony": (lambda: HarmonyParser(calls=True), harmony),
    "pythonic": (lambda: PythonicParser(NAMES), pythonic),
    "xml": (lambda: XmlParser(dict.fromkeys(NAMES, SCHEMA)), xml),
}


def run(parser: TextParser, pieces: list[str]) -> Result:
    total = Parsed()
    for piece in pieces:
        total.add(parser.feed(piece))
    total.add(parser.flush())
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in join_tool_deltas(total.tools)]
    return total.content, total.reasoning, calls


def read(parser: TextParser, text: str) -> Calls:
    return [(name, json.loads(arguments)) for name, arguments in run(parser, [text])[2]]


def cut(text: str, points: list[int]) -> list[str]:
    bounds = sorted({point % (len(text) + 1) for point in points} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
MARKS = ("</function>", "</parameter>", "<parameter=", "<|")
"""What ends or divides arguments, in dialects that have no way to write it within one."""
PLAIN = st.text(st.characters(blacklist_categories=("Cs",)), max_size=12).filter(
    lambda text: not any(mark in text for mark in MARKS)
)
ARGUMENTS = st.fixed_dictionaries({}, optional={"city": PLAIN, "days": JSON_VALUES})
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=80, deadline=None)
@given(calls=CALLS, points=st.lists(st.integers(0, 2000), max_size=40))
def test_calls_are_read_however_they_are_cut(name: str, calls: Calls, points: list[int]) -> None:
    new, write = DIALECTS[name]
    text = write(calls)
    whole = run(new(), [text])
    assert run(new(), cut(text, points)) == run(new(), list(text)) == whole
    assert [(called, json.loads(arguments)) for called, arguments in whole[2]] == calls
    assert whole[0] == ""


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_broken_output_gives_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    new, write = DIALECTS[name]
    text = write([("f", {"city": "a\n'b", "days": [1, {"x": None}]}), ("get_weather", {"city": "x"})])
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    junk = ["", "{", "}", '"', " ", "x", "<", "\n", "]", ")", "<|end|>", "<|start|>", "</parameter>", "assistant"]
    broken = text[:start] + data.draw(st.sampled_from(junk)) + text[stop:]
    points = data.draw(st.lists(st.integers(0, 400), max_size=30))
    assert run(new(), cut(broken, points)) == run(new(), list(broken)) == run(new(), [broken])


@pytest.mark.parametrize("name", DIALECTS)
@pytest.mark.parametrize(
    "text", ["Hello < world\n", "<tool", "[1, 2] and more", "a <|x|> b  ", "", "[get_wea", "to be"]
)
def test_plain_text_is_untouched(name: str, text: str) -> None:
    assert run(DIALECTS[name][0](), [text]) == run(DIALECTS[name][0](), list(text)) == (text, "", [])


@pytest.mark.parametrize("name", DIALECTS)
def test_arguments_follow_while_they_are_written(name: str) -> None:
    new, write = DIALECTS[name]
    text = write([("f", {"city": "Paris, in France"})])
    parser = new()
    parser.feed(text[: text.index("France")])
    assert "Fra" in parser.feed("Fra").tools[0].arguments
    cut_off = run(new(), [text[: text.index("France")]])[2]
    assert cut_off == [("f", '{"city": "Paris, in ')]


def test_one_call_is_enough_when_calls_are_not_parallel() -> None:
    calls: Calls = [("f", {"city": "x"}), ("f", {})]
    parsers = [
        (HarmonyParser(calls=True, parallel=False), harmony), (PythonicParser(NAMES, parallel=False), pythonic),
        (XmlParser({}, parallel=False), xml),
    ]  # fmt: skip
    for parser, write in parsers:
        assert [name for name, _ in run(parser, list(write(calls)))[2]] == ["f"]
        assert parser.complete


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>First.<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>1+1"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant"
        "<|channel|>final<|message|>Done."
    )
    assert run(HarmonyParser(calls=True), [text]) == ("I will look.\n\nDone.", "First.\n\n1+1", [])
    counted = HarmonyParser(calls=True)
    counted.feed("<|channel|>analysis<|message|>x")
    assert counted.reasoning
    counted.feed("<|end|><|start|>assistant<|channel|>final<|message|>y")
    assert not counted.reasoning


def test_harmony_headers() -> None:
    """The recipient stands before the channel or behind it; the last message may lack its end."""
    for header in (
        "<|channel|>commentary to=functions.f <|constrain|>json", " to=functions.f<|channel|>commentary json",
        "<|channel|>commentary to=functions.f", "<|start|>assistant to=functions.f<|channel|>analysis",
    ):  # fmt: skip
        assert run(HarmonyParser(calls=True), [f'{header}<|message|>{{"a": 1}}'])[2] == [("f", '{"a": 1}')]
    assert run(HarmonyParser(calls=True), ["<|channel|>commentary to=functions.f<|message|><|call|>"])[2] == [
        ("f", "{}")
    ]
    without_tools = run(HarmonyParser(calls=False), ["<|channel|>commentary to=functions.f<|message|>{}"])
    assert without_tools == ("{}", "", [])
    assert run(HarmonyParser(calls=True), ["<|channel|>final <|constrain|>json<|message|>{}"]) == ("{}", "", [])
    assert run(HarmonyParser(calls=True), ["<|channel|>final"]) == ("", "", [])


def test_harmony_goes_on_where_the_prompt_ends() -> None:
    parser = HarmonyParser(calls=True)
    parser.feed(read_opening("<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>One, "))
    assert run(parser, ["two.<|return|>"]) == ("two.", "", [])
    parser = HarmonyParser(calls=True)
    parser.feed(read_opening("<|start|>user<|message|>Hi<|end|><|start|>assistant"))
    assert run(parser, ["<|channel|>analysis<|message|>Hm"]) == ("", "Hm", [])


def test_python_literals() -> None:
    written = r"""[f(a='it\'s "é" \x41\u00e9\n', b=-1.5e3, c=True, d=None, e=(1, 2,), g={'k': [], 2: "x"}, h="\q")]"""
    assert read(PythonicParser(NAMES), written) == [
        ("f", {"a": "it's \"é\" Aé\n", "b": -1500.0, "c": True, "d": None, "e": [1, 2], "g": {"k": [], "2": "x"},
               "h": "\\q"}),
    ]  # fmt: skip
    assert read(PythonicParser(NAMES), "<|python_start|>[f(), get_weather( city = 'x' )]<|python_end|>") == [
        ("f", {}), ("get_weather", {"city": "x"}),
    ]  # fmt: skip
    assert run(PythonicParser(NAMES), ["[unknown(a=1)]"]) == ("[unknown(a=1)]", "", [])


def test_xml_values_by_their_schema() -> None:
    properties = {"city": {"type": "string"}, "count": {"type": "integer"}, "flag": {}, "unit": {"enum": ["1"]}}
    text = (
        "<function=f>\n<parameter=city>\n12\n\n</parameter>\n<parameter=count>\n12\n</parameter>\n"
        "<parameter=flag>\nTrue\n</parameter>\n<parameter=unit>1</parameter>\n"
        "<parameter=other>\nplain words\n</function>"
    )
    assert read(XmlParser({"f": {"properties": properties}}), text) == [
        ("f", {"city": "12\n", "count": 12, "flag": True, "unit": "1", "other": "plain words"})
    ]
    no_call = "<tool_call>nothing</tool_call> and on"
    assert run(XmlParser({}), [no_call]) == (no_call, "", [])


def test_formats_are_recognized() -> None:
    qwen = {"<tool_call>": 1, "</tool_call>": 2}
    assert detect(qwen, "<tool_call>\n<function=example>") is FORMATS["qwen3_coder"]
    assert detect(qwen, "<tool_call>") is FORMATS["hermes"]
    llama4 = {"<|python_start|>": 1, "<|python_end|>": 2}
    assert detect(llama4, "call functions as [f(x=1)]") is FORMATS["pythonic"]
    assert detect(llama4, 'answer {"name": ..., "parameters": ...}') is FORMATS["llama"]
    assert detect({"<|channel|>": 1, "<|message|>": 2}, "") is FORMATS["harmony"]
    assert not any(re.search(r"\s", mark) for tool_format in FORMATS.values() for mark in tool_format.marks)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_schemas_that_every_parameter_repeats_have_a_limit(name: str) -> None:
    """What is refused is not written first: 350 KB of functions would be 60 MB of grammar, on the event loop."""
    definitions = {"x": {"type": "integer"}, "pad": {"enum": list(range(1000))}}
    properties = {f"p{index}": {"$ref": "#/$defs/x"} for index in range(128)}
    schema = {"type": "object", "properties": properties, "$defs": definitions}
    tools = tuple(Tool(name=f"f{index}", parameters=schema, strict=True, definition={}) for index in range(40))
    written: list[str] = []

    def write(schema: dict[str, Any]) -> str:
        written.append(embed_json_schema(schema))
        return written[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parameters, "embed_json_schema", write)
        with pytest.raises(GrammarError, match="512 KiB"):
            build_grammar(FORMATS[name], ToolOptions(mode="required", tools=tools, callable_tools=tools), {})
        assert sum(map(len, written)) < 1_000_000
        written.clear()
        options = ToolOptions(mode="auto", tools=tools, callable_tools=tools)
        with pytest.raises(GrammarError, match="16 KiB"):  # read for guesses alone, beside other requests
            build_grammar(FORMATS[name], options, {}, most_bytes=MOST_READ)
        assert sum(map(len, written)) < 32_000
