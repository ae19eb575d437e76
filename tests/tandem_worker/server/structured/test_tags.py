"""Structural tags as grammars: the texts that they admit are those that a search by hand finds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.fields import Fields
from tandem_worker.server.dialects.openai.output_format import parse_output_format
from tandem_worker.server.dialects.openai.structural_tags import parse_structural_tag
from tandem_worker.server.structured.compiler import write_structural_tags
from tandem_worker.server.structured.contract import GrammarError

BYTES = LLTokenizer("byte")
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}


def grammar(given: dict[str, Any], special: Sequence[str] = ()) -> str:
    return write_structural_tags(parse_structural_tag(Fields(given, "response_format")), special)


def admits(grammar: str, text: str) -> bool:
    """Whether the answer may be `text` and end there, and was allowed byte for byte."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    if matcher.try_consume_tokens(tokens) < len(tokens):
        return False
    if matcher.is_stopped():
        return not matcher.is_error()
    mask = matcher.compute_bitmask()
    return bool(mask[BYTES.eos_token // 8] >> BYTES.eos_token % 8 & 1)


def tag(begin: str, content: Any = NUMBER, end: Any = "]") -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def form(**fields: Any) -> dict[str, Any]:
    return {"format": {"type": "triggered_tags", **fields}}


_PIECES = ["<a>", "<b>", "<", "a", ">", "1", "]", "<a>1]", "<b>2]", "[x", "[x3]", "é", "\n"]


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=6))
@example(pieces=["<", "<a>1]", "<b>2]", "é"])
@example(pieces=["a", "<a>1]"])
def test_text_is_free_until_a_trigger(pieces: list[str]) -> None:
    text = "".join(pieces)
    given = form(triggers=["<a", "<b", "[x"], tags=[tag("<a>"), tag("<b>"), tag("[x")])
    free, tags = r"(?:(?!<a|<b|\[x)[\s\S])*", r"(?:<a>|<b>|\[x)[0-9]\]"
    assert admits(grammar(given), text) == bool(re.fullmatch(f"(?:{free}{tags})*{free}", text)), text


@settings(max_examples=settings().max_examples * 3 // 2, deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=6))
def test_structures_are_triggered_tags(pieces: list[str]) -> None:
    structures = [{"begin": begin, "schema": NUMBER["json_schema"], "end": "]"} for begin in ("<a>", "<b>")]
    old = grammar({"structures": structures, "triggers": ["<"]})
    new = grammar(form(triggers=["<"], tags=[tag("<a>"), tag("<b>")]))
    text = "".join(pieces)
    assert admits(old, text) == admits(new, text)
    assert admits(old, text) == bool(re.fullmatch(r"(?:[^<]*<[ab]>[0-9]\])*[^<]*", text))


SCHEMA = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}},
          "required": ["x"], "additionalProperties": False}}  # fmt: skip
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # what is given, what it admits, what it does not
    (form(triggers=["<a"], tags=[tag("<a>")]), ["", "x<a>1]", "any\nthing 🙂"], ["<a", "<a>x]", "<a>1"]),
    (form(triggers=["<a"], tags=[tag("<a>")], at_least_one=False, stop_after_first=False, excludes=[]), ["x"], ["<a"]),
    (form(triggers=["é🙂"], tags=[tag("é🙂", SCHEMA, "")]), ['é🙂{"x": 2}', 'é🙂{"x": 2}u'], ["é🙂", "é🙂1"]),
    (form(triggers=["<"], tags=[{"begin": "<a>", "content": NUMBER, "end": ["</a>"]}]), ["<a>1</a>"], ["<a>1]"]),
    (form(triggers=["<a>"], tags=[tag("<a>", {"type": "json_schema", "json_schema": True, "style": "json"})]),
     ['<a>"x"]', "<a>[1]]"], ["<a>x]"]),
    ({"structures": [{"begin": "f(", "schema": '{"type": "null"}', "end": ")"}, {"begin": "f[", "end": "]"}],
      "triggers": ["f"]}, ["a", "f(null)", 'f["x"]'], ["f", "f(1)", "of"]),
    (form(triggers=['"\\/\r\x01'], tags=[tag('"\\/\r\x01\t')]), ['a"\\/', '"\\/\r\x01\t1]'], ['"\\/\r\x01']),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(FORMS)))
def test_formats(number: int) -> None:
    given, good, bad = FORMS[number]
    written = grammar(given)
    assert [text for text in good if not admits(written, text)] == []
    assert [text for text in bad if admits(written, text)] == []


WRONG: list[tuple[dict[str, Any], str, str]] = [
    # what is given, the path that the error names, and some of its words
    ({}, "structures", "Missing"), ({"structures": [], "triggers": ["<"]}, "structures", "empty"),
    ({"structures": [{"begin": "<a>", "end": ""}], "triggers": []}, "triggers", "empty"),
    ({"structures": [{"begin": "<a>", "end": ""}]}, "triggers", "empty"),
    ({"structures": {}, "triggers": ["<"]}, "structures", "an array"),
    ({"structures": [1], "triggers": ["<"]}, "structures[0]", "an object"),
    ({"structures": [{"begin": "<a>"}], "triggers": ["<"]}, "structures[0].end", "Missing"),
    ({"structures": [{"begin": "", "end": "x"}], "triggers": ["<"]}, "structures[0].begin", "empty"),
    ({"structures": [{"begin": "<a>", "end": "x", "schema": 1}], "triggers": ["<"]}, "structures[0].schema",
     "an object"),
    ({"structures": [{"begin": "<a>", "end": "x", "schema": "{"}], "triggers": ["<"]}, "structures[0].schema", "JSON"),
    ({"structures": [{"begin": "<a>", "end": "x", "schema": False}], "triggers": ["<"]}, "structures[0].schema",
     "false"),
    ({"structures": [{"begin": "<a>", "end": "x", "y": 1}], "triggers": ["<"]}, "structures[0].y", "Unrecognized"),
    ({"structures": [{"begin": "<a>", "end": "x"}], "triggers": ["["]}, "triggers", "No tag begins"),
    ({"structures": [{"begin": "<a>", "end": "x"}, {"begin": "b", "end": ""}], "triggers": ["<"]},
     "structures[1].begin",
     "none of the triggers"),
    ({"structures": [{"begin": "<a>", "end": "x"}], "triggers": ["<", "<a"]}, "triggers", "part of another"),
    ({"structures": [{"begin": "<a>", "end": "x"}], "triggers": "<"}, "triggers", "an array"),
    ({"structures": [{"begin": "<a>", "end": "x"}], "triggers": [""]}, "triggers[0]", "empty"),
    ({"structures": [{"begin": "<a>", "end": "x"}] * 1000, "triggers": ["<"]}, "structures", "128"),
    ({"structures": [{"begin": "<" * 2000, "end": "x"}], "triggers": ["<"]}, "structures[0].begin", "1024"),
    ({"structures": [{"begin": "<a>", "end": ["x"]}], "triggers": ["<"]}, "structures[0].end", "a string"),
    ({"structures": [], "triggers": [], "format": {}}, "structures", "exclude each other"),
    ({"format": 1}, "format", "an object"), ({"format": {}}, "format.type", "Missing"),
    ({**form(triggers=["<"], tags=[tag("<a>")]), "more": 1}, "more", "Unrecognized"),
    (form(triggers=["<"], tags=[tag("<a>")], more=1), "format.more", "Unrecognized"),
    (form(triggers=["<"], tags=[]), "format.tags", "empty"),
    (form(triggers=["<"], tags=[1]), "format.tags[0]", "an object"),
    (form(triggers=["<"], tags=[tag("b")]), "format.triggers", "No tag begins"),
    (form(triggers=["<"], tags=[{**tag("<a>"), "type": "or"}]), "format.tags[0].type", "tag"),
    (form(triggers=["<"], tags=[tag("<a>", {"type": 1})]), "format.tags[0].content.type", "a string"),
    (form(triggers=["<"], tags=[tag("<a>", {"type": "json_schema"})]), "format.tags[0].content.json_schema", "Missing"),
    (form(triggers=["<"], tags=[tag("<a>", end=1)]), "format.tags[0].end", "a string"),
    (form(triggers=["<"], tags=[tag("<a>", end=[1])]), "format.tags[0].end[0]", "a string"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_fields_are_named(number: int) -> None:
    given, path, words = WRONG[number]
    with pytest.raises(RequestError, match=words) as caught:
        parse_structural_tag(Fields(given, ""))
    assert caught.value.param == path


_KINDS = [
    "const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "tags_with_separator", "grammar",
    "qwen_xml_parameter", "token", "exclude_token", "any_tokens", "token_triggered_tags", "unheard_of",
]  # fmt: skip
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    *(({"format": {"type": kind, "tags": [tag("<a>")], "triggers": ["<"]}}, "format.type") for kind in _KINDS),
    *((form(triggers=["<"], tags=[tag("<a>", {"type": kind})]), "format.tags[0].content.type")
      for kind in ("triggered_tags", *_KINDS) if kind != "json_schema"),
    (form(triggers=["<"], tags=[tag("<a>", {**NUMBER, "style": "xml"})]), "format.tags[0].content.style"),
    (form(triggers=["<"], tags=[tag("<a>", end=["x", "y"])]), "format.tags[0].end"),
    (form(triggers=["<"], tags=[tag("<a>", end=[])]), "format.tags[0].end"),
    (form(triggers=["<"], tags=[tag("<a>")], at_least_one=True), "format.at_least_one"),
    (form(triggers=["<"], tags=[tag("<a>")], stop_after_first=True), "format.stop_after_first"),
    (form(triggers=["<"], tags=[tag("<a>")], excludes=["x"]), "format.excludes"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(UNSUPPORTED)))
def test_other_forms_are_refused_by_name(number: int) -> None:
    given, path = UNSUPPORTED[number]
    with pytest.raises(RequestError, match=re.escape(f"'{path}'")) as caught:
        parse_structural_tag(Fields(given, ""))
    assert (caught.value.param, caught.value.code) == (path, "unsupported_parameter")


@pytest.mark.parametrize(("begin", "end"), [("<|im_end|>a", "x"), ("<a>", "x<|im_end|>")])
def test_special_tokens_are_no_text(begin: str, end: str) -> None:
    given = form(triggers=[begin[:2]], tags=[tag(begin, end=end)])
    with pytest.raises(GrammarError, match="special token"):
        grammar(given, ("", "<|im_end|>"))


@given(
    text=st.text(min_size=1, max_size=6)
    | st.text("\x00\x1b\x7f\x85\u2028/\\\"'^]-{}()|.&~#\n\r <[3", min_size=1, max_size=6)
)
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_any_text_may_be_a_mark(text: str) -> None:
    """Whatever it would mean in a grammar."""
    triggered = grammar(form(triggers=[text], tags=[tag(f"{text}=", end=text)]))
    assert admits(triggered, f"{text}=1{text}")
    assert not admits(triggered, f"{text}!")
    assert not admits(triggered, f"{text}=1")


def test_what_is_written_grows_with_the_request_alone() -> None:
    tags = [tag(chr(0x4E00 + number) * 250, end=chr(0x6E00 + number) * 250) for number in range(120)]
    given = form(triggers=[each["begin"] for each in tags], tags=tags)
    written = grammar(given)
    assert len(written) < 3 * len(json.dumps(given))


@pytest.mark.parametrize("field", ["response_format", "structural_tag", "structured_outputs"])
def test_the_names_that_it_has(field: str) -> None:
    value: Any = {"type": "structural_tag", **form(triggers=["<"], tags=[tag("<a>")])}
    if field == "structural_tag":
        value = '{"structures": [{"begin": "<a>", "end": "x"}], "triggers": ["<"]}'
    found = parse_output_format(Fields({field: {"structural_tag": value} if field == "structured_outputs" else value}))
    assert (found.kind, found.tags is not None, found.name) == ("structural_tag", True, field)
