"""Grammars that a stranger may send, made from a seed: `(kind, grammar)` with kind `schema`, `regex` or `lark`."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any


def generate(count: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Every maker comes in turn, with sizes from small to beyond all limits."""
    rng = random.Random(seed)
    for number in range(count):
        kind, make = MAKERS[number % len(MAKERS)]
        yield kind, make(rng, 10 ** rng.uniform(0.5, 5))


def _rules_chain(rng: random.Random, size: float) -> str:
    count = min(int(size), 3000)
    rules = [f"r{i}: {rng.choice(['', 'r0 | ', chr(34) + 'x' + chr(34) + ' '])}r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "a"', ""])


def _rules_breadth(rng: random.Random, size: float) -> str:
    count = min(int(size), 5000)
    return "start: " + " | ".join(f'"{rng.randrange(10**6)}" start' for _ in range(count)) + ' | "z"\n'


def _rules_ambiguous(rng: random.Random, size: float) -> str:
    terminals = "\n".join(f"T{i}: /[a-z{i % 10}]{{1,{rng.randrange(1, 50)}}}/" for i in range(min(int(size), 60)))
    names = " | ".join(f"s T{i} s" for i in range(min(int(size), 60)))
    return f'start: s\ns: {names} | s s | s s s | ""\n{terminals}\n'


def _parentheses(rng: random.Random, size: float) -> str:
    depth = int(size)
    return "start: " + "(" * depth + '"a"' + ")" * depth + rng.choice(["", "*", "?", "{1,1000}"]) + "\n"


def _lark_repeats(rng: random.Random, size: float) -> str:
    inner = '"a"'
    for _ in range(rng.randrange(1, 6)):
        inner = f"({inner} | B){{{rng.randrange(3)},{int(size)}}}"
    return f"start: {inner}\nB: /b{{1,{int(size)}}}/\n"


def _regex_repeats(rng: random.Random, size: float) -> str:
    inner = rng.choice(["a", ".", "[a-z]", "(a|b)", "ab*", "(a*b*c*)"])
    for _ in range(rng.randrange(1, 4)):
        inner = f"({inner}{{{rng.choice(['', '0', '1', str(int(size))])},{int(size)}}}".replace("{,", "{0,") + ")"
    return inner


def _regex_long(rng: random.Random, size: float) -> str:
    return "".join(rng.choice("ab.*?|[x]") if rng.random() < 0.9 else "(a|b)*" for _ in range(int(size)))


def _regex_states(rng: random.Random, size: float) -> str:
    return rng.choice(
        [f"(.*a.{{{int(size)}}})", f"(a|b)*a(a|b){{{int(size)}}}", f"(.{{0,{int(size)}}}x){{0,{int(size)}}}"]
    )


def _regex_nested(rng: random.Random, size: float) -> str:
    depth = int(size)
    return "(" * depth + "a" + rng.choice([")", ")*", ")?", "|b)"]) * depth


def _lookahead(rng: random.Random, size: float) -> str:
    return "(?i:" * min(int(size), 200) + "é" + ")" * min(int(size), 200) + f"\\p{{L}}{{{int(size)}}}"


def _deep_schema(rng: random.Random, size: float) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(min(int(size), 20_000)):
        schema = {"type": "array", "items": schema} if rng.random() < 0.5 else {"properties": {"a": schema}}
    return schema


def _wide_schema(rng: random.Random, size: float) -> Any:
    names = [f"p{i}" for i in range(int(size))]
    return {
        "type": "object",
        "properties": {name: {"type": rng.choice(["string", "number", "boolean"])} for name in names},
        "required": [name for name in names if rng.random() < 0.5],
    }


def _references(rng: random.Random, size: float) -> Any:
    count = int(size)
    chain = {f"d{i}": {"type": "object", "properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(count)}
    chain[f"d{count}"] = rng.choice([{"type": "integer"}, {"$ref": "#/$defs/d0"}, {"$ref": f"#/$defs/d{count}"}])
    return {"$ref": "#/$defs/d0", "$defs": chain}


def _bare_references(rng: random.Random, size: float) -> Any:
    count = int(size)
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    chain[f"d{count}"] = rng.choice([{"type": "integer"}, {"$ref": "#/$defs/d0"}])
    return {"$ref": "#/$defs/d0", "$defs": chain}


def _doubling(rng: random.Random, size: float) -> Any:
    key = rng.choice(["anyOf", "allOf", "oneOf"])
    count = min(int(size), 60)
    defs: dict[str, Any] = {
        f"d{i}": {key: [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)
    }
    defs[f"d{count}"] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _products(rng: random.Random, size: float) -> Any:
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"x{i}{j}": {"type": "integer"}}} for j in range(rng.randrange(2, 9))]}
            for i in range(min(int(size), 100))
        ]
    }


def _bounds(rng: random.Random, size: float) -> Any:
    huge = int(size) ** rng.choice([1, 2, 3])
    return rng.choice([
        {"type": "string", "minLength": int(size), "maxLength": huge},
        {"type": "array", "items": {"type": "integer"}, "minItems": int(size), "maxItems": huge},
        {"type": "array", "items": {"const": "ab" * 500}, "minItems": huge},
        {"type": "object", "minProperties": int(size), "maxProperties": huge},
        {"type": "integer", "minimum": -huge, "maximum": huge * 7 + 3},
        {"type": "number", "minimum": 1 / huge, "maximum": huge + 1 / 3},
    ])  # fmt: skip


def _multiples(rng: random.Random, size: float) -> Any:
    step = rng.choice([int(size) * 2 + 1, 1 / int(size + 1), 99991, 10**9 + 7, 0.000123])
    return {"allOf": [{"type": "number", "multipleOf": step}, {"type": "number", "multipleOf": rng.randrange(2, 99)}]}


def _enum(rng: random.Random, size: float) -> Any:
    return {"enum": [rng.choice([f"value{i}", i, {"a": [i]}, "x" * rng.randrange(300)]) for i in range(int(size))]}


def _patterns(rng: random.Random, size: float) -> Any:
    names = [f"^a{i}x*$" for i in range(min(int(size), 3000))]
    return rng.choice([
        {"type": "object", "patternProperties": {name: {"type": "integer"} for name in names}},
        {"type": "string", "pattern": _regex_repeats(rng, size)},
        {"type": "string", "pattern": _regex_states(rng, size), "maxLength": int(size)},
        {"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(min(int(size), 40))]},
    ])  # fmt: skip


def _long_text(rng: random.Random, size: float) -> Any:
    return {"type": "object", "properties": {"a": {"type": "string"}, "b": {"const": "ab" * int(size * 3)}}}


def _nonsense(rng: random.Random, size: float) -> Any:
    junk: list[Any] = [None, -1, "x", [], {}, [[]], 1e308, True, {"$ref": 5}, "\ud800", "#/$defs/x"]
    keys = ["type", "properties", "items", "enum", "const", "$ref", "$defs", "required", "anyOf", "pattern", "format",
            "minLength", "maxItems", "x-guidance", "additionalProperties", "multipleOf", "not", "if"]  # fmt: skip
    return {rng.choice(keys): rng.choice(junk) for _ in range(rng.randrange(1, 6))}


MAKERS: list[tuple[str, Callable[[random.Random, float], Any]]] = [
    ("lark", _rules_chain), ("lark", _rules_breadth), ("lark", _rules_ambiguous), ("lark", _parentheses),
    ("lark", _lark_repeats), ("regex", _regex_repeats), ("regex", _regex_long), ("regex", _regex_states),
    ("regex", _regex_nested), ("regex", _lookahead), ("schema", _deep_schema), ("schema", _wide_schema),
    ("schema", _references), ("schema", _bare_references), ("schema", _doubling), ("schema", _products),
    ("schema", _bounds), ("schema", _multiples), ("schema", _enum), ("schema", _patterns), ("schema", _long_text),
    ("schema", _nonsense),
]  # fmt: skip
