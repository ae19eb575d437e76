"""Annotations that state a rule once for both of its judges: pydantic, and the API server through CEL.

The message is a sentence that says what to write; the API server puts the field's path in front of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

RULES_KEY = "x-kubernetes-validations"


def cel_string(text: str) -> str:
    """`text` as a CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def rule(expression: str, message: str, *, path: str | None = None, figures: str | None = None) -> Any:
    """One CEL rule. `path` is relative to where the rule stands, for example `.revision`. `figures` is a CEL expression
    for a message with the numbers at hand, which the API server shows instead."""
    entry = {"rule": expression, "message": message}
    if figures is not None:
        entry["messageExpression"] = figures
    if path is not None:
        entry["fieldPath"] = path
    return entry


def check_collector(url: str) -> str:
    """The URL of a collector as it is given, where one can be reached by it.

    Raises:
        ValueError: with a sentence that says what to write instead. It does not repeat a password.
    """
    advice = (
        "write the URL of a collector that takes OTLP over HTTP, for example http://collector.observability.svc:4318"
    )
    try:
        parts = urlsplit(url)
        well = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise ValueError(f"the collector's URL cannot be read ({error}); {advice}") from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("the collector's URL names a user; put what it wants to see into OTEL_EXPORTER_OTLP_HEADERS")
    if not well or not url.isprintable() or " " in url:
        raise ValueError(f"{url[:200]!r} is no URL of a collector; {advice}")
    return url


@dataclass(frozen=True, slots=True)
class Matches:
    """The whole string matches `pattern`, which uses only what Python and RE2 read alike: no look-around, no `\\w`."""

    pattern: str
    message: str
    int_or_string: bool = False
    """The API server also takes a bare whole number, as it does for quantities."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        matches = f".matches({cel_string(f'^({self.pattern})$')})"
        if self.int_or_string:
            del result["type"]
            result["x-kubernetes-int-or-string"] = True
            entry = rule(f"string(self){matches}", self.message)
        else:
            entry = rule(f"self{matches}", self.message)
        result[RULES_KEY] = [*result.get(RULES_KEY, []), entry]
        return result

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value, re.ASCII):
            raise ValueError(self.message)
        return value


@dataclass(frozen=True, slots=True)
class Lacks:
    """No part of the string matches `pattern`, which uses only what Python and RE2 read alike."""

    pattern: str
    message: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        entry = rule(f"!self.matches({cel_string(self.pattern)})", self.message)
        result[RULES_KEY] = [*result.get(RULES_KEY, []), entry]
        return result

    def _check(self, value: str) -> str:
        if re.search(self.pattern, value, re.ASCII):
            raise ValueError(self.message)
        return value


@dataclass(frozen=True, slots=True)
class Satisfies:
    """A CEL expression over `self` that the API server alone judges; pydantic lets the value pass."""

    expression: str
    message: str

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        result[RULES_KEY] = [*result.get(RULES_KEY, []), rule(self.expression, self.message)]
        return result
