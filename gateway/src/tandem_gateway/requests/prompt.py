"""What the gateway reads of a request's body: enough to route it, no more.

Everything else in the body is the worker's to judge, and goes there byte for byte. Pure: bytes in, facts or an error
out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson
from tandem_api.messages import drop_billing_line

from tandem_gateway.errors import BadRequest, UnknownModel
from tandem_gateway.http.request import Request
from tandem_gateway.paths import CHAT, COMPLETIONS, EMBEDDINGS, GENERATES, MESSAGES, RESPONSES, SCORES, TOKENIZER_INFO
from tandem_gateway.requests.json_body import read_object
from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, build_chain, build_parent
from tandem_gateway.scheduling.ring import build_seed
from tandem_gateway.scheduling.scheduler import SHORT_CHUNKS

SHORT_BYTES = SHORT_CHUNKS * CHUNK_BYTES
_MAY_BE_TOKENS = {COMPLETIONS: "prompt", EMBEDDINGS: "input"}
_TEXT = frozenset(("type", "text"))
_Object = dict[str, Any]
_List = list[Any]
_DICT: Any = dict
_LIST: Any = list
_STR: Any = str
"""Types for tests that every request goes through: what is tested stays `Any`, and no call is spent on
telling the type checker so."""
_PLAIN = 2
"""Fields of a message that is role and text alone."""
_COMPARED = ("query", "queries", "text_1", "data_1", "documents", "items", "text_2", "data_2")
"""Texts of a request to compare them, under all their names."""
_SELDOM = frozenset(("cache_salt", "echo", "metadata", "priority", "prompt_cache_key", "prompt_logprobs", "user"))
"""Names of fields that routing reads, and most requests do not have."""
_MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(slots=True)
class Inquiry(Demand):
    """A request the gateway can route: what it demands, and what is told of it."""

    prompt_bytes: int = 0
    max_tokens: int | None = None
    model: str | None = None
    """The name that the client uses; None: none."""


@dataclass(frozen=True, slots=True)
class Said:
    """Items of a Responses request, and of what came before them."""

    items: bytes = b""
    """In JSON, joined by commas."""
    opening: int = 0
    """Their bytes up to the end of the first question; 0: there is none."""


def read_inquiry(
    request: Request,
    *,
    served_names: Sequence[str],
    estimator: Estimator,
    fields: dict[str, Any] | None = None,
    said: Said | None = None,
    min_priority: int = -1000,
) -> Inquiry:
    """What a request asks for. The first of `served_names` is the one that a refusal tells. Where they are known
    already: the `fields` of its body, and what is `said` in a Responses request with all that it continues.

    Raises:
        BadRequest: it is not a JSON object, a parameter that routing needs is missing or of the wrong type, or its
            `priority` is below `min_priority`.
        UnknownModel: it names another model.
    """
    path = request.path
    if fields is None:
        fields = {} if path == TOKENIZER_INFO else read_object(request.body)
    model = fields.get("model")
    if model is not None and model not in served_names:
        _check_model(model, served_names)
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("'stream' must be true or false", param="stream", code="invalid_type")
    if path == CHAT:
        prompt, root = _read_messages(fields)
    elif path == MESSAGES:
        prompt, root = _read_messages(canonical_messages(fields))
    elif path == RESPONSES:
        prompt, root = _read_said(fields, said or write_said(fields))
    elif path == COMPLETIONS:
        prompt = _read_prompt(fields, "prompt")
        root = b"" if len(prompt) >= CHUNK_BYTES else prompt
    elif path == EMBEDDINGS:
        prompt = root = _read_prompt(fields, "input")
    elif path in SCORES:
        prompt = root = b"".join(_canonical(fields[name], name) for name in _COMPARED if fields.get(name) is not None)
    else:
        prompt = root = b""
    salt: Any = None
    scored, headers, session = False, request.headers, None
    if not _SELDOM.isdisjoint(fields):
        if "priority" in fields:
            _check_priority(fields["priority"], min_priority)
        session, salt, scored = _read_session(fields, path), fields.get("cache_salt"), _is_scored(fields)
    generates = path in GENERATES
    max_tokens = _read_max_tokens(fields) if generates else 1
    session = headers.get(b"x-session-affinity") or session or root
    tenant = headers.get(b"authorization", b"")
    parent = build_parent(salt.encode() if isinstance(salt, str) else b"", tenant) if salt or tenant else 0
    size = len(prompt)
    tokens = (
        _count_tokens(fields.get(_MAY_BE_TOKENS[path]), prompt, estimator)
        if path in _MAY_BE_TOKENS
        else estimator.prompt_tokens(size)
    )
    # By position: by name it would take three times as long, which every request pays.
    return Inquiry(
        tokens,
        estimator.expected_output(max_tokens),
        build_chain(prompt, parent) if size >= CHUNK_BYTES else [],
        build_seed(session, parent) if session else 0,
        prompt if size < SHORT_BYTES else b"",
        0,
        not generates,
        scored,
        stream is True,
        None,
        size,
        max_tokens,
        model,
    )


def guess_path(body: bytes) -> str:
    """Tell where a request with this body is meant to go, by what it asks.

    Raises:
        BadRequest: it is not a JSON object.
    """
    fields = read_object(body)
    return COMPLETIONS if "prompt" in fields else RESPONSES if "input" in fields else CHAT


def _check_model(model: Any, served_names: Sequence[str]) -> None:
    """Refuse another model. A gateway serves one: who names none means that one."""
    if not isinstance(model, str):
        raise BadRequest("'model' must be a string", param="model", code="invalid_type")
    check_name(model, served_names)


def check_name(name: str, served_names: Sequence[str]) -> None:
    """Raises UnknownModel."""
    if name not in served_names:
        raise UnknownModel(
            f"the model {name[:200]!r} does not exist here; this endpoint serves {served_names[0]!r}", param="model"
        )


def _read_messages(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """The conversation as bytes whose prefix stays equal from turn to turn; and its root, up to the first question."""
    messages: Any = fields.get("messages")
    if not isinstance(messages, _LIST) or not messages:
        if messages is None:
            raise BadRequest("'messages' is required", param="messages", code="missing_required_parameter")
        raise BadRequest("'messages' must be a list with at least one message", param="messages", code="invalid_type")
    tools: Any = fields.get("tools")
    parts = [_canonical(tools, "tools")] if tools else []
    rich: list[Any] = []
    root_parts = 0
    for index, message in enumerate(messages):
        if not isinstance(message, _DICT):
            raise BadRequest(f"'messages[{index}]' must be an object", param=f"messages[{index}]", code="invalid_type")
        role: Any = message.get("role")
        content: Any = message.get("content")
        if not isinstance(role, _STR):
            name = f"messages[{index}].role"
            raise BadRequest(f"{name!r} must be a string", param=name, code="invalid_type")
        if len(message) == _PLAIN and isinstance(content, _STR):
            if rich:
                _add_rich(parts, rich)
            parts.append(f"{role}\0{content}\0".encode())
        else:
            rich.append(message)
        if not root_parts and role == "user":
            if rich:
                _add_rich(parts, rich)
            root_parts = len(parts)
    if rich:
        _add_rich(parts, rich)
    count = len(parts)
    if count == 1:
        return parts[0], parts[0]
    prompt = b"".join(parts)
    return prompt, b"".join(parts[:root_parts]) if 0 < root_parts < count else prompt


def canonical_messages(fields: dict[str, Any]) -> dict[str, Any]:
    """A Messages request without what is no part of its prompt, so that equal prompts are equal bytes: the system
    prompt is a message as others are, texts are joined as the worker joins them, and marks for a cache are left out.
    What is not as it should be stays, for the worker to refuse.
    """
    tools: Any = fields.get("tools")
    messages: Any = fields.get("messages")
    if isinstance(tools, list):
        tools = [_drop_mark(tool) for tool in cast(_List, tools)]
    if isinstance(messages, list) and messages:
        messages = [_join_texts(message) for message in cast(_List, messages)]
        system = drop_billing(fields).get("system")
        if system:
            messages.insert(0, _join_texts({"role": "system", "content": system}))
    return {**fields, "tools": tools, "messages": messages}


def _drop_mark(block: Any) -> Any:
    """A tool, or a block of a message, and the blocks in a tool's result."""
    if not isinstance(block, dict):
        return block
    block = cast(_Object, block)
    inner: Any = block.get("content")
    if isinstance(inner, list):
        block = {**block, "content": [_drop_mark(each) for each in cast(_List, inner)]}
    if "cache_control" in block:
        block = {name: value for name, value in block.items() if name != "cache_control"}
    return block


def drop_billing(fields: dict[str, Any]) -> dict[str, Any]:
    """The `system` of a Messages request without the line that differs in each, if it has one."""
    system: Any = fields.get("system")
    if isinstance(system, str):
        return {"system": drop_billing_line(system)}
    return {"system": [_drop_billing(block) for block in cast(_List, system)]} if isinstance(system, list) else {}


def _drop_billing(given: Any) -> Any:
    if not isinstance(given, dict):
        return given
    block = cast(_Object, given)
    text: Any = block.get("text")
    return {**block, "text": drop_billing_line(text)} if isinstance(text, str) else block


def _join_texts(given: Any) -> Any:
    """A message whose content is one text, where all of its blocks are texts."""
    if not isinstance(given, dict):
        return given
    message = cast(_Object, given)
    content: Any = message.get("content")
    if not isinstance(content, list):
        return message
    blocks = [_drop_mark(block) for block in cast(_List, content)]
    texts = [
        block["text"]
        for block in blocks
        if isinstance(block, dict) and block.keys() == _TEXT and isinstance(block["text"], str)
    ]
    return {**message, "content": "".join(texts) if len(texts) == len(blocks) else blocks}


def _read_said(fields: dict[str, Any], said: Said) -> tuple[bytes, bytes]:
    """As `_read_messages`, of a Responses request. Its items are taken as they are written: what a conversation
    continues need not be read for it."""
    tools: Any = fields.get("tools")
    instructions: Any = fields.get("instructions")
    head = _canonical(tools, "tools") if tools else b""
    if instructions:
        head += _canonical({"role": "system", "content": instructions}, "instructions") + b","
    prompt = head + said.items
    return prompt, head + said.items[: said.opening] if 0 < said.opening < len(said.items) else prompt


def write_said(fields: dict[str, Any]) -> Said:
    """What a Responses request itself says. Raises BadRequest: there is nothing, or it cannot be written."""
    items = read_items(fields)
    asks = 0
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"'input[{index}]' must be an object", param=f"input[{index}]", code="invalid_type")
        if not asks and cast(_Object, item).get("role") == "user":
            asks = index + 1
    # A level deeper than they are: a list of what a response was given has them further inside, and is to be written.
    opening, rest = _canonical([items[:asks]], "input")[2:-2], _canonical([items[asks:]], "input")[2:-2]
    return Said(b",".join(filter(None, (opening, rest))), len(opening))


def read_items(fields: dict[str, Any]) -> list[Any]:
    """The items of a Responses request's `input`. Raises BadRequest: there are none."""
    items: Any = fields.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise BadRequest(
            "'input' must be a string or a list with at least one item", param="input", code="invalid_type"
        )
    return cast(list[Any], items)


def _add_rich(parts: list[bytes], messages: list[Any]) -> None:
    """Messages that are more than role and text, in one piece: one by one they would cost a kilobyte each to write.

    Without the list's brackets, so that a conversation that grows keeps its beginning.
    """
    parts.append(_canonical(messages, "messages")[1:-1] + b",")
    messages.clear()


def _read_prompt(fields: dict[str, Any], name: str) -> bytes:
    prompt: Any = fields.get(name)
    if prompt is None:
        raise BadRequest(f"'{name}' is required", param=name, code="missing_required_parameter")
    if isinstance(prompt, str):
        return prompt.encode()
    if isinstance(prompt, list) and prompt:
        return _pack_tokens(cast(_List, prompt)) or _canonical(cast(_List, prompt), name)
    raise BadRequest(f"'{name}' must be a string or a list", param=name, code="invalid_type")


def _pack_tokens(prompt: list[Any]) -> bytes:
    """A prompt given as tokens, four bytes each: writing out a million numbers would take as long as reading them.
    Nothing where it is anything else."""
    if type(prompt[0]) is not int:
        return b""
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        return b""


def _canonical(value: object, param: str) -> bytes:
    try:
        return orjson.dumps(value)
    except orjson.JSONEncodeError as error:  # what was read but cannot be written is nested beyond 250 levels
        raise BadRequest(f"{param!r} is nested too deeply", param=param, code="invalid_value") from error


def _read_max_tokens(fields: dict[str, Any]) -> int | None:
    """Only an estimate hangs on it: a wrong type is the worker's to refuse."""
    for name in _MAX_TOKENS:
        if name in fields:
            value: Any = fields[name]
            if type(value) is int and value > 0:
                return value
    return None


def _check_priority(value: Any, lowest: int) -> None:
    """Refuse a place ahead of others. Engines read numbers in texts and fractions too."""
    try:
        asked = float(value) if isinstance(value, int | float | str) else 0.0
    except (ValueError, OverflowError):  # the worker's to refuse
        return
    if asked < lowest:
        raise BadRequest(
            f"'priority' must be at least {lowest} here: a request may stand back, and ahead of others only where the "
            "model's owner allows it",
            param="priority",
            code="invalid_value",
        )


def _is_scored(fields: dict[str, Any]) -> bool:
    """Whether numbers of each prompt token are asked for."""
    return fields.get("prompt_logprobs") is not None or (
        bool(fields.get("echo")) and fields.get("logprobs") is not None
    )


def _count_tokens(given: Any, prompt: bytes, estimator: Estimator) -> int:
    """Tokens of a prompt that may be `given` as tokens."""
    tokens = cast(_List, given) if isinstance(given, list) else []
    if tokens and isinstance(tokens[0], int):
        return len(tokens)
    return estimator.prompt_tokens(len(prompt))


def _read_session(fields: dict[str, Any], path: str) -> bytes | None:
    """The client's name for the session, if it gives one."""
    if path == MESSAGES:
        metadata: Any = fields.get("metadata")
        name: Any = cast(_Object, metadata).get("user_id") if isinstance(metadata, dict) else None
        if isinstance(name, str) and name:
            return name.encode()
    for name in ("prompt_cache_key", "user"):
        value: Any = fields.get(name)
        if isinstance(value, str) and value:
            return value.encode()
    return None
