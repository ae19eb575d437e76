"""Answers and errors of the Messages API. Pure.

An answer has blocks in the order in which the model writes them: thinking, text, and one for each call. A stream
tells each block's beginning, its pieces and its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from tandem_worker.server.dialects.contract import AnswerHead
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.output import ToolDelta, Update, Usage, split_tools
from tandem_worker.server.wire.pacing import Steps

BlockKind = Literal["text", "thinking", "tool_use"]
_ERRORS = {"server_error": "api_error"}
"""Kinds of errors that have another name there."""


def to_error(body: Mapping[str, Any]) -> dict[str, Any]:
    """An error as this API writes it; what OpenAI's has besides stays in it."""
    error = body["error"]
    return {"type": "error", "error": {**error, "type": _ERRORS.get(error["type"], error["type"])}}


class MessagesEncoder:
    """Writes one answer; its blocks come in order, so there is a state."""

    done = b""
    """The last event says by itself that it is the last."""
    has_state = True
    repeated_logprobs = ()

    def __init__(self, head: AnswerHead, table: TokenTable) -> None:
        self.head = head
        self._index = -1
        self._kind: BlockKind | None = None
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}

    # -- streams -------------------------------------------------------------------------------------------------------

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Steps[bytes]:
        """What of the prompt was cached is told at the end, with the usage."""
        yield from ()  # never long
        usage = _usage(Usage(prompt_tokens=len(prompt_token_ids), cached_tokens=0, completion_tokens=0,
                             reasoning_tokens=0))  # fmt: skip
        return _event("message_start", {"message": {**self._message([]), "usage": usage}})

    def update(self, index: int, update: Update) -> bytes:
        events: list[bytes] = []
        going_on, tools = split_tools(update.tools)
        events += [self._arguments(tool) for tool in going_on if tool.arguments]
        if update.reasoning:
            events += [self._enter("thinking"), self._delta("thinking_delta", "thinking", update.reasoning)]
        if update.content:
            events += [self._enter("text"), self._delta("text_delta", "text", update.content)]
        for tool in tools:
            if tool.name is not None:
                events += [self._close(), self._begin("tool_use", tool)]
            if tool.arguments:
                events.append(self._arguments(tool))
        if update.finish is not None:
            self._stop = _stop(update)
            events.append(self._close())
        return b"".join(events)

    def long_update(self, index: int, update: Update) -> Steps[bytes]:
        yield from ()  # there are no logprobs
        return self.update(index, update)

    def tell_usage(self, usage: Usage) -> None:
        """There is no such option."""

    def usage(self, usage: Usage) -> bytes:
        """The last two events."""
        return _event("message_delta", {"delta": self._stop, "usage": _usage(usage)}) + _event("message_stop", {})

    def failure(self, body: Mapping[str, Any]) -> bytes:
        return b"event: error\ndata: %b\n\n" % orjson.dumps(to_error(body))

    # -- whole answers -------------------------------------------------------------------------------------------------

    def response(self, choices: Sequence[Update], prompts: Sequence[Sequence[int]], usage: Usage) -> Steps[list[bytes]]:
        yield from ()
        (update,) = choices
        content: list[dict[str, Any]] = []
        if update.reasoning:
            content.append({"type": "thinking", "thinking": update.reasoning, "signature": ""})
        if update.content:
            content.append({"type": "text", "text": update.content})
        content += _calls(update.tools)
        return [orjson.dumps({**self._message(content), **_stop(update), "usage": _usage(usage)})]

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.head.id,
            "type": "message",
            "role": "assistant",
            "model": self.head.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _enter(self, kind: BlockKind) -> bytes:
        return b"" if self._kind == kind else self._close() + self._begin(kind, None)

    def _begin(self, kind: BlockKind, tool: ToolDelta | None) -> bytes:
        self._index += 1
        self._kind = kind
        block: dict[str, Any] = {"type": kind}
        match kind:
            case "text":
                block["text"] = ""
            case "thinking":
                block |= {"thinking": "", "signature": ""}
            case "tool_use":
                assert tool is not None
                block |= {"id": tool.id, "name": tool.name, "input": {}}
        return _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": {"type": kind, key: text}})

    def _arguments(self, tool: ToolDelta) -> bytes:
        return self._delta("input_json_delta", "partial_json", tool.arguments)

    def _close(self) -> bytes:
        if self._kind is None:
            return b""
        self._kind = None
        return _event("content_block_stop", {"index": self._index})


def _event(kind: str, fields: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _stop(update: Update) -> dict[str, Any]:
    if isinstance(update.stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": update.stopped_by}
    reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[update.finish or "stop"], "stop_sequence": None}


def _calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    calls: list[tuple[ToolDelta, list[str]]] = []
    for delta in deltas:
        if delta.name is not None:
            calls.append((delta, []))
        calls[-1][1].append(delta.arguments)
    return [
        {"type": "tool_use", "id": tool.id, "name": tool.name, "input": _read("".join(parts))} for tool, parts in calls
    ]


def _read(arguments: str) -> Any:
    """An object. A call that was cut off has none yet, and then is told by its stop reason."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> dict[str, int]:
    """Cached tokens are not among the input's."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
