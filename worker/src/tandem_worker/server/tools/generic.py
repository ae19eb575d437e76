"""Tools without a place for them in the chat template: they are described in the system message. Pure.

A grammar makes calls that are required. Whether a model that was never taught this form calls by itself, and well, only
the model knows, so it is asked to where `spec.engine.tools` says so. Calls and results of the conversation so far
become text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tandem_worker.server.tools.contract import Tool

_FORM = '{"name": "NAME", "parameters": {...}}'


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], *, required: bool = True
) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, which it gets if it has none.

    `required`: the answer will be a call; else the model is told that it may also answer with text.
    """
    functions = "\n".join(json.dumps(tool.definition["function"], ensure_ascii=False) for tool in tools)
    how = f"Answer with a call and nothing else, as {_FORM}"
    if not required:
        how = (
            f"To call one, answer with the call and nothing else, as {_FORM}. When no call is needed, answer in words."
        )
    text = f"You can call these functions:\n{functions}\n{how}"
    first, rest = (messages[0], messages[1:]) if messages[0]["role"] == "system" else (None, messages)
    said = "" if first is None else f"{first['content']}\n\n"
    return [{"role": "system", "content": said + text}, *map(dict, rest)]


def write_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with calls and their results as text. What follows a result from the user is one message."""
    written: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message["role"] == "tool":
            result = {
                "role": "user",
                "content": f"{message.get('name', 'The function')} returned: {message['content']}",
            }
            _add(written, result, join=after_result)
            after_result = True
            continue
        plain = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = [_write(call["function"]) for call in message.get("tool_calls", ())]
        if calls:
            plain["content"] = "\n".join([*filter(None, [message["content"]]), *calls])
        _add(written, plain, join=after_result and message["role"] == "user")
        after_result = False
    return written


def _add(written: list[dict[str, Any]], message: dict[str, Any], *, join: bool) -> None:
    """Many templates refuse two messages of a user after one another."""
    if join:
        written[-1]["content"] += f"\n{message['content']}"
    else:
        written.append(message)


def _write(function: Mapping[str, str]) -> str:
    return f'{{"name": {json.dumps(function["name"])}, "parameters": {function["arguments"] or "{}"}}}'
