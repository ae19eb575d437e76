"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from tandem_worker.engine.errors import RequestError
from tandem_worker.server.dialects.fields import Fields, refuse
from tandem_worker.server.tools.contract import Tool, ToolOptions

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class _Choice:
    """`tool_choice`; `names` are None where all functions may be called."""

    mode: Literal["none", "auto", "required"]
    names: tuple[str, ...] | None = None
    single: bool = False


def parse_tools(fields: Fields) -> ToolOptions:
    """Take the tool fields. Raises RequestError."""
    fields.unsupported("functions", "'functions' is deprecated and not supported: use 'tools'.")
    fields.unsupported("function_call", "'function_call' is deprecated and not supported: use 'tool_choice'.")
    tools = _tools(fields)
    given_choice = fields.given("tool_choice")
    choice = _choice(fields)
    parallel = fields.boolean("parallel_tool_calls", default=True)
    if not tools:
        if given_choice and (choice.mode == "required" or choice.names is not None):
            if fields.ignored is None:
                refuse("tool_choice", "'tool_choice' is only allowed when 'tools' are given.")
            fields.ignored.append("tool_choice")
        return ToolOptions()
    for name in choice.names or ():
        if all(tool.name != name for tool in tools):
            refuse(
                "tool_choice",
                f"'tool_choice' names the function '{name}', which is not among 'tools'.",
                "invalid_value",
            )
    if choice.mode == "none":
        return ToolOptions()
    allowed = tuple(tool for tool in tools if choice.names is None or tool.name in choice.names)
    # A named function is called once: the client asked for this call, not for a list.
    return ToolOptions(mode=choice.mode, tools=tools, callable_tools=allowed, parallel=parallel and not choice.single)


def _tools(fields: Fields) -> tuple[Tool, ...]:
    raw = fields.array("tools") or []
    if len(raw) > MAX_TOOLS:
        refuse("tools", f"At most {MAX_TOOLS} tools are supported, but there are {len(raw)}.", "array_above_max_length")
    tools = tuple(_tool(item, f"tools[{index}]") for index, item in enumerate(raw))
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.name in seen:
            refuse(f"tools[{index}].function.name", f"Two tools have the name '{tool.name}'.", "invalid_value")
        seen.add(tool.name)
    return tools


def _tool(raw: Any, path: str) -> Tool:
    fields = Fields(raw, path)
    kind = fields.required_string("type")
    if kind != "function":
        refuse(f"{path}.type", f"Tools of type '{kind}' are not supported; 'function' is.", "invalid_value")
    function = Fields(fields.required("function"), f"{path}.function")
    name = function.required_string("name")
    if not _NAME.fullmatch(name):
        refuse(
            f"{path}.function.name",
            f"Invalid function name '{name[:80]}': 1 to 64 letters, digits, underscores, dots or dashes.",
            "invalid_value",
        )
    function.string("description")
    parameters = function.raw_object("parameters")
    strict = function.boolean("strict")
    function.finish()
    fields.finish()
    # A function without parameters takes none, as OpenAI documents it.
    schema = (
        parameters if parameters is not None else {"type": "object", "properties": {}, "additionalProperties": False}
    )
    return Tool(name=name, parameters=schema, strict=strict, definition=raw)


def _choice(fields: Fields) -> _Choice:
    value = fields.take("tool_choice")
    match value:
        case None:
            return _Choice("auto")
        case "none" | "auto" | "required":
            return _Choice(value)
        case dict():
            return _chosen(Fields(value, "tool_choice"))
        case _:
            raise RequestError(
                "Invalid 'tool_choice'. Supported: 'none', 'auto', 'required', or an object that names functions.",
                param="tool_choice",
                code="invalid_value",
            )


def _chosen(fields: Fields) -> _Choice:
    kind = fields.required_string("type")
    if kind == "function":
        return _Choice("required", (_function_name(fields),), single=True)
    if kind != "allowed_tools":
        refuse(
            "tool_choice.type",
            f"'tool_choice' of type '{kind}' is not supported; 'function' and 'allowed_tools' are.",
            "invalid_value",
        )
    given = Fields(fields.required("allowed_tools"), "tool_choice.allowed_tools")
    fields.finish()
    mode = given.choice("mode", ("auto", "required"))
    listed = given.array("tools")
    given.finish()
    if mode is None or not listed:
        refuse("tool_choice.allowed_tools", "'allowed_tools' needs a 'mode' and at least one of 'tools'.")
    names: list[str] = []
    for index, item in enumerate(listed):
        tool = Fields(item, f"tool_choice.allowed_tools.tools[{index}]")
        if tool.required_string("type") != "function":
            refuse(tool.name("type"), "Only tools of type 'function' can be allowed.", "invalid_value")
        names.append(_function_name(tool))
    return _Choice("required" if mode == "required" else "auto", tuple(names))


def _function_name(fields: Fields) -> str:
    function = Fields(fields.required("function"), fields.name("function"))
    name = function.required_string("name")
    function.finish()
    fields.finish()
    return name
