"""The `messages` of a chat request: checked, and brought into the form that chat templates read. Pure.

Content parts become one string (templates of text models know strings), `developer` becomes `system` (templates know
no other name for it), and tool messages learn the name of the function they answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.fields import Fields, check_array, refuse, wrong_type

MAX_MESSAGES = 4096

_REFUSED_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "input_audio": "audio",
    "file": "files",
    "video_url": "video",
}


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """Take `messages`. Each result has `role` and `content` (a string), assistants' maybe `tool_calls`.

    `tool_calls[i].function.arguments` stay the JSON text that the client sent. Raises RequestError.
    """
    raw = check_array(fields.required("messages"), "messages", MAX_MESSAGES, "messages")
    messages: list[dict[str, Any]] = []
    function_names: dict[str, str] = {}
    for index, item in enumerate(raw):
        message = _parse_message(Fields(item, f"messages[{index}]"), function_names)
        for call in message.get("tool_calls", ()):
            function_names[call["id"]] = call["function"]["name"]
        messages.append(message)
    return messages


def _parse_message(fields: Fields, function_names: dict[str, str]) -> dict[str, Any]:
    role = fields.required_string("role")
    match role:
        case "system" | "developer" | "user":
            message = {"role": "system" if role == "developer" else role, "content": _content(fields, required=True)}
        case "assistant":
            message = _assistant(fields)
        case "tool":
            call_id = fields.required_string("tool_call_id")
            message = {"role": "tool", "content": _content(fields, required=True), "tool_call_id": call_id}
            if call_id in function_names:
                message["name"] = function_names[call_id]
        case "function":
            refuse(
                fields.name("role"),
                "Role 'function' is deprecated and not supported: use role 'tool'.",
                "invalid_value",
            )
        case _:
            refuse(
                fields.name("role"),
                f"Invalid role '{role}'. Supported: 'system', 'developer', 'user', 'assistant', 'tool'.",
                "invalid_value",
            )
    name = fields.string("name", max_length=256)
    if name is not None:
        message["name"] = name
    fields.finish()
    return message


def _assistant(fields: Fields) -> dict[str, Any]:
    calls = fields.array("tool_calls")
    message: dict[str, Any] = {"role": "assistant"}
    refusal = fields.string("refusal")
    message["content"] = _content(fields, required=not calls and refusal is None) or refusal or ""
    reasoning = fields.string("reasoning_content")
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        path = fields.name("tool_calls")
        message["tool_calls"] = [_tool_call(Fields(call, f"{path}[{index}]")) for index, call in enumerate(calls)]
    # Clients send back the message that they received, with its empty members.
    fields.unsupported("annotations", "'annotations' are not supported in messages.", harmless=[[]])
    fields.unsupported("audio", "This model does not take audio: remove 'audio' from the message.")
    fields.unsupported("function_call", "'function_call' is deprecated and not supported: use 'tool_calls'.")
    return message


def _tool_call(fields: Fields) -> dict[str, Any]:
    call_id = fields.required_string("id", allow_empty=False)
    kind = fields.string("type") or "function"
    if kind != "function":
        refuse(fields.name("type"), f"Tool calls of type '{kind}' are not supported; 'function' is.", "invalid_value")
    fields.integer("index", minimum=0)  # present in calls that were put together from a stream
    function = Fields(fields.required("function"), fields.name("function"))
    result = {
        "name": function.required_string("name", allow_empty=False),
        "arguments": function.required_string("arguments"),
    }
    function.finish()
    fields.finish()
    return {"id": call_id, "type": "function", "function": result}


def _content(fields: Fields, *, required: bool) -> str:
    value = fields.required("content") if required else fields.take("content")
    return join_parts(value, fields.name("content"), _part)


def parse_prediction(fields: Fields) -> str:
    """Take `prediction`: the text that the client expects, empty where it says nothing. Raises RequestError."""
    prediction = fields.object("prediction")
    if prediction is None:
        return ""
    prediction.required_choice("type", ("content",))
    text = _content(prediction, required=True)
    prediction.finish()
    return text


def join_parts(value: Any, path: str, read: Callable[[Fields], str]) -> str:
    """A message's content: a string, or what `read` makes of each of its parts; empty where there is none.

    Raises RequestError, which names the part by `path`.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong_type(path, "a string or an array of content parts", value)
    return "".join(read(Fields(part, f"{path}[{index}]")) for index, part in enumerate(value))


def _part(fields: Fields) -> str:
    kind = fields.required_string("type")
    if kind in _REFUSED_PARTS:
        raise RequestError(
            f"This model reads text only: {_REFUSED_PARTS[kind]} ('{kind}' content parts) are not supported.",
            param=fields.path,
            code="unsupported_content",
        )
    if kind == "refusal":
        text = fields.required_string("refusal")
    elif kind == "text":
        text = fields.required_string("text")
    else:
        refuse(fields.name("type"), f"Invalid content part type '{kind}'. Supported: 'text'.", "invalid_value")
    fields.finish()
    return text
