"""Requests of the OpenAI API, as engines of other projects get them. Pure: bytes and objects in, bytes out."""

from __future__ import annotations

from typing import Any, cast

import orjson

from tandem_gateway.errors import BadRequest
from tandem_gateway.paths import CHAT, COMPLETIONS, MESSAGES
from tandem_gateway.requests.prompt import drop_billing
from tandem_gateway.upstream.engines.contract import Fields

STEERS = (
    "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key",
    "data_parallel_rank", "routed_dp_rank", "disagg_prefill_dp_rank", "decode_tp_size", "rid", "session_params",
)  # fmt: skip
"""With these a request tells a worker which machine to connect to, or whose state to go on with: never a client's to
say."""
_COUNTS = ("n", "best_of")
_EXTRA = "vllm_xargs"
"""What is in it vLLM takes for its own arguments, `kv_transfer_params` too."""
PAIRED = frozenset((CHAT, COMPLETIONS))
"""Paths of requests that a prefill and a decode worker share."""


def read_fields(body: bytes) -> Fields:
    """The object in a body; empty where there is none, which `prompt.read_inquiry` takes of a GET alone."""
    try:
        fields: Any = orjson.loads(body)
    except ValueError:
        return {}
    return cast(Fields, fields) if isinstance(fields, dict) else {}


def refuse_steering(body: bytes) -> None:
    """Raises BadRequest where a client names other machines. Costs a search in bytes where it does not."""
    if not any(b'"%b"' % name.encode() in body for name in STEERS):
        return
    fields = read_fields(body)
    extra: Any = fields.get(_EXTRA)
    steering = fields | cast(Fields, extra) if isinstance(extra, dict) else fields
    for name in STEERS:
        if steering.get(name) is not None:
            raise BadRequest(
                f"{name!r} is written by the gateway, which chooses the workers: leave it out",
                param=name,
                code="unsupported_parameter",
            )


def asks_usage(fields: Fields) -> bool:
    """Whether the client of a stream wants to be told the usage."""
    options: Any = fields.get("stream_options")
    return isinstance(options, dict) and cast(Fields, options).get("include_usage") is True


def build_request(fields: Fields, path: str, model: str) -> bytes:
    """The body for a worker: under the name that it has for the model, with usage at the end of streams whether or not
    the client asked, and without what only the gateway may say, which `extend` adds.

    Raises:
        BadRequest: it is nested beyond what can be written.
    """
    sent = {name: value for name, value in fields.items() if name not in STEERS}
    sent["model"] = model
    if path == MESSAGES:
        sent |= drop_billing(sent)
    extra: Any = sent.get(_EXTRA)
    if isinstance(extra, dict):
        sent[_EXTRA] = {name: value for name, value in cast(Fields, extra).items() if name not in STEERS}
    if path in PAIRED and fields.get("stream") is True and not asks_usage(fields):
        options: Any = fields.get("stream_options")
        if options is None or isinstance(options, dict):  # anything else is the engine's to refuse
            kept = cast(Fields, options or {})
            sent["stream_options"] = {name: kept[name] for name in kept if name != "continuous_usage_stats"} | {
                "include_usage": True
            }
    try:
        return orjson.dumps(sent)
    except orjson.JSONEncodeError as error:
        raise BadRequest("the request body is nested too deeply", code="invalid_value") from error


def extend(body: bytes, more: Fields) -> bytes:
    """What `build_request` has built, with fields that are not in it. Raises JSONEncodeError where they are nested too
    deeply."""
    return body[:-1] + b"," + orjson.dumps(more)[1:] if more else body


def asks_one_answer(fields: Fields) -> bool:
    """Whether one choice is asked of each prompt. Engines read numbers in texts and fractions too, so what is no whole
    number may be any."""
    return all(fields.get(name) is None or (type(fields[name]) is int and fields[name] <= 1) for name in _COUNTS)


def count_prompts(fields: Fields) -> int | None:
    """Prompts of a completion that has several, or a list of one; None: a single one."""
    prompt: Any = fields.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        return None
    prompts = cast(list[Any], prompt)
    return None if isinstance(prompts[0], int) else len(prompts)
