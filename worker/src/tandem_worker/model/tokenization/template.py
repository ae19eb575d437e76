"""Conversations to prompts, by the chat template that a model or a request brings: programs in Jinja.

They run in Jinja's sandbox, with the names, filters and white space that transformers gives them, which is what
they are written for. What they see are values of JSON and nothing else; the sandbox lets them change none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""Written behind a message that is to be continued: where it comes out, the prompt ends. It ends in a space because
templates that trim messages take that away, which tells that they do."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""A message's reasoning goes by several names; templates read the first, or the second."""
_NUM_TEMPLATES = 128
"""So many are kept compiled."""


def choose_template(source: str | Mapping[str, str] | None, given: str | None, *, tools: bool) -> str:
    """The template to render with: what a request gave, which may be a name, or the model's own.

    Raises ValueError where there is none.
    """
    if isinstance(source, Mapping):
        if given is not None:
            return source.get(given, given)
        found = (source.get("tool_use") if tools else None) or source.get("default")
        if found is None:
            names = ", ".join(sorted(source))
            raise ValueError(f"the model has several chat templates ({names}) and none of them is the default")
        return found
    if given is None and source is None:
        raise ValueError("the model has no chat template")
    return source or "" if given is None else given


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **variables: Any,
) -> str:
    """The prompt for `messages`: values of JSON, as is everything else here. `variables`: by the names that the
    template knows, special tokens among them.

    Raises ValueError for a conversation that cannot be rendered, jinja2's errors and any other that the template's
    program ends in.
    """
    if not messages:
        raise ValueError("the conversation is empty: it needs one message at least")
    if continue_final_message and add_generation_prompt:
        raise ValueError("a final message that is continued has no prompt for a new one behind it")
    compiled = _compile(template)
    chat = [_with_reasoning({key: value for key, value in item.items() if value is not None}) for item in messages]
    ending = _mark_end(chat, template) if continue_final_message else None
    shown = {"messages": chat, "tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
    text = compiled.render(variables | shown)
    return text if ending is None else _cut_at_mark(text, ending)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in _REASONING if name in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _mark_end(chat: list[dict[str, Any]], template: str) -> str:
    """Marks the end of the last message, in place; returns what stands before the mark. Raises ValueError."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError("the final message has no content to continue")
    if "content" not in template:
        raise ValueError("the chat template prints no content that could be continued")
    if isinstance(content, str):
        chat[-1] = {**chat[-1], "content": content + _MARK}
        return content
    parts = list(content)
    for index in reversed(range(len(parts))):
        if "text" in parts[index]:
            text = str(parts[index]["text"])
            parts[index] = {**parts[index], "text": text + _MARK}
            chat[-1] = {**chat[-1], "content": parts}
            return text
    raise ValueError("the final message has no text to continue")


def _cut_at_mark(text: str, ending: str) -> str:
    mark = _MARK.strip()
    if ending.strip() not in text or mark not in text:
        raise ValueError("the chat template does not print the end of the final message, so it cannot be continued")
    end = text.rindex(mark)
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here it prints what is inside."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_print"), [], [], body).set_lineno(line)

    def _print(self, caller: Macro) -> str:
        return caller()


class _Dictionary:
    """`dict` without the type's other attributes."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any) -> dict[Any, Any]:
        return dict.fromkeys(*values)


class _Namespace(Namespace):
    """Refuses names with an underscore in front, which the interpreter's own are among."""

    def __init__(*args: Any, **named: Any) -> None:  # a name may be `self`
        self, *values = args
        attributes = dict(*values, **named)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace holds no attribute with an underscore in front, as in {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter writes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=_NUM_TEMPLATES)
def _compile(source: str) -> jinja2.Template:
    # One environment each: what a template does to its own is no other's.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dictionary(),
        "namespace": _Namespace,
    }
    return environment.from_string(source)
