"""What follows in an answer in JSON, by its schema: where all of it is certain, foreseen is exactly what comes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tandem_worker.engine.guess.json_ahead import MOST_AHEAD, Foresight, Grade
from tandem_worker.engine.guess.json_text import At, JsonReader
from tandem_worker.engine.guess.shapes import Shapes

from tests.effort import count_instructions

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-999, 999), st.floats(-9, 9).map(lambda x: round(x, 3)),
                    st.text(max_size=8))  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, min_size=1, max_size=3), st.dictionaries(st.text(max_size=5), inner)),
    max_leaves=8,
)


def certain(value: Any) -> dict[str, Any]:
    """The schema of one value."""
    if isinstance(value, dict):
        properties = {key: certain(each) for key, each in value.items()}
        return {"properties": properties, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "prefixItems": [certain(each) for each in value]}
    return {"const": value}


def begin(schema: Any) -> JsonReader:
    shapes = Shapes(schema)
    return JsonReader(shapes.of(schema))


def foresee(reader: JsonReader) -> bytes:
    found = Foresight()
    reader.foresee(found)
    return bytes(found.text)


def write(value: Any, indent: int | None = None, **options: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options).encode()


@settings(max_examples=50, deadline=None)
@example(value={"\x1f": None, "b\\": [True, "é\n"]}, data=None)
@given(value=VALUES, data=st.data())
def test_what_is_certain_is_foreseen_from_everywhere(value: Any, data: st.DataObject | None) -> None:
    text = write(value)
    for cut in range(len(text)) if data is None else [data.draw(st.integers(0, len(text)))]:
        reader = begin(certain(value))
        assert reader.feed(text[:cut]) == cut
        found = foresee(reader)
        assert text[cut:].startswith(found)
        if not has_empty_object(value):  # of which nobody knows that it stays empty
            assert found == text[cut : cut + MOST_AHEAD]


def has_empty_object(value: Any) -> bool:
    if isinstance(value, dict):
        return not value or any(map(has_empty_object, value.values()))
    return isinstance(value, list) and any(map(has_empty_object, value))


@settings(max_examples=50, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 0, 1, 2, 4]), cuts=st.lists(st.integers(0, 200)))
def test_text_is_read_the_same_in_whatever_pieces(value: Any, indent: int | None, cuts: list[int]) -> None:
    text = write(value, indent) + (b" " if isinstance(value, int | float) or value is None else b"")
    whole, pieces = begin(certain(value)), begin(certain(value))
    whole.feed(text)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        pieces.feed(text[start:end])
        foresee(pieces)
    assert whole.at is pieces.at is At.END


@settings(max_examples=50, deadline=None)
@given(schema=st.recursive(st.one_of(SCALARS, st.just({"$ref": "#"})), lambda inner: st.one_of(
    st.lists(inner, max_size=3),
    st.dictionaries(st.sampled_from(["type", "properties", "items", "enum", "const", "required", "anyOf", "allOf",
                                     "prefixItems", "maxItems", "$ref", "additionalProperties", "a"]), inner)),
    max_leaves=12), text=st.text(alphabet='{}[]",:a1 \n\\tn', max_size=40))  # fmt: skip
def test_no_schema_and_no_text_is_too_strange(schema: Any, text: str) -> None:
    reader = begin(schema)
    for char in text:
        reader.feed(char.encode())
        assert len(foresee(reader)) <= MOST_AHEAD


ROW = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "number"},
                                        "kind": {"enum": ["user", "group"]}},
       "required": ["name", "size", "kind"], "additionalProperties": False}  # fmt: skip
ROWS = {"type": "array", "items": ROW}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b'[{"name": "'),
        (b'[{"na', b'me": "'),
        (b'[{"name": "a, \\"b', b""),
        (b'[{"name": "a"', b', "size": '),
        (b'[{"name": "a",', b' "size": '),
        (b'[{"name": "a", "size": 1', b', "kind": "user"}, {"name": "'),
        (b'[{"name": "a", "size": 1.5, "kind": "g', b'roup"}, {"name": "'),
        (b'[{"name": "a", "size": 1, "kind": "group"}, {"name": "b", "size": 2, "kind": "', b'group"}, {"name": "'),
        (b'[{"name":"a",', b'"size":'),
        (b'[\n  {\n    "name": "a",\n    "size": 2,', b'\n    "kind": "user"\n  },\n  {\n    "name": "'),
        (b'[\n{\n    "name": "a",\n    "size": 2,\n    "kind": "user"\n},', b'\n{\n    "name": "'),
        (b'[{"name": "a"}, what', b""),
        (b"[{]", b""),
    ],
)
def test_a_list_of_objects(before: bytes, after: bytes) -> None:
    reader = begin(ROWS)
    reader.feed(before)
    assert foresee(reader) == after


def test_grades_tell_where_it_is_not_sure() -> None:
    reader = begin(ROWS)
    reader.feed(b'[{"name": "a", "size": 1')
    found = Foresight()
    reader.foresee(found)
    marks = {bytes(found.text[at : at + 4]): grade for at, grade in found.grades}
    assert marks == {b', "k': Grade.NUMBER, b"user": Grade.CHOICE, b', {"': Grade.MORE}


def test_an_object_is_told_by_its_names_and_texts() -> None:
    schema = {"oneOf": [
        {"properties": {"type": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["type", "lives"]},
        {"properties": {"type": {"const": "dog"}, "name": {"$ref": "#/$defs/name"}}, "required": ["type", "name"]},
        {"properties": {"fish": {"type": "null"}}, "required": ["fish"]},
    ], "$defs": {"name": {"enum": ["Rex"]}}}  # fmt: skip
    for before, after in ((b'{"type": "d', b'og", "name": "Rex"}'), (b'{"type": "cat",', b' "lives": '),
                          (b'{"fi', b'sh": null}')):  # fmt: skip
        reader = begin(schema)
        reader.feed(before)
        assert foresee(reader) == after


def test_names_of_any_writing() -> None:
    schema = {"properties": {"größe": {"const": "é\n"}, 'a"b': {"const": 1}, "x" * 90: {}}}
    reader = begin(schema)
    whole = '{"größe": "é\\n", "a\\"b": 1, "'.encode() + b"x" * 90
    assert foresee(reader) == whole[:MOST_AHEAD]
    reader.feed(b'{"gr\\u00f6\\u00dfe"')
    assert foresee(reader).startswith(': "é\\n", "a\\"b": 1'.encode()), "the same name in other letters"


def test_a_schema_that_contains_itself_ends() -> None:
    schema: Any = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    assert foresee(begin(schema)) == (b'{"a": ' * 20)[:MOST_AHEAD]
    assert foresee(begin({"$ref": "#"})) == b""
    assert foresee(begin({"items": {"$ref": "#"}})) == b"[" * MOST_AHEAD


def test_the_work_does_not_grow_with_the_schema() -> None:
    """Ten thousand properties, or names of half a megabyte: what is looked at for a token is bounded."""

    def work(properties: dict[str, Any]) -> int:
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        reader = begin(schema)
        foresee(reader)
        reader.feed(b'{"')  # what there is once for each object of the schema is done

        def step() -> None:
            reader.feed(b"never there")
            foresee(reader)

        return count_instructions(step)

    few = work({f"p{number}": {"type": "string"} for number in range(200)})
    assert work({f"p{number}": {"type": "string"} for number in range(10_000)}) <= few + 10
    assert work({f"p{number}" * 2000: {"type": "string"} for number in range(200)}) <= few + 10


def test_the_work_does_not_grow_with_alternatives_within_each_other() -> None:
    """Objects that have one of several objects in them, and references of which each leads to many."""

    def work(num_kinds: int, num_ways: int, hops: int) -> int:
        kinds = [
            {"type": "object", "properties": {"a": {"$ref": "#/$defs/0"}, f"b{number}": {}}}
            for number in range(num_kinds)
        ]
        ways = {str(hop): {"anyOf": [{"$ref": f"#/$defs/{hop + 1}"}] * num_ways} for hop in range(hops)}
        schema = {"$ref": "#/$defs/0", "$defs": ways | {str(hops): {"anyOf": kinds}}}
        return count_instructions(lambda: foresee(begin(schema)))

    alone = work(1, 1, 0)
    assert work(2, 1, 0) < 4 * alone
    assert work(1, 16, 2) < 10 * alone
    assert work(1, 16, 7) < 10 * alone  # too many hops: nothing is found on any way


@pytest.mark.parametrize("name", [b"never there", b"never\\u0061"])
def test_the_work_does_not_grow_with_names_of_alternatives_within_each_other(name: bytes) -> None:
    """A name that is none of those of eight times eight objects."""

    def work(outer: int) -> int:
        kinds = [
            [{"type": "object", "properties": {f"p{kind} {way} {n}": {} for n in range(140)}} for way in range(8)]
            for kind in range(outer)
        ]
        outside = [{"type": "object", "properties": {"o": {"anyOf": each}}} for each in kinds]
        reader = begin({"anyOf": outside})
        reader.feed(b'{"o": {"')
        foresee(reader)  # what there is once for each part of the schema is done
        reader.feed(name)
        return count_instructions(lambda: foresee(reader))

    assert work(8) < 1.3 * work(2)


def test_the_work_does_not_grow_with_texts_of_alternatives() -> None:
    def work(count: int) -> int:
        kinds = [{"enum": [f"{kind}{number}" for number in range(64)]} for kind in range(count)]
        return count_instructions(lambda: foresee(begin({"type": "array", "items": {"anyOf": kinds}})))

    shapes = count_instructions(lambda: begin({"anyOf": [{"enum": [f"{number}"] * 64} for number in range(16)]}))
    assert work(16) < 2 * work(1) + shapes


def test_the_work_does_not_grow_with_texts_of_alternatives_within_each_other() -> None:
    """A value that is like none of eight times sixteen enumerations."""

    def work(count: int) -> int:
        kinds = [
            {
                "type": "array",
                "items": {"anyOf": [{"enum": [f"{kind} {way} {n}" for n in range(64)]} for way in range(16)]},
            }
            for kind in range(count)
        ]
        reader = begin({"anyOf": kinds})
        reader.feed(b'["')
        foresee(reader)  # what there is once for each part of the schema is done
        reader.feed(b"never there")
        return count_instructions(lambda: foresee(reader))

    assert work(8) < 1.1 * work(1)


def test_who_comes_to_many_enumerations_at_once_spells_a_few() -> None:
    """Objects of eight times sixteen kinds that have one each, of any type."""
    types = ["array", "boolean", "integer", "null", "number", "object", "string"]

    def work(count: int) -> int:
        kinds = [
            {"type": "object", "properties": {"k": {"type": types, "enum": [f"{kind} {n}" for n in range(64)]}}}
            for kind in range(16 * count)
        ]
        outer = [
            {"type": "object", "properties": {"o": {"anyOf": kinds[start : start + 16]}}}
            for start in range(0, len(kinds), 16)
        ]
        reader = begin({"type": "array", "items": {"anyOf": outer}})
        return count_instructions(lambda: foresee(reader))

    assert work(8) < 4 * work(1)
    assert work(1) < 200_000


def test_objects_that_say_the_same_are_not_told_by_it() -> None:
    """However many texts they have: those that nobody has looked at may be it."""
    values = {"anyOf": [{"enum": [f"{kind}-{number}" for number in range(64)]} for kind in range(16)]}
    schema = {"anyOf": [{"type": "object", "properties": {"k": values, f"z{n}": {}}} for n in range(16)]}
    reader = begin(schema)
    reader.feed(b'{"k": "3-3"')
    assert foresee(reader) == b', "z0": '
    reader.feed(b', "z15')
    assert foresee(reader) == b'": '


def test_what_is_kept_of_a_schema_does_not_grow_with_references() -> None:
    texts = [f"{number:0200}" for number in range(64)]
    schema: Any = {"$defs": {"t": {"anyOf": [{"enum": texts}] * 16}}, "items": {"$ref": "#/$defs/t"}}
    schema["properties"] = {str(number): {"$ref": "#/$defs/t"} for number in range(100)}
    shapes = Shapes(schema)
    assert len({id(shape) for part in schema["properties"].values() for shape in shapes.of(part)}) == 1


def test_what_one_answer_taught_is_not_told_to_another() -> None:
    shapes = Shapes(ROWS)
    taught = JsonReader(shapes.of(ROWS))
    taught.feed(write([{"name": "a", "size": 1, "kind": "group"}], 4)[:-2])
    other = JsonReader(shapes.of(ROWS))
    other.feed(b'[{"name": "a", "size": 1')
    assert foresee(other) == b', "kind": "user"}, {"name": "'
