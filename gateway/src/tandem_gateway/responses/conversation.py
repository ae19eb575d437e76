"""A request of the Responses API, as the store needs it: what it continues, what it adds, and how it reads whole. Pure.

What is not about the store stays as the client wrote it, for the worker to judge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any, cast

import orjson

from tandem_gateway.errors import BadRequest
from tandem_gateway.requests.json_body import MAX_NODES, bound_nodes, check_nodes, read_object
from tandem_gateway.requests.prompt import Said
from tandem_gateway.responses.store import Turn, join_turns, list_turns

MAX_DEPTH = 1000
"""Turns of a conversation, each of which a request walks through."""
PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100
_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a request's body says of the store."""

    fields: Fields
    """All of the body."""
    store: bool | None
    """None: it does not say."""
    previous: str | None
    nodes: int
    """Objects, lists and strings of the body, at most."""


def read_question(body: bytes) -> Question:
    """Raises BadRequest: it is not a JSON object, or says of the store what cannot be."""
    fields = read_object(body)
    store, previous = fields.get("store"), fields.get("previous_response_id")
    if store is not None and not isinstance(store, bool):
        raise BadRequest("'store' must be true or false", param="store", code="invalid_type")
    if previous is not None and not isinstance(previous, str):
        raise BadRequest(
            "'previous_response_id' must be the id of a response, a string",
            param="previous_response_id",
            code="invalid_type",
        )
    return Question(fields=fields, store=store, previous=previous, nodes=bound_nodes(body) if previous else 0)


def write_request(question: Question, given: Said, parent: Turn | None, *, max_bytes: int) -> tuple[bytes, Said]:
    """The body for a worker, with the whole conversation and nothing in it that asks for a store; and what is said in
    it. What came before is copied, and not read again.

    Raises:
        BadRequest: it is larger, or has more turns or parts, than a request may.
    """
    if parent is not None and parent.depth >= MAX_DEPTH:
        raise BadRequest(
            f"the conversation has {parent.depth} turns, as many as can be continued by 'previous_response_id': send "
            "what is still needed of it in 'input', without an id",
            param="previous_response_id",
            code="conversation_too_long",
        )
    size = len(given.items) + (0 if parent is None else parent.total)
    if parent is not None and size > max_bytes:
        raise _too_long(size, max_bytes)
    rest = {key: value for key, value in question.fields.items() if key not in ("input", "previous_response_id")}
    # Two levels deeper than it is: the answer repeats some of it further inside, and is to be written, too.
    head = _dump([[rest | {"store": False}]])[2:-3]
    said = join_turns(parent, given)
    body = b'%b,"input":[%b]}' % (head, said.items)
    if len(body) > max_bytes:
        raise _too_long(len(body), max_bytes)
    if parent is not None and parent.nodes + question.nodes > MAX_NODES:
        check_nodes(body)
    return body, said


def _too_long(size: int, limit: int) -> BadRequest:
    return BadRequest(
        f"the request and the conversation that it continues have {size} bytes together; at most {limit} are accepted: "
        "send what is still needed of it in 'input', without an id",
        status=413,
        param="previous_response_id",
        code="conversation_too_long",
    )


def _dump(value: object) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # what was read but cannot be written is nested beyond 250 levels
        raise BadRequest("the request body is nested too deeply", code="invalid_value") from error


# -- what is kept of an answer -----------------------------------------------------------------------------------------


def write_output(response: Fields) -> bytes:
    """The items of an answer, in JSON and joined by commas, without their logprobs: those take hundreds of times as
    much as the text, and whoever wants them has seen them."""
    items: Any = response.get("output")
    if not isinstance(items, list):
        return b""
    return orjson.dumps([_without_logprobs(item) for item in cast(list[Any], items)])[1:-1]


def _without_logprobs(item: Any) -> Any:
    if not isinstance(item, dict):
        return item
    fields = cast(Fields, item)
    content: Any = fields.get("content")
    if not isinstance(content, list):
        return fields
    return fields | {"content": [_forget_logprobs(part) for part in cast(list[Any], content)]}


def _forget_logprobs(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    fields = cast(Fields, part)
    return fields | {"logprobs": list[Any]()} if "logprobs" in fields else fields


def write_head(response: Fields) -> bytes:
    return orjson.dumps({key: value for key, value in response.items() if key != "output"})


# -- input items -------------------------------------------------------------------------------------------------------


def list_items(turn: Turn, *, newest_first: bool) -> Iterator[Fields]:
    """Everything that the response of this turn was made from, each with a name. Turns are read as they come up."""
    turns: Iterable[Turn] = list_turns(turn)
    for each in turns if newest_first else reversed([*turns]):
        given, made = _read(each.input), [] if each is turn else _read(each.output)
        for index in reversed(range(len(given) + len(made))) if newest_first else range(len(given) + len(made)):
            yield _name(each, index, given[index]) if index < len(given) else made[index - len(given)]


def _read(items: bytes) -> list[Fields]:
    return orjson.loads(b"[%b]" % items)


def _name(turn: Turn, index: int, item: Fields) -> Fields:
    """An item that a turn was given, as the API shows it: with an id, and a message whole."""
    kind = item.get("type") or "message"
    digest = blake2b(f"{turn.key}/{index}".encode(), digest_size=16).hexdigest()
    shown = {"id": None, "type": kind} | item
    shown["id"] = shown["id"] or f"{_PREFIXES.get(kind, 'item_')}{digest}"
    if kind == "message":
        shown.setdefault("status", "completed")
        if isinstance(item.get("content"), str):
            said: Fields = {"type": "input_text", "text": item["content"]}
            if item.get("role") == "assistant":
                said = {"type": "output_text", "text": item["content"], "annotations": []}
            shown["content"] = [said]
    return shown


def show_page(items: Iterator[Fields], *, after: str | None, limit: int) -> Fields:
    """A page of a list as the API writes it.

    Raises:
        BadRequest: there is no item called `after`.
    """
    if after is not None and not any(item.get("id") == after for item in items):
        raise BadRequest(
            f"'after' names no item of this response: {after[:100]!r}", param="after", code="invalid_value"
        )
    page = [*islice(items, limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0].get("id") if page else None,
        "last_id": page[-1].get("id") if page else None,
        "has_more": next(items, None) is not None,
    }
