"""Tool-call parsers: what they read, and that cutting the text differently changes nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.server.dialects.openai.chunks import join_tool_deltas
from tandem_worker.server.text.output import Parsed, TextParser
from tandem_worker.server.text.reasoning import ReasoningParser
from tandem_worker.server.tools.delimited import DEEPSEEK, KIMI, DelimitedParser
from tandem_worker.server.tools.hermes import HermesParser
from tandem_worker.server.tools.llama import LlamaParser

Result = tuple[str, str, list[tuple[str, str]]]
ARGS = {"city": 'Pa"r}is ]{ \\ \n é🌍', "days": [1, 2, {"x": None}], "exact": True}

DS_CALL = "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{args}<｜tool▁call▁end｜>"
DS_FENCED = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{args}\n```<｜tool▁call▁end｜>"
KIMI_CALL = "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{args}<|tool_call_end|>"


def hermes(calls: list[tuple[str, str]]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {args}}}\n</tool_call>' for name, args in calls
    )


def llama(calls: list[tuple[str, str]]) -> str:
    return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {args}}}' for name, args in calls)


def deepseek(template: str) -> Callable[[list[tuple[str, str]]], str]:
    def write(calls: list[tuple[str, str]]) -> str:
        body = "\n".join(template.replace("{name}", name).replace("{args}", args) for name, args in calls)
        return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"

    return write


def kimi(calls: list[tuple[str, str]]) -> str:
    body = "".join(
        KIMI_CALL.replace("{name}", name).replace("{index}", str(index)).replace("{args}", args)
        for index, (name, args) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


NAMES = ["get_weather", "f", "a.b-c"]
FORMATS: dict[str, tuple[Callable[[], TextParser], Callable[[list[tuple[str, str]]], str]]] = {
    "hermes": (HermesParser, hermes),
    "llama": (lambda: LlamaParser(NAMES), llama),
    "deepseek": (lambda: DelimitedParser(DEEPSEEK), deepseek(DS_CALL)),
    "deepseek-v3": (lambda: DelimitedParser(DEEPSEEK), deepseek(DS_FENCED)),
    "kimi": (lambda: DelimitedParser(KIMI), kimi),
}


def run(parser: TextParser, pieces: list[str]) -> Result:
    total = Parsed()
    for piece in pieces:
        total.add(parser.feed(piece))
    total.add(parser.flush())
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in join_tool_deltas(total.tools)]
    return total.content, total.reasoning, calls


def cut(text: str, points: list[int]) -> list[str]:
    bounds = sorted({point % (len(text) + 1) for point in points} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", FORMATS)
def test_reads_calls(name: str) -> None:
    new, write = FORMATS[name]
    calls = [("get_weather", json.dumps(ARGS)), ("f", "{}"), ("a.b-c", '{"x": {"y": [{}]}}')]
    assert run(new(), [write(calls)]) == ("", "", calls)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "llama"])
def test_content_before_calls(name: str) -> None:
    new, write = FORMATS[name]
    content, _, calls = run(new(), ["Let me look.\n\n" + write([("f", "{}")])])
    assert content == "Let me look."
    assert calls == [("f", "{}")]


@pytest.mark.parametrize("name", FORMATS)
def test_plain_text_is_untouched(name: str) -> None:
    new, _ = FORMATS[name]
    for text in ("Hello < world\n", "<tool", "a <|x|> b  ", ""):
        assert run(new(), [text]) == (text, "", [])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=5), JSON_VALUES, max_size=3).map(json.dumps)),
    max_size=3,
)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(calls=CALLS, points=st.lists(st.integers(0, 2000), max_size=40), thought=st.none() | st.text(max_size=20))
def test_any_cut_gives_the_same(
    name: str, calls: list[tuple[str, str]], points: list[int], thought: str | None
) -> None:
    new, write = FORMATS[name]
    text = write(calls) if calls else "no call at all"
    if thought is not None:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    whole = run(ReasoningParser(new(), inside=False), [text])
    assert run(ReasoningParser(new(), inside=False), cut(text, points)) == whole
    assert run(ReasoningParser(new(), inside=False), list(text)) == whole
    if calls and (thought is None or "<" not in thought):
        assert whole[2] == calls
    if thought is not None and "</think>" not in thought:
        assert whole[1] == thought.strip()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_cut_of_broken_output_gives_the_same(name: str, data: st.DataObject) -> None:
    new, write = FORMATS[name]
    text = write([("f", '{"a": [1, 2]}'), ("get_weather", '{"city": "x"}')])
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    broken = text[:start] + data.draw(st.sampled_from(["", "{", "}", '"', " ", "x", "<", "\n"])) + text[stop:]
    points = data.draw(st.lists(st.integers(0, 400), max_size=30))
    assert run(new(), cut(broken, points)) == run(new(), [broken])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_off_keeps_what_was_written(name: str) -> None:
    new, write = FORMATS[name]
    text = write([("f", '{"city": "Paris", "unit": "C"}')])
    _, _, calls = run(new(), [text[: text.index("Paris") + 3]])
    assert calls == [("f", '{"city": "Par')]


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_enough_when_calls_are_not_parallel(name: str) -> None:
    parsers: dict[str, TextParser] = {
        "hermes": HermesParser(parallel=False),
        "llama": LlamaParser(NAMES, parallel=False),
        "deepseek": DelimitedParser(DEEPSEEK, parallel=False),
        "deepseek-v3": DelimitedParser(DEEPSEEK, parallel=False),
        "kimi": DelimitedParser(KIMI, parallel=False),
    }
    parser = parsers[name]
    _, write = FORMATS[name]
    assert run(parser, list(write([("f", "{}"), ("f", "{}")])))[2] == [("f", "{}")]
    assert parser.complete


def test_arguments_follow_while_they_are_written() -> None:
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "arguments": {"text": "on')
    assert parser.feed("e two").tools[0].arguments == "e two"


def test_arguments_before_the_name_and_as_a_string() -> None:
    assert run(HermesParser(), ['<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'])[2] == [
        ("f", '{"a": 1}')
    ]
    assert run(HermesParser(), ['<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'])[2] == [
        ("f", '{"a": 1}')
    ]
    assert run(HermesParser(), ['<tool_call>{"name": "f"}</tool_call>'])[2] == [("f", "{}")]


def test_a_block_that_is_no_call_is_content() -> None:
    text = "<tool_call>not json</tool_call> end"
    assert run(HermesParser(), [text]) == (text, "", [])
    assert run(LlamaParser(["f"]), ['{"name": "unknown", "parameters": {}}'])[0].startswith('{"name": "unknown"')
    assert run(LlamaParser(["f"]), ['{"answer": 1}']) == ('{"answer": 1}', "", [])


def test_python_tag() -> None:
    assert run(LlamaParser(["f"]), ['<|python_tag|>{"name": "f", "parameters": {}}'])[2] == [("f", "{}")]
    assert run(LlamaParser(["f"]), ["<|python_tag|>print(1)"]) == ("print(1)", "", [])


def test_kimi_ids_are_kept() -> None:
    parsed = DelimitedParser(KIMI).feed(kimi([("f", "{}")]))
    assert parsed.tools[0].id == "functions.f:0"


def test_reasoning_that_the_prompt_opened() -> None:
    assert run(ReasoningParser(None, inside=True), ["I th", "ink\n</thi", "nk>\n\nYes"]) == ("Yes", "I think", [])
    assert run(ReasoningParser(None, inside=True), ["cut off"]) == ("", "cut off", [])
    assert run(ReasoningParser(None, inside=False), [" \nYes <think> no"]) == (" \nYes <think> no", "", [])
