"""What a JSON schema says of a value's text: names in their order, texts that it may be, how it begins. Pure.

A shape looks at its schema when an answer comes to it for the first time, and at no more of it than is needed there: a
schema of any size costs nothing before. What it says is what is likely, not what is allowed: guesses may be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

MOST_ALTERNATIVES = 16
"""Shapes that one value may have, the first ones of more."""
MOST_SHAPES = 128
"""Shapes that one value may have where it is one of several functions, or is in an object that may be one of several;
and texts of all of them among which one is guessed."""
MOST_TEXTS = 64
"""Texts of an enumeration that are known, the first ones of more."""
_MOST_TEXT = 256
"""Characters of a name or text that are looked at; longer texts are none of a few."""
_MOST_HOPS = 8
"""References and alternatives within each other that are followed."""
_MOST_PARTS = 128
"""Parts of a schema that are looked at for one value: references may lead to the same ones on any number of ways."""
_LOOKED_AT = 128
"""Properties behind the one that was due that are looked through for another one."""
_FEW_SPELLED = 8
"""The same where the name is written with escapes: each is spelled then."""
_LITERALS = {"boolean": (b"true", b"false"), "null": (b"null",)}

NO_SHAPES: tuple[Shape, ...] = ()


class Shapes:
    """Those of one schema, made when they are asked for, and kept."""

    __slots__ = ("_known", "root")

    def __init__(self, root: Any) -> None:
        self.root = root
        self._known: dict[int, tuple[Shape, ...]] = {}
        """Keyed by the identity of a part of `root`, which lives as long. Whoever refers to a part has the shapes that
        all others have."""

    def of(self, schema: Any) -> tuple[Shape, ...]:
        """What a value may look like by a part of the schema, likeliest first; nothing where anything may come."""
        known = self._known.get(id(schema))
        if known is None:
            part = self._follow(schema)
            known = self._known.get(id(part))
            if known is None:
                known = self._known[id(part)] = self._collect(part)
            self._known[id(schema)] = known
        return known

    def _follow(self, schema: Any) -> Any:
        """What a part of the schema refers to, where it does nothing else: many may refer to the same."""
        for _ in range(_MOST_HOPS):
            if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
                break
            schema = self._resolve(reference)
        return schema

    def _collect(self, schema: Any) -> tuple[Shape, ...]:
        found: dict[Shape, None] = {}
        left, seen = [(schema, _MOST_HOPS)], set[int]()
        while left and len(found) < MOST_ALTERNATIVES and len(seen) < _MOST_PARTS:
            part, hops = left.pop()
            if not isinstance(part, Mapping) or hops <= 0 or id(part) in seen:
                continue
            seen.add(id(part))
            others = self._find_others(part)
            if others is None:
                found.update(dict.fromkeys(self._make(part)))
            else:
                left += [(other, hops - 1) for other in reversed(others)]
        return tuple(islice(found, MOST_ALTERNATIVES))

    def _find_others(self, schema: Mapping[str, Any]) -> list[Any] | None:
        """The parts that a part of the schema leaves it to; None where it says itself what a value is."""
        if isinstance(reference := schema.get("$ref"), str):
            return [self._resolve(reference)]
        for key in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(key), list):
                return options[:MOST_ALTERNATIVES]
        if isinstance(parts := schema.get("allOf"), list) and not isinstance(schema.get("properties"), Mapping):
            return parts[:MOST_ALTERNATIVES]
        return None

    def _make(self, schema: Mapping[str, Any]) -> tuple[Shape, ...]:
        made = self._known.get(id(schema))
        if made is None:
            named = schema.get("type")
            named = named[:MOST_ALTERNATIVES] if isinstance(named, list) else [named]
            kinds = dict.fromkeys(kind if isinstance(kind, str) else _infer(schema) for kind in named)
            made = self._known[id(schema)] = tuple(Shape(self, schema, kind) for kind in kinds)
        return made

    def _resolve(self, reference: str) -> Any:
        """The part of the schema that a local reference points to; None where there is none."""
        if not reference.startswith("#"):
            return None
        part = self.root
        for step in reference[1:].split("/")[1:]:
            if not isinstance(part, Mapping):
                return None
            part = part.get(step.replace("~1", "/").replace("~0", "~"))
        return part


def join(groups: Iterable[tuple[Shape, ...]]) -> tuple[Shape, ...]:
    """The shapes of all groups, each once, the first ones of more than a value may have: no further group is made then.
    Without a bound there would be a power of them where alternatives have values of alternatives."""
    distinct: dict[int, tuple[Shape, ...]] = {}
    """Many may leave it to the same part of the schema, which keeps its group."""
    found: dict[Shape, None] = {}
    for group in groups:
        if id(group) not in distinct:
            distinct[id(group)] = group
            found.update(dict.fromkeys(group))
            if len(found) >= MOST_SHAPES:
                break
    return next(iter(distinct.values())) if len(distinct) == 1 else tuple(islice(found, MOST_SHAPES))


def _infer(schema: Mapping[str, Any]) -> str | None:
    """The type of a schema that does not say it."""
    if "properties" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else None


class Shape:
    """One kind of value."""

    __slots__ = ("_names", "_properties", "_required", "_schema", "_shapes", "_texts", "begins", "closed", "num_texts")

    def __init__(self, shapes: Shapes, schema: Mapping[str, Any], kind: str | None) -> None:
        self._shapes = shapes
        self._schema = schema
        listed, literals = _list_values(schema), _LITERALS.get(kind or "", ())
        self.num_texts = len(literals if listed is None else listed)
        """As many `texts` as there are at the most; takes no time."""
        self._texts: tuple[bytes, ...] | None = literals if listed is None else None
        self.begins = {"object": b"{", "array": b"[", "string": b'"'}.get(kind or "", b"")
        """First character of the value; nothing where that is open."""
        properties = schema.get("properties") if kind == "object" else None
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._names: list[str] | None = None
        required = schema.get("required")
        self._required: list[Any] = required if isinstance(required, list) else []
        self.closed = schema.get("additionalProperties") is False
        """It has no properties but those that are named."""

    @property
    def texts(self) -> tuple[bytes, ...]:
        """The whole value, where it is one of a few. Spelled when somebody asks first: a token that comes to a hundred
        enumerations at once looks at the first ones of them."""
        if self._texts is None:
            self._texts = _texts(self._schema)
        return self._texts

    def name(self, place: int) -> bytes | None:
        """The text of the property at a place in their order; None behind the last one."""
        name = self._name_at(place)
        return None if name is None else spell(name[:_MOST_TEXT])

    def _name_at(self, place: int) -> str | None:
        names = self._names
        if names is None:
            names = self._names = list(self._properties)
        return names[place] if place < len(names) else None

    def is_required(self, place: int) -> bool:
        """Whether the property at a place must be there. Of very many it is taken for granted."""
        return len(self._required) > _LOOKED_AT or self._name_at(place) in self._required

    def find(self, text: bytes, due: int) -> int | None:
        """The place of a property by its text, where the one at `due` was to come."""
        name = _read(text)
        if name is None or name not in self._properties:
            return None
        if self._name_at(due) == name:
            return due
        names = self._names or []
        for start, end in ((due, due + _LOOKED_AT), (0, _LOOKED_AT)):
            try:
                return names.index(name, start, end)
            except ValueError:
                continue
        return due

    def complete(self, text: bytes, due: int, most: int = _LOOKED_AT) -> int | None:
        """The place of the first property from `due` on whose text begins so; no more than `most` are looked at."""
        escaped = b"\\" in text
        begun = "" if escaped else text[1:].decode(errors="ignore")
        looked_at = min(_FEW_SPELLED, max(1, most // _FEW_SPELLED)) if escaped else min(_LOOKED_AT, most)
        for place in range(due, due + looked_at):
            name = self._name_at(place)
            if name is None:
                return None
            if name.startswith(begun) and spell(name[:_MOST_TEXT]).startswith(text):
                return place
        return None

    def value(self, text: bytes) -> tuple[Shape, ...]:
        """What the value of a property may look like, by the property's text."""
        name = _read(text)
        if name is None:
            return NO_SHAPES
        return self._shapes.of(self._properties.get(name, self._schema.get("additionalProperties")))

    def item(self, place: int) -> tuple[Shape, ...]:
        """The same of the item at a place."""
        first = self._schema.get("prefixItems")
        if isinstance(first, list) and place < len(first):
            return self._shapes.of(first[place])
        return self._shapes.of(self._schema.get("items"))

    def is_full(self, place: int) -> bool:
        """An array with so many items has no more."""
        most = self._schema.get("maxItems")
        first = self._schema.get("prefixItems")
        if isinstance(first, list) and "items" not in self._schema and place >= len(first) > 0:
            return True
        return isinstance(most, int) and place >= most


def spell(value: Any) -> bytes:
    """A value as answers write it."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _read(text: bytes) -> str | None:
    """The name that a property's text spells; None where it is none."""
    if b"\\" not in text:
        return text[1:-1].decode(errors="replace")
    try:
        return str(json.loads(text))
    except ValueError:
        return None


def _list_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema names; None where it names none."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values[:MOST_TEXTS] if isinstance(values, list) else None


def _texts(schema: Mapping[str, Any]) -> tuple[bytes, ...]:
    scalars = [each for each in _list_values(schema) or () if not isinstance(each, Mapping | list)]
    return tuple(spell(each) for each in scalars if not isinstance(each, str) or len(each) <= _MOST_TEXT)
