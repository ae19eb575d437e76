"""vLLM with its NixlConnector: the prompt is computed first, then the decode worker fetches its blocks.

The prefill worker gets the request with one token to make and `kv_transfer_params` that ask it to keep the blocks; its
answer says where they are, and what it says goes into the decode worker's request word for word. Wire format:
https://docs.vllm.ai/en/stable/features/nixl_connector_usage.html and the proxy in vLLM's `tests/v1/kv_connector`.

A decode worker of vLLM can compute any prompt itself. It does where no prefill worker could, and for what does not go
over two workers: several answers to a prompt, several prompts, and prompts whose own probabilities are asked for.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import orjson
from tandem_api.names import Role

from tandem_gateway.paths import GENERATES
from tandem_gateway.requests.prompt import Inquiry
from tandem_gateway.scheduling import Endpoint, classify_status
from tandem_gateway.upstream.base import Call, Failure, Sink
from tandem_gateway.upstream.engines.answer import count_cached
from tandem_gateway.upstream.engines.body import (
    PAIRED,
    asks_one_answer,
    build_request,
    count_prompts,
    extend,
    read_fields,
    refuse_steering,
)
from tandem_gateway.upstream.engines.call import ForeignCall, Help, outcome_of
from tandem_gateway.upstream.engines.contract import Fields, Host, Order

_KEEP_BLOCKS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "min_completion_tokens", "max_completion_tokens")
_BUSY = 429
log = logging.getLogger(__name__)


class VLLM:
    """The adapter."""

    def __init__(self, host: Host, *, worker_model: str) -> None:
        self._host = host
        self._worker_model = worker_model

    def admit(self, path: str, body: bytes, inquiry: Inquiry) -> None:
        refuse_steering(body)
        kinds = self._host.kinds
        if kinds.pairs and not kinds.mixed and path in GENERATES and not _is_shared(path, read_fields(body)):
            inquiry.local = True

    def start(self, sink: Sink, order: Order) -> Call:
        call = _VLLMCall(self._host, sink, order, worker_model=self._worker_model)
        call.begin()
        return call


def _is_shared(path: str, fields: Fields) -> bool:
    """Whether a prefill worker can compute the prompt of this request."""
    if path not in PAIRED:
        return False
    asks_of_prompt = bool(fields.get("echo")) or fields.get("prompt_logprobs") is not None
    searches = bool(fields.get("use_beam_search"))
    return asks_one_answer(fields) and count_prompts(fields) in (None, 1) and not asks_of_prompt and not searches


def build_prefill(fields: Fields, path: str, model: str) -> bytes:
    """The body for a prefill worker."""
    first = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
    limits: Fields = {"max_tokens": 1}
    if "max_completion_tokens" in fields:
        limits["max_completion_tokens"] = 1
    body = build_request(first | {"stream": False} | limits, path, model)
    return extend(body, {"kv_transfer_params": _KEEP_BLOCKS})


class _VLLMCall(ForeignCall):
    def __init__(self, host: Host, sink: Sink, order: Order, *, worker_model: str) -> None:
        fields = read_fields(order.body)
        super().__init__(host, sink, order, fields, worker_model=worker_model)
        self._prefill = b""
        """For prefill workers."""
        if order.choice.decode.worker.role is not Role.DECODE or not _is_shared(order.path, fields):
            order.choice.prefill = []
        elif order.choice.prefill:
            self._prefill = build_prefill(fields, order.path, worker_model)

    def begin(self) -> None:
        if self.order.choice.prefill:
            self.help(self._prefill, self._on_help)
        else:
            self._prefill = b""
            self.decode()

    def _on_help(self, endpoint: Endpoint, end: Help) -> None:
        if end.failure is Failure.LOCAL:
            self.fail(end.failure, end.detail)
            return
        status = end.head.status if end.head is not None else 0
        if end.failure is None and status == 200 and (params := _read_params(end.body)) is not None:
            place, cached = params
            self._answer.cached = cached
            self._prefill = b""
            self.decode(kv_transfer_params=place)
            return
        if end.failure is not None:
            self.lose(endpoint, outcome_of(end))
        elif status >= 500 or status == _BUSY:
            self.lose(endpoint, classify_status(status, None))
        else:
            # A refusal is the client's business, and the decode worker words it for its own request.
            if status == 200:
                log.warning(
                    "a vLLM worker keeps no blocks: was it started with --kv-transfer-config?",
                    extra={"worker": endpoint.worker.name},
                )
            self.order.choice.prefill = []
        self.begin()


def _read_params(body: bytes) -> tuple[Fields, int] | None:
    """Read where the blocks are and how many tokens of the prompt were cached; None: the answer does not say."""
    try:
        parsed: Any = orjson.loads(body)
    except ValueError:
        return None
    if not isinstance(parsed, dict):
        return None
    fields = cast(Fields, parsed)
    place: Any = fields.get("kv_transfer_params")
    if not isinstance(place, dict) or not place:
        return None
    try:
        extend(b"{}", {"kv_transfer_params": place})
    except orjson.JSONEncodeError:  # nested beyond what can be sent on
        return None
    usage: Any = fields.get("usage")
    return cast(Fields, place), count_cached(cast(Fields, usage) if isinstance(usage, dict) else None)
