"""What is refused before anything parses it."""

from __future__ import annotations

from typing import Any

import pytest
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits, check_types

from tests.effort import count_instructions

LIMITS = GrammarLimits()


def nest(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (nest(101), "at most 100 levels"),
        (nest(100_000), "at most 100 levels"),
        ({"enum": list(range(100_000))}, "at most 20000"),
        ({"properties": {str(number): {} for number in range(100_000)}}, "at most 20000"),
        ({"const": "x" * 600_000}, "512 KiB"),
        ({"y" * 600_000: 1}, "512 KiB"),
    ],
)
def test_schemas_beyond_a_limit(schema: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        LIMITS.check_schema(schema)


def test_schemas_within_the_limits() -> None:
    LIMITS.check_schema(nest(100))
    LIMITS.check_schema({"enum": list(range(9000)), "description": "x" * 500_000})


def test_looking_at_a_schema_costs_no_more_than_the_limits_allow() -> None:
    small = {"enum": [{"a": number} for number in range(6_000)]}
    huge = {"enum": [{"a": number} for number in range(200_000)]}

    def refuse() -> None:
        with pytest.raises(GrammarError):
            LIMITS.check_schema(huge)

    assert count_instructions(refuse) < 2 * count_instructions(lambda: LIMITS.check_schema(small))


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("\n".join(f"r{i}: r{i + 1}" for i in range(3000)), "3000 rules: at most 1000"),
        ("start: " + "(" * 101 + '"a"' + ")" * 101, "at most 100 levels"),
        ("start: a" + " " * 70_000, "64 KiB"),
        ('%llguidance {"no_forcing": false}\nstart: "a"', "options of %llguidance"),
        ('start: "a"\n  %llguidance   {"no_forcing": false}', "options of %llguidance"),
    ],
)
def test_grammars_beyond_a_limit(grammar: str, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        LIMITS.check_lark(grammar)


def test_grammars_within_the_limits() -> None:
    LIMITS.check_lark('%llguidance {}\n%llguidance\nstart: a\n?a.2: "x"\nB{n}: /y/\n')


def test_regexes_beyond_a_limit() -> None:
    with pytest.raises(GrammarError, match="16 KiB"):
        LIMITS.check_regex("a" * 6_000_000)
    with pytest.raises(GrammarError, match="100 levels"):
        LIMITS.check_regex("(" * 101 + ")" * 101)
    LIMITS.check_regex("(a{1000}){1000}")
    LIMITS.check_regex("a\\\\")
    with pytest.raises(GrammarError, match="backslash"):
        LIMITS.check_regex("a\\\\\\")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "float"},
        {"type": ["string", "dict"]},
        {"type": 3},
        {"type": {"$ref": "#"}},
        {"properties": {"a": {"type": "object", "properties": {"b": {"type": "any"}}}}},
        {"$defs": {"a": {"items": {"type": "str"}}}},
        {"anyOf": [{"type": "string"}, {"prefixItems": [{"not": {"type": "none"}}]}]},
    ],
)
def test_types_that_there_are_not(schema: Any) -> None:
    with pytest.raises(GrammarError, match="is no type of JSON Schema"):
        check_types(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["string", "null"], "enum": [{"type": "x"}], "default": {"type": "x"}, "const": {"type": "x"}},
        {"properties": {"type": {"type": "string"}, "properties": {"const": {"type": "x"}}}},
        {"properties": {"a": True}, "items": False, "anyOf": 3, "properties_of": {"type": "x"}},
        True,
    ],
)
def test_what_only_looks_like_a_type(schema: Any) -> None:
    check_types(schema)
