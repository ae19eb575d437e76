"""What an answer must look like: `response_format`, and the names that other servers have for the same. Pure.

vLLM: `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar`, `structured_outputs`. SGLang: `json_schema`,
`regex`, `ebnf`. Both: `structural_tag`. They are other ways to write a `response_format`; a request has at most one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.fields import Fields, check_array, check_text, read_json, refuse, wrong_type
from tandem_worker.server.dialects.openai.structural_tags import parse_structural_tag
from tandem_worker.server.structured.contract import StructuralTag

MAX_ALTERNATIVES = 1024
"""Texts of `guided_choice`."""
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~\-]")
_STRUCTURED = {
    "json": "guided_json", "regex": "guided_regex", "choice": "guided_choice", "grammar": "guided_grammar",
    "structural_tag": "structural_tag",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    kind: Literal["text", "json_object", "json_schema", "regex", "lark", "gbnf", "structural_tag"] = "text"
    schema: dict[str, Any] | None = None
    """With `json_schema`; an absent one allows any JSON value. Of a structural tag, all that was given."""
    tags: tuple[StructuralTag, ...] | None = None
    """Those of a structural tag."""
    definition: str = ""
    """The text of a regex, or of a grammar in Lark or GBNF."""
    path: str = "response_format"
    """Path of the field that says which kind it is."""
    content_path: str = "response_format"
    """Path of the schema or the definition."""

    @property
    def name(self) -> str:
        """The field of the request."""
        return self.path.partition(".")[0]


TEXT = ResponseFormat()


def parse_output_format(fields: Fields) -> ResponseFormat:
    """Take `response_format` and its other names. Raises RequestError."""
    chosen = TEXT
    for given in _given(fields):
        if given.kind == "text":
            continue
        if chosen is not TEXT:
            refuse(given.path, f"'{given.path}' and '{chosen.path}' exclude each other: leave one out.")
        chosen = given
    return chosen


def _given(fields: Fields) -> Iterator[ResponseFormat]:
    yield _response_format(fields)
    for key in ("guided_json", "json_schema", "guided_regex", "regex", "guided_choice", "guided_grammar", "ebnf",
                "structural_tag"):  # fmt: skip
        yield _other_name(fields, key, key)
    options = fields.object("structured_outputs")
    if options is None:
        return
    for key, meaning in _STRUCTURED.items():
        yield _other_name(options, key, meaning)
    if options.boolean("json_object"):
        yield ResponseFormat(kind="json_object", path=options.path, content_path=options.path)
    options.boolean("disable_fallback")  # there is one implementation, and none to fall back to
    for key in ("disable_any_whitespace", "disable_additional_properties"):
        options.unsupported(key, f"'{options.name(key)}' is not supported: leave it out or false.", harmless=[False])
    options.unsupported("whitespace_pattern", "White space between JSON tokens cannot be chosen.")
    options.finish()


def _other_name(fields: Fields, key: str, meaning: str) -> ResponseFormat:
    path = fields.name(key)
    value = fields.take(key)
    if value is None:
        return TEXT
    match meaning:
        case "guided_json" | "json_schema":
            return ResponseFormat(kind="json_schema", schema=_schema(value, path), path=path, content_path=path)
        case "structural_tag":
            return _structural_tag(_read_object(value, path, "invalid_structural_tag"), path)
        case "guided_choice":
            return ResponseFormat(kind="regex", definition=_alternatives(value, path), path=path, content_path=path)
        case _:
            value = check_text(value, path)
            if meaning in ("guided_regex", "regex"):
                return ResponseFormat(kind="regex", definition=value, path=path, content_path=path)
            # Both dialects are taken by that name elsewhere; only one of them has this sign.
            kind = "gbnf" if meaning == "ebnf" or "::=" in value else "lark"
            return ResponseFormat(kind=kind, definition=value, path=path, content_path=path)


def _schema(value: Any, path: str) -> dict[str, Any]:
    return _read_object(value, path, "invalid_json_schema")


def _read_object(value: Any, path: str, code: str) -> dict[str, Any]:
    """An object, or the JSON text of one."""
    value = read_json(value, path, code)
    if not isinstance(value, dict):
        wrong_type(path, "an object, or the JSON text of one", value)
    return value


def _structural_tag(value: dict[str, Any], path: str) -> ResponseFormat:
    given = Fields(value, path)
    given.choice("type", ("structural_tag",))
    tags = parse_structural_tag(given)
    return ResponseFormat(kind="structural_tag", schema=value, tags=tags, path=path, content_path=path)


def _alternatives(value: Any, path: str) -> str:
    """A regex of the texts in `value`."""
    choices = check_array(value, path, MAX_ALTERNATIVES, "choices", "an array of strings")
    texts = [check_text(item, f"{path}[{index}]") for index, item in enumerate(choices)]
    return "|".join(_META.sub(r"\\\g<0>", text) for text in texts)


def _response_format(fields: Fields) -> ResponseFormat:
    raw = fields.raw_object("response_format")
    if raw is None:
        return TEXT
    given = Fields(raw, "response_format")
    kind = given.required_string("type")
    match kind:
        case "text" | "json_object":
            given.finish()
            return ResponseFormat(kind=kind)
        case "json_schema":
            inner = Fields(given.required("json_schema"), "response_format.json_schema")
            inner.required_string("name")
            inner.string("description")
            inner.boolean("strict")  # every schema is enforced: the engine cannot produce anything else
            schema = inner.raw_object("schema")
            inner.finish()
            given.finish()
            return ResponseFormat(kind=kind, schema=schema, content_path="response_format.json_schema.schema")
        case "grammar":
            return _grammar(given)
        case "structural_tag":
            return _structural_tag(raw, "response_format")
        case _:
            raise RequestError(
                f"Invalid response format '{kind}'. Supported: 'text', 'json_object', 'json_schema', 'grammar', "
                "'structural_tag'.",
                param="response_format.type",
                code="invalid_value",
            )


def _grammar(given: Fields) -> ResponseFormat:
    inner = Fields(given.required("grammar"), "response_format.grammar")
    syntax = inner.required_string("syntax")
    if syntax not in ("regex", "lark"):
        refuse(
            "response_format.grammar.syntax",
            f"Invalid grammar syntax '{syntax}'. Supported: 'regex', 'lark'.",
            "invalid_value",
        )
    definition = inner.required_string("definition", allow_empty=False)
    inner.finish()
    given.finish()
    return ResponseFormat(
        kind=syntax,
        definition=definition,
        path="response_format.grammar.syntax",
        content_path="response_format.grammar.definition",
    )
