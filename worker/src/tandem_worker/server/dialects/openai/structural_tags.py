"""Structural tags: text that is free until a trigger comes, and JSON of a schema from there to an end. Pure.

In both ways to write them that vLLM and SGLang take: `structures` with `triggers`, and the same as a `format` of type
`triggered_tags`. The other types of a `format`, and what else its tags may hold, are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem_worker.server.dialects.fields import Fields, check_length, check_text, read_json, refuse, wrong_type
from tandem_worker.server.structured.contract import StructuralTag

MAX_TAGS = 128
"""Items of one list; as many as a request may have tools."""
MAX_TEXT_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class _Structure:
    path: str
    begin: str
    schema: dict[str, Any]
    end: str


def parse_structural_tag(given: Fields) -> tuple[StructuralTag, ...]:
    """The fields beside `type`, written in one of the two ways. Raises RequestError."""
    if given.given("format"):
        for key in ("structures", "triggers"):
            given.unsupported(
                key, f"'{given.name(key)}' and '{given.name('format')}' exclude each other: leave one out."
            )
        found = _format(Fields(given.required("format"), given.name("format")))
    else:
        structures = [_structure(each) for each in _items(given, "structures")]
        found = _triggered(given, structures)
    given.finish()
    return found


def _structure(given: Fields) -> _Structure:
    begin = _text(given, "begin", allow_empty=False)
    schema = _schema(given.take("schema"), given.name("schema"))
    end = _text(given, "end")
    given.finish()
    return _Structure(given.path, begin, schema, end)


def _format(given: Fields) -> tuple[StructuralTag, ...]:
    _check_type(given, "triggered_tags")
    tags = [_tag(each) for each in _items(given, "tags")]
    for key in ("at_least_one", "stop_after_first"):
        given.unsupported(key, f"'{given.name(key)}' is not supported: leave it out or false.", harmless=[False])
    given.unsupported("excludes", f"'{given.name('excludes')}' is not supported: leave it out.", harmless=[[]])
    found = _triggered(given, tags)
    given.finish()
    return found


def _tag(given: Fields) -> _Structure:
    given.choice("type", ("tag",))
    begin, end = _text(given, "begin", allow_empty=False), _end(given)
    content = Fields(given.required("content"), given.name("content"))
    _check_type(content, "json_schema")
    style = content.name("style")
    content.unsupported("style", f"Only JSON is written: leave '{style}' out or 'json'.", harmless=["json"])
    schema = _schema(content.required("json_schema"), content.name("json_schema"))
    content.finish()
    given.finish()
    return _Structure(given.path, begin, schema, end)


def _check_type(given: Fields, supported: str) -> None:
    kind = given.required_string("type")
    if kind != supported:
        sentence = f"'{kind[:80]}' is not supported as '{given.name('type')}': it must be '{supported}'."
        refuse(given.name("type"), sentence, "unsupported_parameter")


def _schema(value: Any, path: str) -> dict[str, Any]:
    value = read_json(value, path, "invalid_json_schema")
    if value is None or value is True:
        value = {}
    if value is False:
        refuse(path, f"'{path}' is false, which admits no value.", "invalid_json_schema")
    if not isinstance(value, dict):
        wrong_type(path, "an object, or the JSON text of one", value)
    return value


def _triggered(given: Fields, tags: list[_Structure]) -> tuple[StructuralTag, ...]:
    """Each of `tags` with the trigger that it begins with."""
    name = given.name("triggers")
    items = _bounded(given.array("triggers") or [], name)
    triggers = dict.fromkeys(check_text(item, f"{name}[{i}]", MAX_TEXT_LENGTH) for i, item in enumerate(items))
    if not triggers:
        refuse(name, f"'{name}' must not be empty.", "empty_array")
    for trigger in triggers:
        if any(trigger in other for other in triggers if other is not trigger):
            refuse(name, f"'{trigger[:80]}' is part of another trigger: leave one of them out.", "invalid_value")
        if not any(tag.begin.startswith(trigger) for tag in tags):
            refuse(name, f"No tag begins with the trigger '{trigger[:80]}'.", "invalid_value")
    found: list[StructuralTag] = []
    for tag in tags:
        trigger = next(filter(tag.begin.startswith, triggers), None)
        if trigger is None:
            refuse(f"{tag.path}.begin", f"'{tag.begin[:80]}' begins with none of the triggers.", "invalid_value")
        found.append(StructuralTag(trigger=trigger, begin=tag.begin, schema=tag.schema, end=tag.end))
    return tuple(found)


def _items(given: Fields, key: str) -> list[Fields]:
    if not given.given(key):
        given.required(key)
    name = given.name(key)
    value = given.array(key) or []
    if not value:
        refuse(name, f"'{name}' must not be empty.", "empty_array")
    return [Fields(item, f"{name}[{index}]") for index, item in enumerate(_bounded(value, name))]


def _bounded(value: list[Any], path: str) -> list[Any]:
    if len(value) > MAX_TAGS:
        refuse(path, f"'{path}' may have {MAX_TAGS} items, but it has {len(value)}.", "array_above_max_length")
    return value


def _end(given: Fields) -> str:
    """A text, or a list of one."""
    value, path = given.required("end"), given.name("end")
    if isinstance(value, list) and len(value) != 1:
        refuse(path, f"'{path}' must be one text: several ends are not supported.", "unsupported_parameter")
    if isinstance(value, list):
        value, path = value[0], f"{path}[0]"
    if not isinstance(value, str):
        wrong_type(path, "a string", value)
    return check_length(value, path, MAX_TEXT_LENGTH)


def _text(given: Fields, key: str, *, allow_empty: bool = True) -> str:
    return check_length(given.required_string(key, allow_empty=allow_empty), given.name(key), MAX_TEXT_LENGTH)
