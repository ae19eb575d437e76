"""How large a grammar may be, looked at before anything parses it: one pass that ends at the first limit.

What passes here may still be too complex for the library's limits; a process of its own finds out (see `proving`).
These limits keep the cost of getting there small, bound what the library does not count (see `work`), and give a client
a number to write against.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.work import SchemaWork

_RULE = re.compile(
    r"^[ \t]*[?!]*[A-Za-z_][A-Za-z0-9_]*(?:\.[-0-9]+)?(?:\{[^}\n]*\})?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE
)
_OPTIONS = re.compile(r"%llguidance\b[ \t]*([^\n]*)")
_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_JSON = json.JSONDecoder()


TEXT_BYTES = 512 * 1024


_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_SCHEMAS = (
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "allOf", "anyOf", "oneOf", "not", "if", "then", "else",
)  # fmt: skip


def check_types(schema: object) -> None:
    """Raises GrammarError for a `type` that JSON Schema does not know. For a schema within the limits."""
    left = [schema]
    while left:
        each = left.pop()
        if not isinstance(each, Mapping):
            continue
        if "type" in each:
            named = each["type"]
            for name in named if isinstance(named, list) else [named]:
                if not isinstance(name, str) or name not in _TYPES:
                    raise GrammarError(
                        f"{str(name)[:80]!r} is no type of JSON Schema: there are {', '.join(sorted(_TYPES))}"
                    )
        for key in _SCHEMAS_BY_NAME:
            if isinstance(inner := each.get(key), Mapping):
                left.extend(inner.values())
        for key in _SCHEMAS:
            inner = each.get(key)
            left.extend(inner if isinstance(inner, list) else [inner])


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What one request's grammar may take."""

    text_bytes: int = TEXT_BYTES
    """All schemas together, or what they become as a grammar."""
    regex_bytes: int = 16 * 1024
    lark_bytes: int = 64 * 1024
    lark_rules: int = 1000
    gbnf_bytes: int = 16 * 1024
    gbnf_rules: int = 100
    """Bringing them into Lark takes the square of their number: for these, ten milliseconds."""
    values: int = 20_000
    """Keys and values of a schema."""
    depth: int = 100
    """Nesting of a schema's objects and arrays, or of the brackets in a regex or grammar."""

    def check_schema(self, schema: object) -> None:
        """Raises GrammarError. Costs no more than the limits allow, however large the schema is."""
        work = SchemaWork()
        self._look_at(schema, work)
        work.check()

    def _look_at(self, schema: object, work: SchemaWork) -> None:
        num_values = num_bytes = 0
        level: list[Any] = [schema]
        for depth in range(self.depth + 1):
            below: list[Any] = []
            for value in level:
                num_values += 1
                if isinstance(value, Mapping):
                    num_values += len(value)
                    self._check_values(num_values)
                    num_bytes += sum(map(len, value))
                    work.see(value)
                    below.extend(value.values())
                elif isinstance(value, list):
                    self._check_values(num_values + len(value))
                    below.extend(value)
                elif isinstance(value, str):
                    num_bytes += len(value)
            self._check_values(num_values)
            self._check_bytes(num_bytes, self.text_bytes, "a schema")
            if not below:
                return
            assert depth <= self.depth
            level = below
        raise GrammarError(f"it is nested too deeply: at most {self.depth} levels are allowed")

    def check_regex(self, regex: str) -> None:
        """Raises GrammarError."""
        self._check_bytes(len(regex), self.regex_bytes, "a regex")
        self._check_brackets(regex)
        if (len(regex) - len(regex.rstrip("\\"))) % 2:  # which would be dropped without a word
            raise GrammarError("it ends in a backslash that escapes nothing")

    def check_lark(self, grammar: str) -> None:
        """Raises GrammarError."""
        self._check_bytes(len(grammar), self.lark_bytes, "a grammar")
        num_rules = sum(1 for _ in _RULE.finditer(grammar))
        if num_rules > self.lark_rules:
            raise GrammarError(f"it has {num_rules} rules: at most {self.lark_rules} are allowed")
        self._check_brackets(grammar)
        for options in _OPTIONS.finditer(grammar):
            if options[1].strip() not in {"", "{}"}:
                raise GrammarError("options of %llguidance are the server's: write '%llguidance {}' or leave it out")

    def check_gbnf(self, grammar: str) -> None:
        """Raises GrammarError."""
        self._check_bytes(len(grammar), self.gbnf_bytes, "a grammar in GBNF")
        num_rules = grammar.count("::=")
        if num_rules > self.gbnf_rules:
            raise GrammarError(f"it has {num_rules} rules: at most {self.gbnf_rules} are allowed")
        self._check_brackets(grammar)

    def check_text(self, text: str) -> None:
        """Check a grammar as it is compiled, with all schemas inside. Raises GrammarError."""
        self._check_bytes(len(text), self.text_bytes, "all of it together")
        work, place, num_broken = SchemaWork(), 0, 0
        while begin := _EMBEDDED.search(text, place):
            place = begin.end()
            try:
                schema, place = _JSON.raw_decode(text, place)
            except (ValueError, RecursionError):  # in quotes it may be; else the library says what is wrong
                num_broken += 1
                if num_broken > self.depth:
                    raise GrammarError("it has too many '%json' that no JSON follows") from None
                continue
            self._look_at(schema, work)
        work.check()

    def _check_values(self, count: int) -> None:
        if count > self.values:
            raise GrammarError(f"it has too many keys and values: at most {self.values} are allowed")

    @staticmethod
    def _check_bytes(size: int, most: int, what: str) -> None:
        if size > most:
            raise GrammarError(f"it is too large: {what} may have {most // 1024} KiB")

    def _check_brackets(self, text: str) -> None:
        """Quoted brackets count too: nobody writes so many."""
        depth = 0
        for character in text:
            if character in "([{":
                depth += 1
                if depth > self.depth:
                    raise GrammarError(f"its brackets are nested too deeply: at most {self.depth} levels are allowed")
            elif character in ")]}":
                depth = max(0, depth - 1)
