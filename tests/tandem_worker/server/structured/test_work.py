"""What the library does not count is counted from the schema: the same answer on every machine."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.server.structured.compiler import embed_json_schema
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits
from tandem_worker.server.structured.work import MOST_STATES

LIMITS = GrammarLimits()


def steps(*values: float) -> dict[str, Any]:
    return {"properties": {f"p{number}": {"multipleOf": value} for number, value in enumerate(values)}}


def patterns(count: int, start: int = 0) -> dict[str, Any]:
    return {"patternProperties": {f"^a{number}x*$": {} for number in range(start, start + count)}}


def names(count: int) -> dict[str, Any]:
    return {"properties": {f"b{number}": {} for number in range(count)}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (steps(99991), "'multipleOf' are too large: without their points they may add up to 20000"),
        (steps(200.01), "'multipleOf'"),
        (steps(1e300), "'multipleOf'"),
        (steps(10**400), "'multipleOf'"),
        (steps(*range(1, 201)), "'multipleOf'"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 11}]}, "least common multiple"),
        ({"multipleOf": 9973, "anyOf": [{"multipleOf": 11}, {}]}, "least common multiple"),
        ({"$defs": {"a": {"multipleOf": 997}}, "$ref": "#/$defs/a", "multipleOf": 1.01}, "least common multiple"),
        (patterns(142), "'patternProperties'"),
        ({**patterns(21), **names(1000)}, "'patternProperties'"),
        ({"allOf": [patterns(6), patterns(6, 6)]}, "12 different 'patternProperties'"),
        ({"allOf": [patterns(10), names(2000)]}, "combines schemas"),
    ],
)
def test_too_much_work(schema: Any, words: str) -> None:
    for shape in (schema, {"type": "array", "items": schema}):
        with pytest.raises(GrammarError, match=words):
            LIMITS.check_schema(shape)
        with pytest.raises(GrammarError, match=words):
            LIMITS.check_text(f"start: a\na: {embed_json_schema(shape)}\n")


@pytest.mark.parametrize(
    "schema",
    [
        steps(20_000),
        steps(0.01, 0.25, 5, 12, 60, 1000),
        {"allOf": [steps(0.01, 0.25, 5), {"multipleOf": 12}]},
        steps(*range(1, 190)),
        {"$defs": {"a": {"multipleOf": 9973}, "b": {"multipleOf": 1000}}, "properties": {
            "a": {"$ref": "#/$defs/a", "description": "alone"}, "b": {"anyOf": [{"$ref": "#/$defs/b"}]}}},
        {"properties": {"multipleOf": {"type": "number"}, "patternProperties": {"type": "array"}}},
        {"enum": [{"multipleOf": True}, {"multipleOf": "x"}, {"patternProperties": 5, "properties": []}]},
        steps(0, float("nan"), float("inf")),
        patterns(141),
        {**patterns(1), **names(5000)},
        {"allOf": [{**patterns(1), **names(2500)}, patterns(1)]},
        {"allOf": [patterns(6), patterns(6)]},
    ],
)  # fmt: skip
def test_what_people_write(schema: Any) -> None:
    LIMITS.check_schema(schema)
    LIMITS.check_text(f"start: {embed_json_schema(schema)}\n")


def test_all_schemas_of_a_grammar_count_together() -> None:
    grammar = "".join(f"r{step}: {embed_json_schema({'multipleOf': step})}\n" for step in (8000, 8001, 8002))
    with pytest.raises(GrammarError, match="'multipleOf'"):
        LIMITS.check_text(grammar)
    LIMITS.check_text('start: "%json {" a "%json"\n')
    with pytest.raises(GrammarError, match="that no JSON follows"):
        LIMITS.check_text("%json {" * 9000)


def digits(number: Fraction) -> int:
    """Of a decimal, the long way."""
    while number.denominator != 1:
        number *= 10
    return number.numerator


@given(st.lists(st.decimals(min_value="0.001", max_value=3000, places=3), min_size=1, max_size=4, unique=True))
def test_a_common_step_is_the_least_that_all_divide(values: list[Any]) -> None:
    exact = [Fraction(str(value)) for value in values]
    common = exact[0]
    for value in exact[1:]:
        ratio = common / value  # common * n = value * m, both the least
        common *= ratio.denominator
    assert all((common / value).denominator == 1 for value in exact)
    small = digits(common) <= MOST_STATES and sum(map(digits, exact)) <= MOST_STATES
    schema = json.loads(json.dumps({"allOf": [{"multipleOf": float(value)} for value in values]}))
    if small:
        LIMITS.check_schema(schema)
    else:
        with pytest.raises(GrammarError):
            LIMITS.check_schema(schema)
