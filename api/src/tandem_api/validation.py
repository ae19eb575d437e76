"""Annotations that state a rule once for both of its judges: pydantic, and the API server through CEL.

The message is a sentence that says what to write; the API server puts the field's path in front of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

from pydantic import BaseModel, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tandem_api.cel import holds

RULES_KEY = "x-kubernetes-validations"


def cel_string(text: str) -> str:
    """`text` as a CEL string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


SERVER_ONLY = "serverOnly"
"""In a rule as it is declared, not in the CRD."""


def rule(
    expression: str,
    message: str,
    *,
    path: str | None = None,
    figures: str | None = None,
    server_only: bool = False,
) -> Any:
    """One CEL rule. `path` is relative to where the rule stands, for example `.revision`. `figures` is a CEL expression
    for a message with the numbers at hand, which the API server shows instead. `server_only`: objects that were stored
    before there was the rule are let pass, so pydantic does not judge by it."""
    entry: dict[str, Any] = {"rule": expression, "message": message}
    if figures is not None:
        entry["messageExpression"] = figures
    if path is not None:
        entry["fieldPath"] = path
    if server_only:
        entry[SERVER_ONLY] = True
    return entry


def published(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A rule as the CRD has it."""
    return {key: value for key, value in entry.items() if key != SERVER_ONLY}


def find_broken(model: BaseModel) -> str | None:
    """The sentence of the first rule of its type that an object breaks; None where it keeps them all."""
    for entry in _rules_of(type(model)):
        if not holds(entry["rule"], model):
            return f"{entry.get('fieldPath', '.')[1:]} {entry['message']}".lstrip()
    return None


@cache
def _rules_of(model: type[BaseModel]) -> tuple[dict[str, Any], ...]:
    extra = model.model_config.get("json_schema_extra")
    declared = cast(dict[str, Any], extra).get(RULES_KEY, ()) if isinstance(extra, dict) else ()
    return tuple(entry for entry in declared if not entry.get(SERVER_ONLY))


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
    """A CEL expression over `self`."""

    expression: str
    message: str
    server_only: bool = True
    """The API server alone judges: values that were stored before there was the rule are let pass."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        return schema if self.server_only else core_schema.no_info_after_validator_function(self._check, schema)

    def _check(self, value: Any) -> Any:
        if not holds(self.expression, value):
            raise ValueError(self.message)
        return value

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        result[RULES_KEY] = [*result.get(RULES_KEY, []), rule(self.expression, self.message)]
        return result
