"""Schemas of parameters as parts of a grammar of calls: where they are one JSON object, and where they are not: each
parameter on its own, in the schema's order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tandem_worker.server.structured.compiler import embed_json_schema
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import TEXT_BYTES

_ROOT_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description", "strict"}
)


MAX_PROPERTIES = 128
"""Their order is fixed and most may be left out: the grammar grows with the square of their number."""


_DATA = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are no schemas."""
_NAMED = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
"""Keywords whose values are schemas by name; a name is no keyword."""


def move_references(schema: Any, root: str) -> Any:
    """The same schema where it stands below `root` of another one: what it refers to moves along."""
    if isinstance(schema, list):
        return [move_references(item, root) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = root + value[1:]
        elif key in _NAMED and isinstance(value, Mapping):
            moved[key] = {name: move_references(each, root) for name, each in value.items()}
        else:
            moved[key] = value if key in _DATA else move_references(value, root)
    return moved


def _stays_in_definitions(schema: Any) -> bool:
    """Whether all that it refers to are definitions. Looks at data too: at worst a schema is longer than it need be."""
    if isinstance(schema, Mapping):
        reference = schema.get("$ref")
        inside = not isinstance(reference, str) or reference.startswith(("#/$defs/", "#/definitions/"))
        return inside and all(map(_stays_in_definitions, schema.values()))
    return not isinstance(schema, list) or all(map(_stays_in_definitions, schema))


class Size:
    """Size of a grammar while it is written: a few schemas that each parameter repeats are soon many megabytes."""

    def __init__(self, most_bytes: int = TEXT_BYTES) -> None:
        self._bytes, self._most = 0, most_bytes

    def add(self, text: str) -> str:
        """Returns `text`. Raises GrammarError when all of it is more than may be compiled."""
        self._bytes += len(text)
        if self._bytes > self._most:
            raise GrammarError(f"it is too large: all of it together may have {self._most // 1024} KiB")
        return text


class Parameters:
    """The parameters of one function. Raises GrammarError for a schema that is more than a list of properties."""

    def __init__(self, schema: Mapping[str, Any], size: Size) -> None:
        odd = schema.keys() - _ROOT_KEYS
        if odd:
            raise GrammarError(f"'{min(odd)}' cannot be enforced beside the properties in this model's format of calls")
        self._size = size
        self._schema = schema
        self._definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        self._plain = _stays_in_definitions(schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            raise GrammarError("'properties' must be an object")
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise GrammarError("'required' must be an array of strings")
        if len(properties) > MAX_PROPERTIES:
            raise GrammarError(
                f"it has {len(properties)} properties: at most {MAX_PROPERTIES} can be enforced in this model's format"
            )
        self.properties: dict[str, Any] = dict(properties)
        self.required = frozenset(required)
        missing = self.required - self.properties.keys()
        if missing:
            raise GrammarError(f"the required property '{min(missing)}' is not among the properties")
        self.open = not self.properties and schema.get("additionalProperties") is not False
        """Nothing is said about them: any are allowed."""

    def json_value(self, key: str) -> str:
        """Right side of a Lark rule for a value written as JSON. Raises GrammarError."""
        schema = self.properties[key]
        if not isinstance(schema, Mapping):
            return embed_json_schema({})
        if self._plain:
            return self._size.add(embed_json_schema({**schema, **self._definitions}))
        root = "#/$defs/function"
        moved = move_references(schema, root)
        if moved != schema:  # it refers to parts of the function's schema, or to all of it
            moved["$defs"] = {"function": move_references(self._schema, root)}
        return self._size.add(embed_json_schema(moved))

    def sequence(self, rule_of: Callable[[str], str], separator: str = "") -> str:
        """Lark expression: the required ones and any of the others, in order. `separator` is a Lark string."""
        keys = list(self.properties)
        if not separator:
            return self._size.add(
                " ".join(rule_of(key) + ("" if key in self.required else "?") for key in keys) or '""'
            )
        options: list[str] = []
        for index, key in enumerate(keys):
            rest = [(f"{separator} {rule_of(other)}", other in self.required) for other in keys[index + 1 :]]
            options.append(
                self._size.add(" ".join([rule_of(key), *(text if needed else f"({text})?" for text, needed in rest)]))
            )
            if key in self.required:
                break
        else:
            options.append('""')
        return f"({' | '.join(options)})"


_TEXT_KEYS = frozenset(
    {"type", "title", "description", "default", "examples", "enum", "const", "minLength", "maxLength"}
)


def text_value(schema: Mapping[str, Any], forbidden: str) -> str:
    """Right side of a Lark terminal: a plain text that does not contain the regex `forbidden`. Raises GrammarError."""
    odd = schema.keys() - _TEXT_KEYS
    if odd:
        raise GrammarError(f"'{min(odd)}' of a string cannot be enforced in this model's format of calls")
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if choices is not None:
        if not isinstance(choices, list) or not choices:
            raise GrammarError("'enum' must be an array of at least one value")
        return " | ".join(json.dumps(str(choice)) for choice in choices)
    low, high = _length(schema, "minLength") or 0, _length(schema, "maxLength")
    return f"/(?s:.{{{low},{'' if high is None else high}}})/ & ~/(?s:.*){forbidden}(?s:.*)/"


def _length(schema: Mapping[str, Any], key: str) -> int | None:
    """It is written into a regex: nothing but a number may be."""
    value = schema.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise GrammarError(f"'{key}' must be an integer that is not negative")
    return value
