"""The literal texts of grammars, as they are written here and by clients."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark
from tandem_worker.engine.guess.json_ahead import Foresight, Style
from tandem_worker.engine.guess.json_text import JsonReader
from tandem_worker.engine.guess.literals import Word
from tandem_worker.server.structured.compiler import HEADER, embed_json_schema, write_structural_tags
from tandem_worker.server.structured.contract import StructuralTag
from tandem_worker.server.structured.literals import MOST_BYTES, read_words
from tandem_worker.server.tools.contract import Tool, ToolOptions
from tandem_worker.server.tools.formats import FORMATS, GENERIC_FORMAT, build_grammar

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
                          "additionalProperties": False}  # fmt: skip


def read(grammar: str, tokens: dict[int, str] | None = None) -> list[Word]:
    return read_words(grammar, (tokens or {}).get)[0]


def texts(words: list[Word]) -> list[bytes]:
    return [word.text for word in words]


def foresee(word: Word) -> bytes:
    found = Foresight()
    reader: JsonReader = word.begin(Style())
    reader.foresee(found)
    return bytes(found.text)


def test_a_schema_is_one_value() -> None:
    (word,) = read(f"{HEADER}start: {embed_json_schema(SCHEMA)}\n")
    assert (word.text, foresee(word)) == (b"", b'{"a": 1}')


@pytest.mark.parametrize(
    ("regex", "expected"),
    [
        (r"Name: [a-z]+, Age: \d{1,3}\.", [b"Name: ", b", Age: ", b"."]),
        (r"(yes|no) sir", [b"yes", b"no", b" sir"]),
        (r"(?:ab)+(?:xy)c\n\t\x41\u00e9\/", [b"", b"xy", "c\n\tA\u00e9/".encode()]),
        (r"ab?c{2}d*?e", [b"a", b"e"]),
        (r"[]a]x[^]b]y", [b"", b"x", b"y"]),
        (r".*end", [b"", b"end"]),
        (r"a(b|c(d)?)*(e|f)?g", [b"a", b"e", b"f", b"g"]),
        (r"\[\{\"quoted\"\}\]", [b'[{"quoted"}]']),
    ],
)
def test_the_text_of_a_regex(regex: str, expected: list[bytes]) -> None:
    words = read(f"{HEADER}start: /{regex_to_lark(regex, '')}/\n")
    if "[^" in regex:
        expected = [b""]  # it says what a text must not have
    assert texts(words) == expected


def test_rules_are_read_where_they_are_named() -> None:
    grammar = """start: greeting NAME "!" | "Bye, " NAME  // of one kind or the other
greeting: "Hello, " title?
title: "Dr. "
NAME: /[A-Z][a-z]+/
"""
    assert texts(read(HEADER + grammar)) == [b"Hello, Dr. ", b"!", b"Bye, "]


def test_gbnf() -> None:
    grammar = gbnf_to_lark('root ::= "answer: " x "\\n"\nx ::= "foo" | "bar"')
    assert texts(read(grammar)) == [b"answer: foo", b"bar\n"]


def test_tokens_by_their_ids() -> None:
    grammar = f'{HEADER}start: <[7]> "x" <[8]> <|eot|> "y" %json {json.dumps(SCHEMA)} <[7]>'
    words = read(grammar, {7: "<call>"})
    assert texts(words) == [b"<call>x", b"y", b"<call>"]
    assert foresee(words[1]) == b'{"a": 1}'


def test_structural_tags() -> None:
    grammar = write_structural_tags([StructuralTag(trigger="<fn", begin="<fn=a>", schema=SCHEMA, end="</fn>")], [])
    words = read(grammar)
    assert words[0] == Word(b"")
    assert [(word.text, bool(word.values)) for word in words[1:3]] == [(b"<fn=a>", True), (b"</fn>", False)]


TOOLS = tuple(
    Tool(
        name=name,
        parameters={**SCHEMA, "properties": {key: {"const": 1}}, "required": [key]},
        strict=True,
        definition={},
    )
    for name, key in (("first", "a"), ("second", "b"))
)
REQUIRED = ToolOptions(mode="required", tools=TOOLS, callable_tools=TOOLS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("hermes", [(b"<tool_call>\n", b'{"name": "'), (b"\n</tool_call>\n", b"")]),
        ("generic", [(b"", b'{"name": "'), (b"; ", b'{"name": "')]),
        ("pythonic", [(b"[first(a=", b"1"), (b")", b""), (b"second(b=", b"1"), (b"), first(a=", b"1")]),
        ("deepseek", None),
        ("kimi", None),
        ("harmony", None),
        ("qwen3_coder", [(b"<tool_call>\n<function=first>\n<parameter=a>\n", b"1")]),
    ],
)
def test_functions_in_each_form(name: str, expected: list[tuple[bytes, bytes]] | None) -> None:
    tool_format = GENERIC_FORMAT if name == "generic" else FORMATS[name]
    words = read(build_grammar(tool_format, REQUIRED, {}))
    if expected is not None:
        found = [(word.text, foresee(word)[: len(value)]) for word, (_, value) in zip(words, expected, strict=False)]
        assert found == expected
    else:
        arguments = [word for word in words if word.values]
        assert [foresee(word) for word in arguments] == [b'{"a": 1}', b'{"b": 1}']
        assert [sum(name in text for text in texts(words)) for name in (b"first", b"second")] >= [1, 1]


def test_a_function_is_told_by_its_name() -> None:
    (word, _) = read(build_grammar(FORMATS["hermes"], REQUIRED, {}))
    reader = word.begin(Style())
    reader.feed(b'{"name": "sec')
    found = Foresight()
    reader.foresee(found)
    assert found.text == b'ond", "arguments": {"b": 1}}'


def test_each_of_many_functions_is_told_by_its_name() -> None:
    """Agents have dozens."""
    tools = tuple(
        Tool(name=f"function_{number}", parameters={"properties": {f"p{number}": {"const": 1}}}, strict=True,
             definition={})
        for number in range(100)
    )  # fmt: skip
    options = ToolOptions(mode="required", tools=tools, callable_tools=tools)
    (word, _) = read(build_grammar(FORMATS["hermes"], options, {}))
    for number in (0, 17, 64, 99):
        reader = word.begin(Style())
        reader.feed(f'{{"name": "function_{number}"'.encode())
        found = Foresight()
        reader.foresee(found)
        assert found.text.startswith(f', "arguments": {{"p{number}": 1'.encode())


def test_a_grammar_that_calls_itself_ends() -> None:
    assert texts(read(f'{HEADER}start: "(" start ")" | "x"')) == [b"(", b")", b"x"]
    many = "\n".join(f"r{number}: r{number + 1} r{number + 1}" for number in range(30))
    assert len(read(f'{HEADER}start: r0\n{many}\nr30: "abc"')) < MOST_BYTES


def test_what_is_kept_of_a_large_grammar_is_bounded() -> None:
    parts = " NAME ".join(f'"{"x" * 100}{number}"' for number in range(5000))
    words = read(f"{HEADER}start: {parts}\nNAME: /[a-z]+/")
    assert MOST_BYTES - 200 <= sum(len(word.text) + 16 for word in words) <= MOST_BYTES + 200


def test_a_text_that_is_named_often_is_bounded() -> None:
    """Grammars of some KB that would be read as 300 MB, and as ten thousand alternatives."""
    long = "x" * 30_000
    (word,) = read(f'{HEADER}start: {"a " * 10_000}\na: "{long}"')
    assert len(word.text) == MOST_BYTES
    (word,) = read(f"{HEADER}start: {'a|' * 10_000} a\na: %json {{}}")
    assert len(word.values) == 1
    bodies = "\n".join(f"a{number}: %json {{}}" for number in range(300))
    (word,) = read(f"{HEADER}start: {'|'.join(f'a{number}' for number in range(300))}\n{bodies}")
    assert len(word.values) == 128


@pytest.mark.parametrize(
    "rest",
    [
        f"b: <[{'9' * 5000}]>",
        f'// <[{"9" * 5000}]> "',
        f'# %json {"[" * 99} "',
        '# "' + '\\"' * 30_000,
        '"' + '\\"' * 30_000,
        "/" + "\\/" * 30_000,
        "//\n" * 30_000,
    ],
)
def test_what_stands_behind_a_text_is_passed_over(rest: str) -> None:
    """The library takes most of these: none may raise, nor take time with its square."""
    began = time.thread_time()
    assert texts(read(f'{HEADER}start: "a"\n{rest}'))[0] == b"a"
    assert time.thread_time() - began < 1.0


@settings(max_examples=60, deadline=None)
@given(body=st.text(alphabet='"/\\|()[]{}<>%json:ab1 \n*+?.', max_size=60))
def test_no_text_is_too_strange(body: str) -> None:
    words = read(f"{HEADER}start: a {body}\na: {body}")
    assert all(isinstance(word.text, bytes) for word in words)
