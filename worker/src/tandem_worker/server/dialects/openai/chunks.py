"""Answers as bytes: server-sent events and whole responses of the two OpenAI endpoints. Pure.

Everything that is the same in all events of a request is encoded once; per event only the new text is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import orjson

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.server.dialects.contract import AnswerHead
from tandem_worker.server.dialects.openai.logprobs import (
    SLICE_TOKENS,
    PromptScores,
    TokenNames,
    chat_logprobs,
    legacy_logprobs,
)
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.output import ToolDelta, Update, Usage
from tandem_worker.server.wire.pacing import Steps, complete

_SLICE_PIECES = 2048
DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


class _NamesOfIds:
    """`token_id:123`, as vLLM writes it."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id


def token_names(head: AnswerHead, table: TokenTable) -> TokenNames:
    """How logprobs of this answer write tokens."""
    return _NamesOfIds() if head.tokens_as_ids else table


def _end(update: Update) -> dict[str, Any]:
    """How a choice ended, and at what: by vLLM's name where the request's own stop strings or tokens did that, by
    SGLang's also where the model did."""
    stopped_by = update.stopped_by
    matched = update.end_token if stopped_by is None else stopped_by
    return {"finish_reason": update.finish, "stop_reason": stopped_by, "matched_stop": matched}


def is_long(update: Update) -> bool:
    """Whether `update` has so many logprobs that it is written in slices, by `Encoder.long_update`."""
    return len(update.logprobs) > SLICE_TOKENS


def _join_response(
    fields: Mapping[str, Any], choices: Iterable[Steps[dict[str, Any]]], usage: Usage
) -> Steps[list[bytes]]:
    """Choice by choice: together they may be 100 MB."""
    parts = [orjson.dumps(fields)[:-1] + b',"choices":[']
    for index, steps in enumerate(choices):
        if index:
            yield
            parts.append(b",")
        parts.append(orjson.dumps((yield from steps)))
    parts.append(b'],"usage":%b}' % orjson.dumps(usage.to_json()))
    return parts


class ChatEncoder:
    """`prompt_scores` is set by the caller, before the whole answer is written, where the request asks for them."""

    done = DONE
    has_state = False
    repeated_logprobs = ()

    def __init__(self, head: AnswerHead, table: TokenTable) -> None:
        self.prompt_scores: PromptScores | None = None
        self.head = head
        self._table = table
        self._names = token_names(head, table)
        base = head.fields("chat.completion.chunk")
        # `{...,"choices":[{"index":` i `,"delta":{"content":` text `},"logprobs":null,"finish_reason":null}]}`
        self._prefix = b"data: " + orjson.dumps(base)[:-1] + b',"choices":[{"index":'
        self._tail = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._text_suffix = b'},"logprobs":null,"finish_reason":null}' + self._tail
        self._usage_prefix = b"data: " + orjson.dumps(base)[:-1] + b',"choices":[],"usage":'

    def tell_usage(self, usage: Usage) -> None:
        self._tail = b'],"usage":%b}\n\n' % orjson.dumps(usage.to_json())
        self._text_suffix = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Steps[bytes]:
        yield from ()  # never long
        choice: dict[str, Any] = {
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
        written = self._event(index, choice)
        if self.head.return_token_ids and index == 0:
            written = b'%b],"prompt_token_ids":%b%b' % (
                written.removesuffix(self._tail), orjson.dumps(prompt_token_ids), self._tail[1:]
            )  # fmt: skip
        return written

    def update(self, index: int, update: Update) -> bytes:
        plain = not (update.reasoning or update.tools or update.logprobs or self.head.return_token_ids)
        if not plain:
            return complete(self.long_update(index, update))
        return self._finish(index, update, self._text(index, update.content) if update.content else b"")

    def long_update(self, index: int, update: Update) -> Steps[bytes]:
        head = b""
        if update.has_text or update.logprobs or (self.head.return_token_ids and update.all_token_ids):
            head = self._event(index, (yield from self._rich(update)))
        return self._finish(index, update, head)

    def _finish(self, index: int, update: Update, head: bytes) -> bytes:
        if update.finish is None:
            return head
        return head + self._event(index, {"delta": {}, "logprobs": None, **_end(update)})

    def usage(self, usage: Usage) -> bytes:
        return self._usage_prefix + orjson.dumps(usage.to_json()) + b"}\n\n"

    def failure(self, body: Mapping[str, Any]) -> bytes:
        return event(body)

    def _text(self, index: int, text: str) -> bytes:
        return b'%b%d,"delta":{"content":%b%b' % (self._prefix, index, orjson.dumps(text), self._text_suffix)

    def _event(self, index: int, choice: Mapping[str, Any]) -> bytes:
        return b"%b%d,%b%b" % (self._prefix, index, orjson.dumps(choice)[1:], self._tail)

    def _rich(self, update: Update) -> Steps[dict[str, Any]]:
        delta: dict[str, Any] = {}
        if update.reasoning:
            delta["reasoning_content"] = update.reasoning
        if update.content or not (update.reasoning or update.tools):
            delta["content"] = update.content
        if update.tools:
            delta["tool_calls"] = _tool_deltas(update.tools)
        logprobs = (yield from chat_logprobs(self._names, update.logprobs)) if update.logprobs else None
        choice: dict[str, Any] = {"delta": delta, "logprobs": logprobs, "finish_reason": None}
        if self.head.return_token_ids:
            choice["token_ids"] = update.all_token_ids
        return choice

    def response(self, choices: Sequence[Update], prompts: Sequence[Sequence[int]], usage: Usage) -> Steps[list[bytes]]:
        written = (self._choice(index, each) for index, each in enumerate(choices))
        fields = self.head.fields("chat.completion")
        if self.head.return_token_ids:
            fields["prompt_token_ids"] = prompts[0]
        if self.prompt_scores is not None:
            fields["prompt_logprobs"] = yield from self.prompt_scores.write(self._table)
        return (yield from _join_response(fields, written, usage))

    def _choice(self, index: int, update: Update) -> Steps[dict[str, Any]]:
        calls = join_tool_deltas(update.tools)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not update.content else update.content,
            "refusal": None,
        }
        if update.reasoning:
            message["reasoning_content"] = update.reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = (yield from chat_logprobs(self._names, update.logprobs)) if self.head.with_logprobs else None
        choice = {"index": index, "message": message, "logprobs": logprobs, **_end(update)}
        if self.head.return_token_ids:
            choice["token_ids"] = update.all_token_ids
        return choice


def _tool_deltas(tools: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """One for each call: of several in a chunk that are of the same call some clients read the first alone."""
    return [_tool_delta(list(pieces)) for _, pieces in groupby(tools, key=attrgetter("index"))]


def _tool_delta(pieces: Sequence[ToolDelta]) -> dict[str, Any]:
    first, arguments = pieces[0], "".join(piece.arguments for piece in pieces)
    if first.name is None:
        return {"index": first.index, "function": {"arguments": arguments}}
    function = {"name": first.name, "arguments": arguments}
    return {"index": first.index, "id": first.id, "type": "function", "function": function}


def join_tool_deltas(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """The tool calls that a client puts together from these deltas."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls.append({"id": delta.id, "type": "function", "function": function})
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return calls


@dataclass(slots=True, kw_only=True)
class Echo:
    """The prompt of one choice, repeated before its text."""

    text: str | None
    """None until it is made of the tokens, when it is first written."""
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None] | None
    num_top: int
    """So many are told of the likeliest tokens that are known for each."""


class CompletionEncoder:
    """`echoes[i]` is set by the caller (when the first delta is there) if choice i repeats its prompt, and
    `prompt_scores[i]` if it tells the logprobs of its prompt."""

    done = DONE
    has_state = False
    repeated_logprobs = ()

    def __init__(self, head: AnswerHead, table: TokenTable) -> None:
        self.echoes: dict[int, Echo] = {}
        self.prompt_scores: dict[int, PromptScores] = {}
        self.head = head
        self._table = table
        self._names = token_names(head, table)
        self._base = head.fields("text_completion")
        self._prefix = b"data: " + orjson.dumps(self._base)[:-1] + b',"choices":[{"index":'
        self._tail = b'],"usage":null}\n\n' if head.include_usage else b"]}\n\n"
        self._text_suffix = b',"logprobs":null,"finish_reason":null}' + self._tail
        self._usage_prefix = b"data: " + orjson.dumps(self._base)[:-1] + b',"choices":[],"usage":'

    def tell_usage(self, usage: Usage) -> None:
        self._tail = b'],"usage":%b}\n\n' % orjson.dumps(usage.to_json())
        self._text_suffix = b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self, index: int, prompt_token_ids: Sequence[int]) -> Steps[bytes]:
        echo = self.echoes.get(index)
        if echo is None and not self.head.return_token_ids:
            return b""
        choice: dict[str, Any] = {"text": "", "logprobs": None, "finish_reason": None}
        if echo is not None:
            choice["text"] = yield from self._echo_text(echo)
            choice["logprobs"] = yield from self._logprobs(Update(), echo)
        if self.head.return_token_ids:
            choice["prompt_token_ids"] = prompt_token_ids
        return self._event(index, choice)

    def update(self, index: int, update: Update) -> bytes:
        if update.logprobs or self.head.return_token_ids:
            return complete(self.long_update(index, update))
        return self._finish(index, update, self._text(index, update.content) if update.content else b"")

    def long_update(self, index: int, update: Update) -> Steps[bytes]:
        head = b""
        if update.content or update.logprobs or (self.head.return_token_ids and update.all_token_ids):
            choice: dict[str, Any] = {"text": update.content, "logprobs": None, "finish_reason": None}
            if update.logprobs:
                choice["logprobs"] = yield from self._logprobs(update, None, shift=self._shift(index))
            if self.head.return_token_ids:
                choice["token_ids"] = update.all_token_ids
            head = self._event(index, choice)
        return self._finish(index, update, head)

    def _finish(self, index: int, update: Update, head: bytes) -> bytes:
        if update.finish is None:
            return head
        return head + self._event(index, {"text": "", "logprobs": None, **_end(update)})

    def usage(self, usage: Usage) -> bytes:
        return self._usage_prefix + orjson.dumps(usage.to_json()) + b"}\n\n"

    def failure(self, body: Mapping[str, Any]) -> bytes:
        return event(body)

    def _text(self, index: int, text: str) -> bytes:
        return b'%b%d,"text":%b%b' % (self._prefix, index, orjson.dumps(text), self._text_suffix)

    def _event(self, index: int, choice: Mapping[str, Any]) -> bytes:
        return b"%b%d,%b%b" % (self._prefix, index, orjson.dumps(choice)[1:], self._tail)

    def _shift(self, index: int) -> int:
        echo = self.echoes.get(index)
        return len(echo.text or "") if echo is not None else 0

    def _echo_text(self, echo: Echo) -> Steps[str]:
        if echo.text is None:
            echo.text = "".join((yield from prompt_pieces(self._table, echo.token_ids)))
        return echo.text

    def _logprobs(self, update: Update, echo: Echo | None, *, shift: int = 0) -> Steps[orjson.Fragment | None]:
        if not self.head.with_logprobs:
            return None
        logprobs: list[TokenLogprob | None] = list(update.logprobs)
        num_top: int | None = None
        token_ids = [logprob.token_id for logprob in update.logprobs]
        offsets = [offset + shift for offset in update.logprob_offsets]
        if echo is not None and echo.logprobs is not None:
            logprobs, num_top = [*echo.logprobs, *logprobs], echo.num_top
            token_ids = [*echo.token_ids, *token_ids]
            offsets = [
                *(yield from prompt_offsets(self._table, echo.token_ids, (yield from self._echo_text(echo)))),
                *offsets,
            ]
        return (yield from legacy_logprobs(self._names, logprobs, token_ids, offsets, num_top))

    def response(self, choices: Sequence[Update], prompts: Sequence[Sequence[int]], usage: Usage) -> Steps[list[bytes]]:
        written = (self._choice(index, *each) for index, each in enumerate(zip(choices, prompts, strict=True)))
        return (yield from _join_response(self._base, written, usage))

    def _choice(self, index: int, update: Update, prompt: Sequence[int]) -> Steps[dict[str, Any]]:
        echo = self.echoes.get(index)
        prefix = (yield from self._echo_text(echo)) if echo is not None else ""
        choice: dict[str, Any] = {
            "text": prefix + update.content,
            "index": index,
            "logprobs": (yield from self._logprobs(update, echo, shift=self._shift(index))),
            **_end(update),
        }
        if self.head.return_token_ids:
            choice["prompt_token_ids"] = prompt
            choice["token_ids"] = update.all_token_ids
        if (scores := self.prompt_scores.get(index)) is not None:
            choice["prompt_logprobs"] = yield from scores.write(self._table)
        return choice


def prompt_pieces(table: TokenTable, token_ids: Sequence[int], *, special: bool = False) -> Steps[list[str]]:
    """The text that each token of a prompt adds; `special`: that of special tokens too. Joined they are its text."""
    detokenizer = table.new(visible=table.special_ids if special else frozenset(), continues=True)
    pieces: list[str] = []
    for start in range(0, len(token_ids), _SLICE_PIECES):
        if start:
            yield
        pieces += map(detokenizer.feed, token_ids[start : start + _SLICE_PIECES])
    return [*pieces, detokenizer.flush()]


def prompt_offsets(table: TokenTable, token_ids: Sequence[int], text: str) -> Steps[list[int]]:
    """Tell where in the text of the prompt each of its tokens begins, in characters.

    `text` has a special token's text where the client wrote it, and not where the tokenizer put the token, nor where
    the prompt came as tokens.
    """
    pieces = yield from prompt_pieces(table, token_ids, special=True)
    offsets: list[int] = []
    offset = 0
    for token_id, piece in zip(token_ids, pieces, strict=False):
        offsets.append(offset)
        if token_id not in table.special_ids or text.startswith(piece, offset):
            offset += len(piece)
    return offsets
