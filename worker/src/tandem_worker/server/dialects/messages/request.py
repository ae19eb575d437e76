"""The body of a Messages request as that of a chat, which parses, checks and renders it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tandem_api.messages import drop_billing_line

from tandem_worker.server.dialects.fields import Fields, check_array, refuse, write_json, wrong_type
from tandem_worker.server.dialects.openai.messages import MAX_MESSAGES
from tandem_worker.server.dialects.renaming import EXTENSIONS, Places, Renaming

_SAME = ("model", "stream", "temperature", "top_p", "top_k", *EXTENSIONS)
_MEDIA = {"image": "images", "document": "documents", "file": "files"}
RENAMED: Renaming = (
    (re.compile(r"^max_completion_tokens$"), "max_tokens"),
    (re.compile(r"^stop(?=$|\[)"), "stop_sequences"),
    (re.compile(r"^user$"), "metadata.user_id"),
    (re.compile(r"^response_format(\.json_schema)?"), "output_config.format"),
    (re.compile(r"^parallel_tool_calls$"), "tool_choice.disable_parallel_tool_use"),
    (re.compile(r"^(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
)


def translate(
    body: object, *, counting: bool = False, lenient: bool = False
) -> tuple[dict[str, Any], list[str], Places]:
    """The body of the chat, fields that were left out of account, and where parts of the chat come from. Raises
    RequestError.

    `counting`: no answer is asked for, so its length need not be given.
    """
    fields = Fields(body, lenient=lenient)
    chat = {key: value for key in _SAME if (value := fields.take(key)) is not None}
    system = _blocks(fields, "system", drop_billing_line)
    messages, origins = _messages(fields)
    if system:
        messages.insert(0, {"role": "system", "content": system})
        origins.insert(0, "system")
    chat["messages"] = messages
    places = {f"messages[{index}]": origin for index, origin in enumerate(origins)}
    max_tokens = fields.integer("max_tokens", minimum=1)
    if max_tokens is not None:
        chat["max_completion_tokens"] = max_tokens
    elif not counting:
        refuse("max_tokens", "Missing required parameter: 'max_tokens'.", "missing_required_parameter")
    stops = fields.array("stop_sequences")
    if stops:
        chat["stop"] = stops
    tools = fields.array("tools") or []
    if tools:
        chat["tools"] = [_tool(Fields(tool, f"tools[{index}]")) for index, tool in enumerate(tools)]
    _take_choice(fields, chat)
    _take_format(fields, chat, places)
    _take_thinking(fields, chat, places)  # who wants no reasoning gets none, whatever its effort
    metadata = fields.object("metadata")
    if metadata is not None:
        user = metadata.string("user_id")
        metadata.finish()
        if user is not None:
            chat["user"] = user
    fields.choice("service_tier", ("auto", "standard_only"))
    fields.take("cache_control")  # prefixes are cached by themselves
    for key in ("container", "mcp_servers", "context_management"):
        fields.unsupported(key, f"'{key}' is not supported: remove it.", harmless=[[]])
    fields.finish()
    return chat, fields.ignored or [], places


def _take_choice(fields: Fields, chat: dict[str, Any]) -> None:
    choice = fields.object("tool_choice")
    if choice is None:
        return
    kind = choice.required_choice("type", ("auto", "any", "tool", "none"))
    if choice.boolean("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.required_string("name")}}
    else:
        chat["tool_choice"] = "required" if kind == "any" else kind
    choice.finish()


def _take_thinking(fields: Fields, chat: dict[str, Any], places: dict[str, str]) -> None:
    thinking = fields.raw_object("thinking") or {}
    match thinking.get("type"):
        case None | "adaptive":
            return
        case "disabled":
            chat["reasoning_effort"] = "none"
            places["reasoning_effort"] = "thinking"
        case "enabled" if fields.ignored is not None:
            fields.ignored.append("thinking")
        case "enabled":
            refuse(
                "thinking",
                "Reasoning cannot be bounded by a budget: leave 'thinking' out, or give type 'adaptive'.",
                "unsupported_parameter",
            )
        case _:
            refuse("thinking.type", "Invalid 'thinking.type'. Supported: 'adaptive', 'disabled'.", "invalid_value")


def _take_format(fields: Fields, chat: dict[str, Any], places: dict[str, str]) -> None:
    config = fields.object("output_config")
    if config is None:
        return
    form = config.object("format")
    effort = config.string("effort")
    config.finish()
    if effort is not None:
        chat["reasoning_effort"] = effort
        places["reasoning_effort"] = "output_config.effort"
    if form is not None:
        form.required_choice("type", ("json_schema",))
        schema = form.raw_object("schema")
        form.finish()
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _tool(tool: Fields) -> dict[str, Any]:
    kind = tool.string("type") or "custom"
    if kind != "custom":
        refuse(tool.name("type"), f"Tools of type '{kind}' are not supported; 'custom' is.", "invalid_value")
    function: dict[str, Any] = {"name": tool.required("name"), "parameters": tool.required("input_schema")}
    for key in ("description", "strict"):
        value = tool.take(key)
        if value is not None:
            function[key] = value
    tool.take("cache_control")
    tool.finish()
    return {"type": "function", "function": function}


# -- messages ----------------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages of the chat, and the message of the request that each comes from."""
    value = check_array(fields.required("messages"), "messages", MAX_MESSAGES, "messages")
    messages: list[dict[str, Any]] = []
    origins: list[str] = []
    for index, item in enumerate(value):
        message = Fields(item, f"messages[{index}]")
        role = message.required_string("role")
        if role == "user":
            _add_question(messages, message)
        elif role == "assistant":
            messages.append(_answer(message))
        elif role == "system":  # instructions between two turns, as coding agents send them
            if not message.given("content"):
                message.required("content")
            messages.append({"role": "system", "content": _blocks(message, "content")})
        else:
            sentence = f"Invalid role '{role}'. Supported: 'user', 'assistant', 'system'."
            refuse(message.name("role"), sentence, "invalid_value")
        message.finish()
        origins += [message.path] * (len(messages) - len(origins))
    return messages, origins


def _add_question(messages: list[dict[str, Any]], message: Fields) -> None:
    """Results of tools are messages of their own in a chat."""
    content = message.required("content")
    if isinstance(content, str):
        messages.append({"role": "user", "content": content})
        return
    texts: list[str] = []
    for block in _each(content, message.name("content")):
        kind = block.required_string("type")
        if kind == "tool_result":
            call_id = block.required_string("tool_use_id")
            block.boolean("is_error")  # the content says what went wrong
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _blocks(block, "content")})
            block.take("cache_control")
            block.finish()
        else:
            texts.append(_text(block, kind))
    if texts:
        messages.append({"role": "user", "content": "".join(texts)})


def _answer(message: Fields) -> dict[str, Any]:
    content = message.required("content")
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    answer: dict[str, Any] = {"role": "assistant"}
    for block in _each(content, message.name("content")):
        kind = block.required_string("type")
        match kind:
            case "tool_use":
                name = block.required_string("name", allow_empty=False)
                arguments = write_json(block.name("input"), block.raw_object("input") or {})
                function = {"name": name, "arguments": arguments.decode()}
                call_id = block.required_string("id", allow_empty=False)
                call = {"id": call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
                for key in ("cache_control", "caller"):
                    block.take(key)
                block.finish()
            case "thinking":
                answer["reasoning_content"] = answer.get("reasoning_content", "") + block.required_string("thinking")
                block.take("signature")
                block.finish()
            case "redacted_thinking":
                pass  # of another model, and not to be read
            case _:
                texts.append(_text(block, kind))
    return {**answer, "content": "".join(texts)}


def _blocks(fields: Fields, key: str, read: Callable[[str], str] = str) -> str:
    """A string, or the joined texts of blocks, each as `read` has it; empty when absent."""
    value = fields.take(key)
    if value is None or isinstance(value, str):
        return read(value or "")
    return "".join(read(_text(block, block.required_string("type"))) for block in _each(value, fields.name(key)))


def _each(value: Any, path: str) -> list[Fields]:
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content blocks", value)
    return [Fields(block, f"{path}[{index}]") for index, block in enumerate(value)]


def _text(block: Fields, kind: str) -> str:
    if kind in _MEDIA:
        sentence = f"This model reads text only: {_MEDIA[kind]} ('{kind}' content blocks) are not supported."
        refuse(block.path, sentence, "unsupported_content")
    if kind != "text":
        refuse(block.name("type"), f"Invalid content block type '{kind}' here.", "invalid_value")
    text = block.required_string("text")
    for key in ("cache_control", "citations"):
        block.take(key)
    block.finish()
    return text
