"""Structural tags as grammars: the texts that they admit are those that a search by hand finds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tandem_worker.engine.errors import RequestError
from tandem_worker.server.openai.fields import Fields
from tandem_worker.server.openai.output_format import parse_output_format
from tandem_worker.server.openai.structural_tags import parse_structural_tag
from tandem_worker.server.structured.errors import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits
from tandem_worker.server.structured.tags import write_structural_tag

BYTES = LLTokenizer("byte")
NUMBER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 9}}


def grammar(given: dict[str, Any], special: Sequence[str] = ()) -> str:
    return write_structural_tag(parse_structural_tag(Fields(given, "response_format")), GrammarLimits(), special)


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
    return {"format": fields}


_PIECES = ["<a>", "<b>", "<", "a", ">", "1", "]", "<a>1]", "<b>2]", "[x", "[x3]", "é", "\n"]


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=6), at_least_one=st.booleans(), first=st.booleans())
@example(pieces=["<", "<a>1]", "<b>2]", "é"], at_least_one=True, first=False)
@example(pieces=["a", "<a>1]"], at_least_one=True, first=True)
def test_text_is_free_until_a_trigger(pieces: list[str], at_least_one: bool, first: bool) -> None:
    text = "".join(pieces)
    given = form(
        type="triggered_tags", triggers=["<a", "<b", "[x"], tags=[tag("<a>"), tag("<b>"), tag("[x")],
        at_least_one=at_least_one, stop_after_first=first,
    )  # fmt: skip
    free, tags = r"(?:(?!<a|<b|\[x)[\s\S])*", r"(?:<a>|<b>|\[x)[0-9]\]"
    if first:
        expected = f"{free}{tags}" if at_least_one else f"{free}{tags}|{free}"
    else:
        expected = f"(?:{free}{tags}){'+' if at_least_one else '*'}{free}"
    assert admits(grammar(given), text) == bool(re.fullmatch(expected, text)), text


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(_PIECES), max_size=6))
def test_structures_are_triggered_tags(pieces: list[str]) -> None:
    structures = [{"begin": begin, "schema": NUMBER["json_schema"], "end": "]"} for begin in ("<a>", "<b>")]
    old = grammar({"structures": structures, "triggers": ["<"]})
    new = grammar(form(type="triggered_tags", triggers=["<"], tags=[tag("<a>"), tag("<b>")]))
    text = "".join(pieces)
    assert admits(old, text) == admits(new, text)
    assert admits(old, text) == bool(re.fullmatch(r"(?:[^<]*<[ab]>[0-9]\])*[^<]*", text))


SCHEMA = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"x": {"type": "integer"}},
          "required": ["x"], "additionalProperties": False}}  # fmt: skip
TEXT = {"type": "any_text"}
FORMS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # format, what it admits, what it does not
    (form(type="const_string", value="yes"), ["yes"], ["", "ye", "yes "]),
    (form(**SCHEMA), ['{"x": 1}'], ["1", '{"x": "1"}', "", '{"x": 1} ']),
    (form(type="json_schema", json_schema=True), ["1", '"a"'], ["", "a"]),
    (form(type="regex", pattern="a+/[^/]"), ["a/b", "aa/é"], ["a/", "a//"]),
    (form(**TEXT), ["", "any\nthing 🙂"], []),
    (form(type="any_text", excludes=["no/t\n", "[x]*"]), ["no/t", "[x]", "x"], ["a no/t\nb", "[x]*"]),
    (form(type="or", elements=[{"type": "const_string", "value": "no"}, tag("<a>")]), ["no", "<a>1]"], ["", "no<a>1]"]),
    (form(type="sequence", elements=[tag("<a>"), {"type": "const_string", "value": ";"}, TEXT]),
     ["<a>1];", "<a>1];bye"], ["<a>1]", ";"]),
    (form(**tag("<t>", TEXT, "</t>")), ["<t></t>", "<t>a<t>\n</t>"], ["<t>", "<t></t>x", "<t></t></t>"]),
    (form(**tag("<t>", TEXT, ["</t>", "."])), ["<t>a</t>", "<t>a."], ["<t>a.b</t>"]),
    (form(**tag("<t>", {"type": "any_text", "excludes": ["x"]}, "</t>")), ["<t>a</t>"], ["<t>ax</t>"]),
    (form(**tag("é🙂", SCHEMA, "")), ['é🙂{"x": 2}'], ["é🙂", "é"]),
    (form(**tag("<o>", {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag("<a>")]}, "</o>")),
     ["<o></o>", "<o>t<a>1]<a>2]u</o>"], ["<o><a></o>", "<o>t<a>1]", "<o></o>x"]),
    (form(**tag("<o>", {"type": "triggered_tags", "triggers": ["<a"], "tags": [tag("<a>")], "stop_after_first": True},
                "</o>")), ["<o></o>", "<o>t<a>1]</o>"], ["<o><a>1]u</o>"]),
    (form(type="triggered_tags", triggers=["<a"], tags=[tag("<a>")], excludes=["bad"]), ["x<a>1]", "ba"],
     ["bad", "x<a>1]bad", "bad<a>1]"]),
    (form(type="tags_with_separator", tags=[tag("<a>"), tag("<b>")], separator=", "),
     ["", "<a>1]", "<a>1], <b>2], <a>3]"], ["<a>1],", ", ", "x"]),
    (form(type="tags_with_separator", tags=[tag("<a>")], separator="", at_least_one=True), ["<a>1]<a>2]"], [""]),
    (form(type="tags_with_separator", tags=[tag("<a>")], separator=";", stop_after_first=True), ["", "<a>1]"],
     ["<a>1];<a>2]"]),
    (form(**tag("<o>", {"type": "or", "elements": [{"type": "const_string", "value": "1"}, TEXT]}, "</o>")),
     ["<o>1</o>", "<o>12</o>"], ["<o>1"]),
    ({"structures": [{"begin": "f(", "schema": '{"type": "null"}', "end": ")"}, {"begin": "f[", "end": "]"}],
      "triggers": ["f"]}, ["a", "f(null)", 'f["x"]'], ["f", "f(1)", "of"]),
    (form(type="triggered_tags", triggers=['"\\/\r\x01'], tags=[tag('"\\/\r\x01\t')]), ['a"\\/', '"\\/\r\x01\t1]'],
     ['"\\/\r\x01']),
    # A regex could take the text after it too, and an answer would have no end.
    (form(**tag("<n>", {"type": "regex", "pattern": ".*"}, "</n>")), ["<n></n>", "<n>a</b></n>"],
     ["<n>a", "<n>a\n</n>", "<n></n></n>"]),
    (form(**tag("<n>", {"type": "regex", "pattern": "[a-z]+|1"}, ["bb", ";"])), ["<n>abb", "<n>1bb", "<n>b;"],
     ["<n>bb", "<n>1a;"]),
    (form(type="triggered_tags", triggers=["<n"], tags=[tag("<n>", {"type": "regex", "pattern": ".+"}, "</n>")]),
     ["x<n>1</n>y<n>2</n>"], ["<n></n>", "<n>1"]),
    (form(type="sequence", elements=[{"type": "regex", "pattern": ".*"}, tag("<a>"), {"type": "regex", "pattern": ".*"},
                                     {"type": "const_string", "value": "."}, {"type": "regex", "pattern": ".*"}]),
     ["hi<a>1].", "<a>1]so.so"], ["hi<a>x].", "<a>1]", "hi."]),
    (form(**tag("<n>", {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]*"},
                                                         {"type": "const_string", "value": "ab"}]}, "!")),
     ["<n>xyab!", "<n>ab!"], ["<n>x!", "<n>xyab"]),
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
    ({"structures": [], "triggers": [], "format": TEXT}, "structures", "exclude each other"),
    ({"format": 1}, "format", "an object"), ({"format": {}}, "format.type", "Missing"),
    ({"format": {"type": "x"}}, "format.type", "const_string"), ({"format": {"type": "grammar"}}, "format.type",
     "regex"),
    ({"format": {"type": "qwen_xml_parameter", "json_schema": {}}}, "format.type", "strict"),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "xml"}}, "format.style", "JSON"),
    ({"format": {"type": "sequence", "elements": []}}, "format.elements", "empty"),
    ({"format": {"type": "sequence", "elements": [TEXT, None]}}, "format.elements[1]", "an object"),
    ({"format": {"type": "const_string", "value": 1}}, "format.value", "a string"),
    ({"format": {**TEXT, "excludes": [1]}}, "format.excludes[0]", "a string"),
    ({"format": tag("<a>", {"type": "x"})}, "format.content.type", "Invalid"),
    ({"format": tag("<a>", NUMBER, [])}, "format.end", "empty"),
    ({"format": tag("<a>", NUMBER, ["x", ""])}, "format.end[1]", "empty"),
    ({"format": {"type": "tags_with_separator", "tags": [{**tag("<a>"), "type": "or"}], "separator": ""}},
     "format.tags[0].type", "tag"),
    ({"format": TEXT, "more": 1}, "more", "Unrecognized"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_fields_are_named(number: int) -> None:
    given, path, words = WRONG[number]
    with pytest.raises(RequestError, match=words) as caught:
        parse_structural_tag(Fields(given, ""))
    assert caught.value.param == path


def test_levels_have_a_limit() -> None:
    deep: dict[str, Any] = TEXT
    for _ in range(200):
        deep = {"type": "or", "elements": [deep]}
    with pytest.raises(RequestError, match="16 levels"):
        parse_structural_tag(Fields({"format": deep}, ""))


@pytest.mark.parametrize(
    ("given", "special", "words"),
    [
        (form(type="sequence", elements=[TEXT, tag("<a>")]), (), "elements.0.*last part"),
        (form(**tag("<a>", TEXT, "")), (), "last part"),
        (form(type="tags_with_separator", tags=[tag("<a>", TEXT, "")], separator=","), (), "last part"),
        (form(**tag("<o>", {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<a>")]}, "</o>")), (),
         "part of each"),
        (form(**tag("<|im_end|>a")), ("<|im_end|>",), "special token"),
        (form(**tag("<a>", TEXT, "<|im_end|>")), ("<|im_end|>",), "special token"),
        (form(type="regex", pattern="(" * 101 + ")" * 101), (), "100 levels"),
        (form(type="regex", pattern="a\\\\\\"), (), "backslash"),
    ],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(given: dict[str, Any], special: Sequence[str], words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        grammar(given, special)


@given(
    text=st.text(min_size=1, max_size=6)
    | st.text("\x00\x1b\x7f\x85\u2028/\\\"'^]-{}()|.&~#\n\r <[3", min_size=1, max_size=6)
)
@settings(max_examples=200, deadline=None)
def test_any_text_may_be_a_mark(text: str) -> None:
    """Whatever it would mean in a grammar."""
    triggered = grammar(form(type="triggered_tags", triggers=[text], tags=[tag(f"{text}=")]))
    assert admits(triggered, f"{text}=1]")
    assert not admits(triggered, f"{text}!")
    free = grammar(form(type="any_text", excludes=[text]))
    assert not admits(free, f"a{text}b")
    assert admits(grammar(form(**tag(text, TEXT, text))), f"{text}{text}")


@pytest.mark.parametrize(("tags", "ends", "size", "words"), [(128, 128, 4, "at most 2000"), (100, 10, 1000, "512 KiB")])
def test_writing_ends_at_a_limit(tags: int, ends: int, size: int, words: str) -> None:
    many = [tag(f"<{n}>", end=[f"</{n}.{end:0{size}}>" for end in range(ends)]) for n in range(tags)]
    with pytest.raises(GrammarError, match=words):
        grammar(form(type="triggered_tags", triggers=["<"], tags=many))


def test_what_is_named_often_is_written_once() -> None:
    """A request of half a megabyte becomes no grammar of many, whatever its parts have to do with each other."""
    marks = [chr(0x4E00 + number) * 250 for number in range(120)]
    inner = {
        "type": "triggered_tags", "triggers": marks, "tags": [tag(mark) for mark in marks],
        "excludes": [f"x{mark}" for mark in marks],
    }  # fmt: skip
    ends = [chr(0x6E00 + number) * 250 for number in range(120)]
    given = form(
        **tag("<o>", {"type": "or", "elements": [inner, *[{"type": "const_string", "value": "v"}] * 100]}, ends)
    )
    began = time.thread_time()
    written = grammar(given)
    assert time.thread_time() - began < 0.5
    assert len(written) < 4 * len(json.dumps(given, ensure_ascii=False))


@pytest.mark.parametrize("field", ["response_format", "structural_tag", "structured_outputs"])
def test_the_names_that_it_has(field: str) -> None:
    value: Any = {"type": "structural_tag", "format": tag("<a>")}
    if field == "structural_tag":
        value = '{"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "x"}}'
    found = parse_output_format(Fields({field: {"structural_tag": value} if field == "structured_outputs" else value}))
    assert (found.kind, found.tags is not None, found.name) == ("structural_tag", True, field)
