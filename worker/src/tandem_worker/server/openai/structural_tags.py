"""Structural tags: text that is free until a trigger comes, and of a given form from there to an end. Pure.

In both ways to write them that vLLM and SGLang take, which hand them to XGrammar: `structures` with `triggers`, and the
newer `format`, a tree. The first is the second's `triggered_tags` with schemas.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem_worker.server.openai.fields import Fields, check_length, check_text, read_json, refuse, wrong_type

MAX_TAGS = 128
"""Of one list; as many as a request may have tools."""
MAX_TEXT_LENGTH = 1024
MAX_LEVELS = 16
_REFUSED = {
    "grammar": "a grammar within a structural tag is not supported: use 'regex' or 'json_schema'",
    "qwen_xml_parameter": "parameters in XML are not supported: use 'tools' with 'strict: true'",
    "token": "tokens are not supported: write their text as a 'const_string'",
    "exclude_token": "tokens are not supported",
    "any_tokens": "tokens are not supported: use 'any_text'",
    "token_triggered_tags": "tokens are not supported: use 'triggered_tags'",
}
_KNOWN = (
    "const_string", "json_schema", "regex", "any_text", "sequence", "or", "tag", "triggered_tags",
    "tags_with_separator",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    path: str
    """Of the field that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstString(Format):
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonSchema(Format):
    schema: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Regex(Format):
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyText(Format):
    excludes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence(Format):
    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Or(Format):
    elements: tuple[Format, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tag(Format):
    begin: str
    content: Format
    ends: tuple[str, ...]
    """One of them ends it. An empty one stands alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggeredTags(Format):
    triggers: tuple[str, ...]
    """None of them contains another, so that each tag has at most one."""
    tags: tuple[Tag, ...]
    at_least_one: bool
    stop_after_first: bool
    excludes: tuple[str, ...]
    """Texts that the free text around the tags does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagsWithSeparator(Format):
    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool


def parse_structural_tag(given: Fields) -> Format:
    """The fields beside `type`, written in one of the two ways. Raises RequestError."""
    if given.given("format"):
        for key in ("structures", "triggers"):
            given.unsupported(
                key, f"'{given.name(key)}' and '{given.name('format')}' exclude each other: leave one out."
            )
        found = _format(given.required("format"), given.name("format"), 0)
    else:
        structures = _list(given, "structures")
        tags = tuple(_structure(Fields(item, f"{given.name('structures')}[{i}]")) for i, item in enumerate(structures))
        found = _triggered(given, tags, given.path)
    given.finish()
    return found


def _structure(given: Fields) -> Tag:
    path, schema_path = given.path, given.name("schema")
    begin, schema = given.required_string("begin", allow_empty=False), given.take("schema")
    ends = _ends(given)
    given.finish()
    check_length(begin, f"{path}.begin", MAX_TEXT_LENGTH)
    return Tag(path=path, begin=begin, content=_schema(schema, schema_path), ends=ends)


def _schema(value: Any, path: str) -> JsonSchema:
    value = read_json(value, path, "invalid_json_schema")
    if value is None or value is True:
        value = {}
    if value is False:
        refuse(path, f"'{path}' is false, which admits no value.", "invalid_json_schema")
    if not isinstance(value, dict):
        wrong_type(path, "an object, or the JSON text of one", value)
    return JsonSchema(path=path, schema=value)


def _format(value: Any, path: str, level: int) -> Format:
    if level > MAX_LEVELS:
        refuse(path, f"Structural tags may have {MAX_LEVELS} levels.", "invalid_value")
    given = Fields(value, path)
    kind = given.required_string("type")
    match kind:
        case "const_string":
            found: Format = ConstString(path=path, value=_text(given, "value", allow_empty=False))
        case "json_schema":
            given.unsupported("style", "Only JSON is written: leave 'style' out or 'json'.", harmless=["json"])
            found = _schema(given.required("json_schema"), given.name("json_schema"))
        case "regex":
            found = Regex(path=given.name("pattern"), pattern=given.required_string("pattern", allow_empty=False))
        case "any_text":
            found = AnyText(path=path, excludes=_texts(given, "excludes"))
        case "sequence" | "or":
            elements = tuple(
                _format(item, f"{path}.elements[{index}]", level + 1)
                for index, item in enumerate(_list(given, "elements"))
            )
            found = (Sequence if kind == "sequence" else Or)(path=path, elements=elements)
        case "tag":
            found = _tag(given, level)
        case "triggered_tags":
            found = _triggered(given, _tags(given, level), path)
        case "tags_with_separator":
            found = TagsWithSeparator(
                path=path,
                tags=_tags(given, level),
                separator=_text(given, "separator"),
                at_least_one=given.boolean("at_least_one"),
                stop_after_first=given.boolean("stop_after_first"),
            )
        case _ if kind in _REFUSED:
            refuse(given.name("type"), f"'{kind}': {_REFUSED[kind]}.", "unsupported_parameter")
        case _:
            listed = ", ".join(f"'{each}'" for each in _KNOWN)
            refuse(given.name("type"), f"Invalid format '{kind[:80]}'. Supported: {listed}.", "invalid_value")
    given.finish()
    return found


def _tags(given: Fields, level: int) -> tuple[Tag, ...]:
    tags: list[Tag] = []
    for index, item in enumerate(_list(given, "tags")):
        each = Fields(item, f"{given.name('tags')}[{index}]")
        each.choice("type", ("tag",))
        tags.append(_tag(each, level + 1))
        each.finish()
    return tuple(tags)


def _tag(given: Fields, level: int) -> Tag:
    begin, ends = _text(given, "begin", allow_empty=False), _ends(given)
    content = _format(given.required("content"), given.name("content"), level + 1)
    return Tag(path=given.path, begin=begin, content=content, ends=ends)


def _triggered(given: Fields, tags: tuple[Tag, ...], path: str) -> TriggeredTags:
    name = given.name("triggers")
    triggers = _texts(given, "triggers")
    if not triggers:
        refuse(name, f"'{name}' must not be empty.", "empty_array")
    for trigger in triggers:
        if any(trigger in other for other in triggers if other is not trigger):
            refuse(name, f"'{trigger[:80]}' is part of another trigger: leave one of them out.", "invalid_value")
        if not any(tag.begin.startswith(trigger) for tag in tags):
            refuse(name, f"No tag begins with the trigger '{trigger[:80]}'.", "invalid_value")
    for tag in tags:
        if not any(map(tag.begin.startswith, triggers)):
            refuse(f"{tag.path}.begin", f"'{tag.begin[:80]}' begins with none of the triggers.", "invalid_value")
    return TriggeredTags(
        path=path,
        triggers=triggers,
        tags=tags,
        at_least_one=given.boolean("at_least_one"),
        stop_after_first=given.boolean("stop_after_first"),
        excludes=_texts(given, "excludes"),
    )


def _list(given: Fields, key: str) -> list[Any]:
    if not given.given(key):
        given.required(key)
    value = given.array(key) or []
    if not value:
        refuse(given.name(key), f"'{given.name(key)}' must not be empty.", "empty_array")
    return _bounded(value, given.name(key))


def _bounded(value: list[Any], path: str) -> list[Any]:
    if len(value) > MAX_TAGS:
        refuse(path, f"'{path}' may have {MAX_TAGS} items, but it has {len(value)}.", "array_above_max_length")
    return value


def _texts(given: Fields, key: str) -> tuple[str, ...]:
    return _distinct(given.array(key) or [], given.name(key))


def _distinct(items: list[Any], path: str) -> tuple[str, ...]:
    """Each text once, in order."""
    texts = (check_text(item, f"{path}[{i}]", MAX_TEXT_LENGTH) for i, item in enumerate(_bounded(items, path)))
    return tuple(dict.fromkeys(texts))


def _ends(given: Fields) -> tuple[str, ...]:
    value, path = given.required("end"), given.name("end")
    if isinstance(value, str):
        return (check_length(value, path, MAX_TEXT_LENGTH),)
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of strings", value)
    if not value:
        refuse(path, f"'{path}' must not be empty.", "empty_array")
    return _distinct(value, path)


def _text(given: Fields, key: str, *, allow_empty: bool = True) -> str:
    return check_length(given.required_string(key, allow_empty=allow_empty), given.name(key), MAX_TEXT_LENGTH)
