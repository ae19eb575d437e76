"""Answers of the Responses API: items, and the events in which they are written. Pure.

Of an answer there may be one item of reasoning, messages, and one item for each call, in the order in which the model
writes them. A stream tells each item's beginning, its pieces and its end, and repeats what has come together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import orjson

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.server.dialects.contract import AnswerHead
from tandem_worker.server.dialects.openai.chunks import token_names
from tandem_worker.server.dialects.openai.logprobs import chat_entries
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.output import ToolDelta, Update, Usage, derive_id, split_tools
from tandem_worker.server.wire.pacing import Steps, complete

MAX_REPEATED_BYTES = 1024 * 1024
"""Bytes of logprobs that a stream repeats. Each takes a kilobyte and more, and four events repeat all there are."""
ItemKind = Literal["message", "reasoning", "function_call"]
_PREFIX: Mapping[ItemKind, str] = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_DELTA: Mapping[ItemKind, str] = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


class _Item:
    """One item of the output while it is written."""

    def __init__(self, answer_id: str, kind: ItemKind, index: int, tool: ToolDelta | None = None) -> None:
        self.kind: ItemKind = kind
        self.id = derive_id(_PREFIX[kind], answer_id, f"item {index}", size=16)
        self.index = index
        self.tool = tool
        self.pieces: list[str] = []
        self.logprobs: list[bytes] = []
        place = {"item_id": self.id, "output_index": index}
        self.place: dict[str, Any] = place if kind == "function_call" else {**place, "content_index": 0}

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def part(self, text: str) -> dict[str, Any]:
        """Its content; calls have none."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        logprobs = orjson.Fragment(b"[%b]" % b",".join(self.logprobs))
        return {"type": "output_text", "annotations": [], "logprobs": logprobs, "text": text}

    def to_json(self, status: str) -> dict[str, Any]:
        begun = status == "in_progress"
        item: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "message":
                return {**item, "role": "assistant", "content": [] if begun else [self.part(self.text)]}
            case "reasoning":
                return {**item, "summary": [], "content": [] if begun else [self.part(self.text)]}
            case "function_call":
                assert self.tool is not None
                return {**item, "call_id": self.tool.id, "name": self.tool.name, "arguments": self.text}


class _Events:
    """What a stream is written in: numbered in order."""

    def __init__(self) -> None:
        self.streams = True
        """Not so: nothing is written, and the answer comes whole."""
        self._sequence = 0

    def write(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        if not self.streams:
            return b""
        data = orjson.dumps({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def tell(self, kind: str, response: bytes) -> bytes:
        """An event of the whole answer."""
        return self.write(f"response.{kind}", {"response": orjson.Fragment(response)})


class _Logprobs:
    """Those that wait for their text, and those that a stream repeats at the end of an item."""

    def __init__(self) -> None:
        self._untold: list[TokenLogprob] = []
        """Logprobs of tokens whose text is still to come."""
        self._repeated_bytes = 0
        self.repeated: Sequence[TokenLogprob] | None = ()

    def take(self, update: Update) -> Sequence[TokenLogprob]:
        """Those of the text of `update`, whose first character may have begun before. Not of reasoning or calls."""
        told, self._untold = [*self._untold, *update.logprobs] if self._untold else update.logprobs, []
        self.repeated = ()
        if update.content:
            self.repeated = None if told and self._repeated_bytes > MAX_REPEATED_BYTES else told
            return told
        if not update.has_text:
            self._untold = list(told)
        return ()

    def keep(self, item: _Item, logprobs: bytes, *, streams: bool) -> None:
        """What is repeated at the end. In a stream all of it or, where it is too much, nothing."""
        self._repeated_bytes += len(logprobs)
        if streams and self._repeated_bytes > MAX_REPEATED_BYTES:
            item.logprobs.clear()
        else:
            item.logprobs.append(logprobs)


class ResponsesEncoder:
    """Writes one answer; its parts come in order, so there is a state."""

    done = b""
    """The last event says by itself that it is the last."""
    has_state = True

    def __init__(self, head: AnswerHead, table: TokenTable, *, echo: bytes) -> None:
        """`echo`: fields of the request that the answer repeats, as a JSON object."""
        self.head = head
        self._names = token_names(head, table)
        self._echo = echo
        self._events = _Events()
        self._open: _Item | None = None
        self._closed: list[dict[str, Any]] = []
        self._finish: str | None = None
        self._logprobs = _Logprobs()

    @property
    def repeated_logprobs(self) -> Sequence[TokenLogprob] | None:
        return self._logprobs.repeated

    # -- streams -------------------------------------------------------------------------------------------------------

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Steps[bytes]:
        yield from ()  # never long
        response = self._response("in_progress", None)
        return self._events.tell("created", response) + self._events.tell("in_progress", response)

    def update(self, index: int, update: Update) -> bytes:
        return complete(self.long_update(index, update))

    def long_update(self, index: int, update: Update) -> Steps[bytes]:
        events: list[bytes] = []
        going_on, tools = split_tools(update.tools)
        events += [self._add(tool.arguments) for tool in going_on if tool.arguments]
        if update.reasoning:
            events += [self._enter("reasoning"), self._add(update.reasoning)]
        told = self._logprobs.take(update)
        if update.content:
            events.append(self._enter("message"))
            logprobs = (yield from chat_entries(self._names, told)) if told else b""
            events.append(self._add(update.content, logprobs))
        for tool in tools:
            if tool.name is not None:
                events += [self._close("completed"), self._begin("function_call", tool)]
            if tool.arguments:
                events.append(self._add(tool.arguments))
        if update.finish is not None:
            self._finish = update.finish
            if self._open is None and not self._closed:
                events.append(self._enter("message"))
            events.append(self._close(self._status))
        return b"".join(events)

    def tell_usage(self, usage: Usage) -> None:
        """There is no such option."""

    def usage(self, usage: Usage) -> bytes:
        """The last event, with the whole answer."""
        return self._events.tell(self._status, self._response(self._status, usage))

    def failure(self, body: Mapping[str, Any]) -> bytes:
        """The last event of an answer that broke off."""
        error = {"code": "server_error", "message": body["error"]["message"]}
        return self._close("incomplete") + self._events.tell("failed", self._response("failed", None, error))

    # -- whole answers -------------------------------------------------------------------------------------------------

    def response(self, choices: Sequence[Update], prompts: Sequence[Sequence[int]], usage: Usage) -> Steps[list[bytes]]:
        self._events.streams = False
        yield from self.long_update(0, choices[0])
        return [self._response(self._status, usage)]

    # -- items -------------------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _enter(self, kind: ItemKind) -> bytes:
        """Events that are due before text of this kind."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close("completed") + self._begin(kind, None)

    def _begin(self, kind: ItemKind, tool: ToolDelta | None) -> bytes:
        item = self._open = _Item(self.head.id, kind, len(self._closed), tool)
        fields = {"output_index": item.index, "item": item.to_json("in_progress")}
        added = self._events.write("response.output_item.added", fields)
        if kind == "function_call":
            return added
        return added + self._events.write("response.content_part.added", {**item.place, "part": item.part("")})

    def _add(self, text: str, logprobs: bytes = b"") -> bytes:
        item = self._open
        assert item is not None
        item.pieces.append(text)
        fields = {**item.place, "delta": text}
        if item.kind == "message":
            if logprobs:
                self._logprobs.keep(item, logprobs, streams=self._events.streams)
            fields["logprobs"] = orjson.Fragment(b"[%b]" % logprobs)
        return self._events.write(f"{_DELTA[item.kind]}.delta", fields)

    def _close(self, status: str) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        part = item.part(item.text)
        if item.kind == "function_call":
            said = {"arguments": item.text}
        else:
            said = {key: part[key] for key in ("text", "logprobs") if key in part}
        events = self._events.write(f"{_DELTA[item.kind]}.done", {**item.place, **said})
        if item.kind != "function_call":
            events += self._events.write("response.content_part.done", {**item.place, "part": part})
        whole = item.to_json(status)
        self._closed.append(whole)
        return events + self._events.write("response.output_item.done", {"output_index": item.index, "item": whole})

    def _response(self, status: str, usage: Usage | None, error: Mapping[str, Any] | None = None) -> bytes:
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response: dict[str, Any] = {
            "id": self.head.id,
            "object": "response",
            "created_at": self.head.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": cut,
            "model": self.head.model,
            "output": self._closed,
            "usage": None if usage is None else _usage(usage),
        }
        return orjson.dumps(response)[:-1] + b"," + self._echo[1:]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
