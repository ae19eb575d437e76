"""The body of a Responses request as that of a chat, which parses, checks and renders it. Pure.

What both APIs call the same goes on as it is, and is checked there. Errors of a chat are brought back by
`RENAMED`, so that they name the fields of this request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tandem_worker.server.dialects.fields import Fields, check_array, refuse, write_json
from tandem_worker.server.dialects.openai.messages import MAX_MESSAGES, join_parts
from tandem_worker.server.dialects.openai.options import API_DEFAULTS, STORE_ADVICE, SamplingDefaults
from tandem_worker.server.dialects.openai.other_servers import refuse_other_servers
from tandem_worker.server.dialects.renaming import EXTENSIONS, Places, Renaming

_SAME = (
    "model", "stream", "temperature", "top_p", "metadata", "user", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "session_id", "service_tier", "store", "parallel_tool_calls",
    "structured_outputs", "spaces_between_special_tokens",
    *EXTENSIONS, "stop", "top_k", "include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens",
    "allowed_token_ids",
)  # fmt: skip
_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
"""The second changes nothing: reasoning is sent as text, and read again as text."""
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_MEDIA_PARTS = {"input_image": "images", "input_file": "files", "input_audio": "audio"}
RENAMED: Renaming = (
    (re.compile(r"^messages"), "input"),
    (re.compile(r"^max_completion_tokens$|^max_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format(\.json_schema|\.grammar)?"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"^tool_choice\.allowed_tools"), "tool_choice"),
    (re.compile(r"^(tool_choice(?:\.tools\[\d+\])?)\.function"), r"\1"),
)
MAX_ECHO_BYTES = 2 * 1024 * 1024
"""Bytes of what an answer repeats of its request, as JSON: three events of a stream have it."""


def translate(body: object, sampling: SamplingDefaults = API_DEFAULTS) -> tuple[dict[str, Any], bytes, Places]:
    """The body of the chat, an object in JSON with the fields that answers repeat, `sampling` where the request leaves
    them out, and where the messages of the chat come from. Raises RequestError."""
    fields = Fields(body)
    chat = {key: value for key in _SAME if (value := fields.take(key)) is not None}
    instructions = fields.string("instructions")
    messages, places = _messages(fields)
    if instructions is not None:
        messages.insert(0, {"role": "system", "content": instructions})
        places.insert(0, "instructions")
    chat["messages"] = messages
    text = _take_text(fields, chat)
    effort = _take_reasoning(fields, chat)
    tools, choice = fields.array("tools") or [], fields.take("tool_choice")
    if tools:
        chat["tools"] = [_tool(tool) for tool in tools]
    if choice is not None:
        chat["tool_choice"] = _tool_choice(choice)
    max_tokens = fields.integer("max_output_tokens", minimum=1)
    if max_tokens is not None:
        chat["max_completion_tokens"] = max_tokens
    top_logprobs = _take_logprobs(fields, chat)
    _refuse_unsupported(fields)
    fields.finish()
    temperature, top_p = chat.get("temperature"), chat.get("top_p")
    echo: dict[str, Any] = {
        "background": False,
        "instructions": instructions,
        "max_output_tokens": max_tokens,
        "max_tool_calls": None,
        "metadata": chat.get("metadata", {}),
        "parallel_tool_calls": chat.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "prompt_cache_key": chat.get("prompt_cache_key"),
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": chat.get("safety_identifier"),
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature if temperature is None else temperature,
        "text": text,
        "tool_choice": "auto" if choice is None else choice,
        "tools": [{"parameters": None, "strict": False, "description": None} | dict(tool) for tool in tools
                  if isinstance(tool, dict)],
        "top_logprobs": top_logprobs,
        "top_p": sampling.top_p if top_p is None else top_p,
        "truncation": "disabled",
        "user": chat.get("user"),
    }  # fmt: skip
    return chat, _write(echo), {f"messages[{index}]": place for index, place in enumerate(places)}


def _write(echo: Mapping[str, Any]) -> bytes:
    """Raises RequestError naming the largest field."""
    written = {key: write_json(key, value) for key, value in echo.items()}
    size = sum(map(len, written.values()))
    if size > MAX_ECHO_BYTES:
        largest = max(written, key=lambda key: len(written[key]))
        refuse(
            largest,
            f"What a response repeats of its request ('{largest}' above all) has {size} bytes; "
            f"at most {MAX_ECHO_BYTES} are supported.",
            "string_above_max_length",
        )
    return orjson.dumps({key: orjson.Fragment(value) for key, value in written.items()})


def _refuse_unsupported(fields: Fields) -> None:
    fields.unsupported(
        "previous_response_id",
        f"Responses are not stored: send the whole conversation in 'input', with its answers. {STORE_ADVICE}",
    )
    fields.unsupported("conversation", "Conversations are not stored: send the whole conversation in 'input'.")
    fields.unsupported(
        "background", "Nothing runs in the background here: leave 'background' out or false.", harmless=[False]
    )
    fields.unsupported("prompt", "Prompts are not stored: write it into 'instructions' and 'input'.")
    fields.unsupported("max_tool_calls", "Tools are called by the client: remove 'max_tool_calls'.")
    fields.unsupported(
        "truncation",
        "'truncation' cannot be chosen: leave it out or 'disabled', and shorten 'input'.",
        harmless=["disabled"],
    )
    options = fields.object("stream_options")
    if options is not None:
        options.boolean("include_obfuscation")
        options.unsupported("include_usage", "A stream of responses always tells its usage.", harmless=[True])
        options.finish()
    refuse_other_servers(fields)


def _take_logprobs(fields: Fields, chat: dict[str, Any]) -> int:
    include = fields.array("include") or []
    for index, item in enumerate(include):
        if item not in _INCLUDABLE:
            listed = " and ".join(f"'{each}'" for each in _INCLUDABLE)
            refuse(f"include[{index}]", f"Only {listed} can be included.", "invalid_value")
    top = fields.integer("top_logprobs", minimum=0, maximum=20) or 0
    if top or _LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": top}
    return top


def _take_text(fields: Fields, chat: dict[str, Any]) -> dict[str, Any]:
    """What answers repeat of it."""
    text = fields.object("text")
    if text is None:
        return {"format": {"type": "text"}}
    verbosity, form = text.take("verbosity"), text.raw_object("format")
    text.finish()
    if verbosity is not None:
        chat["verbosity"] = verbosity
    if form is not None:
        kind = form.get("type")
        rest = {key: value for key, value in form.items() if key != "type"}
        nested = kind in ("json_schema", "grammar")
        chat["response_format"] = {"type": kind, kind: rest} if nested else form
    return {"format": form or {"type": "text"}} | ({} if verbosity is None else {"verbosity": verbosity})


def _take_reasoning(fields: Fields, chat: dict[str, Any]) -> str | None:
    reasoning = fields.object("reasoning")
    if reasoning is None:
        return None
    effort = reasoning.string("effort")
    for key in ("summary", "generate_summary"):
        reasoning.unsupported(
            key, f"Reasoning is sent as it is, without a summary: leave 'reasoning.{key}' out or 'auto'.",
            harmless=["auto"],
        )  # fmt: skip
    reasoning.finish()
    if effort is not None:
        chat["reasoning_effort"] = effort
    return effort


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case {"type": "function", **rest}:
            return {"type": "function", "function": rest}
        case {"type": "allowed_tools", **rest}:
            tools = rest.get("tools")
            listed = [_tool(tool) for tool in tools] if isinstance(tools, list) else tools
            return {"type": "allowed_tools", "allowed_tools": {**rest, "tools": listed}}
        case _:
            return choice


# -- input -------------------------------------------------------------------------------------------------------------


def _messages(fields: Fields) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages, and the items that they come from."""
    value = fields.required("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}], ["input"]
    check_array(value, "input", MAX_MESSAGES, expected="a string or an array of items")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for index, item in enumerate(value):
        # Clients send back what they received, with members that their library knows and left empty.
        given = {key: each for key, each in item.items() if each is not None} if isinstance(item, dict) else item
        _add_item(messages, Fields(given, f"input[{index}]"))
        if len(messages) > len(places):
            places.append(f"input[{index}]")
    return messages, places


def _add_item(messages: list[dict[str, Any]], item: Fields) -> None:
    kind = item.string("type") or "message"
    for key in ("id", "status", "phase"):
        item.string(key)
    match kind:
        case "message":
            _add_message(messages, item)
        case "function_call":
            name = item.required_string("name", allow_empty=False)
            function = {"name": name, "arguments": item.required_string("arguments")}
            call_id = item.required_string("call_id", allow_empty=False)
            call = {"id": call_id, "type": "function", "function": function}
            _last_answer(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            call_id = item.required_string("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(item, "output")})
        case "reasoning":
            item.take("encrypted_content")
            item.take("summary")
            messages.append({"role": "assistant", "content": "", "reasoning_content": _content(item, "content")})
        case _:
            refuse(
                item.name("type"),
                f"Items of type '{kind}' are not supported. Supported: 'message', 'function_call', "
                "'function_call_output', 'reasoning'.",
                "invalid_value",
            )
    item.finish()


def _add_message(messages: list[dict[str, Any]], item: Fields) -> None:
    role = item.required_string("role")
    if role not in ("user", "system", "developer", "assistant"):
        sentence = f"Invalid role '{role}'. Supported: 'user', 'assistant', 'system', 'developer'."
        refuse(item.name("role"), sentence, "invalid_value")
    content = _content(item, "content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not (last["content"] or "tool_calls" in last):
        last["content"] = content  # what was said after that reasoning
    else:
        messages.append({"role": role, "content": content})


def _last_answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a call belongs to: an answer's text and its calls are items of their own here."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _content(item: Fields, key: str) -> str:
    return join_parts(item.take(key), item.name(key), _part)


def _part(part: Fields) -> str:
    kind = part.required_string("type")
    if kind in _MEDIA_PARTS:
        sentence = f"This model reads text only: {_MEDIA_PARTS[kind]} ('{kind}' content parts) are not supported."
        refuse(part.path, sentence, "unsupported_content")
    if kind == "refusal":
        text = part.required_string("refusal")
    elif kind in _TEXT_PARTS:
        text = part.required_string("text")
    else:
        refuse(part.name("type"), f"Invalid content part type '{kind}'. Supported: 'input_text'.", "invalid_value")
    for key in ("annotations", "logprobs"):
        part.take(key)
    part.finish()
    return text
