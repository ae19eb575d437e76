"""SGLang with prefill and decode workers: both get the request at once, and meet in a room at the prefill worker.

`bootstrap_host` and `bootstrap_port` name the prefill worker's bootstrap server, `bootstrap_room` the request there.
The decode worker's answer is the client's; the prefill worker's is read for what it had cached, and dropped. Wire
format: https://docs.sglang.io/docs/advanced_features/pd_disaggregation.md and SGLang's own load balancers.

A decode worker of SGLang computes no prompts: without a prefill worker a request waits for one.
"""

from __future__ import annotations

import random
from typing import Any

from tandem_api.names import Role

from tandem_gateway.errors import BadRequest, NotRouted
from tandem_gateway.http.response import ResponseHead
from tandem_gateway.http.sse import find_usage, tells_failure
from tandem_gateway.paths import GENERATES
from tandem_gateway.requests.prompt import Inquiry
from tandem_gateway.scheduling import Endpoint, classify_status
from tandem_gateway.upstream.base import Call, Failure, Sink
from tandem_gateway.upstream.engines.answer import HAS_USAGE, count_cached
from tandem_gateway.upstream.engines.body import (
    PAIRED,
    asks_one_answer,
    count_prompts,
    extend,
    read_fields,
    refuse_steering,
)
from tandem_gateway.upstream.engines.call import ForeignCall, Help, outcome_of
from tandem_gateway.upstream.engines.contract import Fields, Host, Order

ROOMS = (1 << 63) - 4096
"""Numbers of 63 bits; SGLang counts on from one where a request has several answers."""
USAGE_SECONDS = 1.0
"""The end of an answer waits this long for the prefill worker to say what it had cached."""
_MAX_TAIL_BYTES = 1024 * 1024
_BUSY = 429


class SGLang:
    """The adapter."""

    def __init__(self, host: Host, *, worker_model: str) -> None:
        self._host = host
        self._worker_model = worker_model

    def admit(self, path: str, body: bytes, inquiry: Inquiry) -> None:
        refuse_steering(body)
        if self._host.kinds.pairs and not self._host.kinds.mixed:
            _refuse_unpaired(path, read_fields(body))

    def start(self, sink: Sink, order: Order) -> Call:
        call = _SGLangCall(self._host, sink, order, worker_model=self._worker_model)
        call.begin()
        return call


def _refuse_unpaired(path: str, fields: Fields) -> None:
    """Raises RequestError for what a prefill and a decode worker cannot compute between them."""
    if path not in GENERATES:
        return
    if path not in PAIRED:
        raise NotRouted(
            f"{path} is not served by SGLang's prefill and decode workers: use /v1/chat/completions or /v1/completions",
            code="unsupported_endpoint",
        )
    if (count_prompts(fields) or 1) > 1 and not asks_one_answer(fields):
        raise BadRequest(
            "'n' above 1 with several prompts is not served by SGLang's prefill and decode workers: send one"
            " request for each prompt",
            param="n",
            code="unsupported_value",
        )


def build_meeting(prompts: int | None, address: str) -> dict[str, Any]:
    """Fields that say where both workers meet: at the prefill worker's bootstrap server, in a room for each prompt."""
    host, _, port = address.rpartition(":")
    if prompts is None:
        return {"bootstrap_host": host, "bootstrap_port": int(port), "bootstrap_room": random.randrange(ROOMS)}
    return {
        "bootstrap_host": [host] * prompts,
        "bootstrap_port": [int(port)] * prompts,
        "bootstrap_room": [random.randrange(ROOMS) for _ in range(prompts)],
    }


class _SGLangCall(ForeignCall):
    def __init__(self, host: Host, sink: Sink, order: Order, *, worker_model: str) -> None:
        fields = read_fields(order.body)
        super().__init__(host, sink, order, fields, worker_model=worker_model)
        self._prompts = count_prompts(fields)
        if order.choice.decode.worker.role is Role.DECODE:
            _refuse_unpaired(order.path, fields)
        self._early: ResponseHead | None = None
        """A worker may begin its answer before it has the blocks: until then another prefill worker can be asked."""
        self._tail: bytes | None = None
        """The end of a stream, from its usage on, while the prefill worker has not told of what it had cached."""
        self._ended = False
        """The decode worker has said everything."""
        self._patient = True

    def begin(self) -> None:
        choice = self.order.choice
        if not choice.prefill or choice.decode.worker.role is not Role.DECODE:
            self.decode()
            return
        meeting = build_meeting(self._prompts, choice.prefill[0].prefill_address.decode())
        self.help(extend(self._body, meeting), self._on_help)
        self.decode(**meeting)

    # the prefill worker

    def _on_help(self, endpoint: Endpoint, end: Help) -> None:
        if self._head is not None:  # the blocks are there: what comes of the prefill worker now changes nothing
            if end.failure is None:
                self._answer.cached = count_cached(find_usage(end.body))
            self._flush()
            return
        head, status = end.head, end.head.status if end.head is not None else 0
        if end.failure is None and status == 200 and not tells_failure(end.body):
            self._answer.cached = count_cached(find_usage(end.body))
            return
        self._drop_decode()
        if end.failure is Failure.LOCAL:
            self.fail(end.failure, end.detail)
        elif end.failure is None and head is not None and 400 <= status < 500 and status != _BUSY:
            self._refuse(head, end.body)
        else:
            answered = end.failure is None and status != 200
            self.lose(endpoint, classify_status(status, None) if answered else outcome_of(end))
            if self.order.choice.prefill:
                self.begin()
            else:
                self.fail(Failure.HELPER, f"no prefill worker computed the prompt: {end.detail or status}")

    def _drop_decode(self) -> None:
        self._early = None
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def _refuse(self, head: ResponseHead, body: bytes) -> None:
        """The request is not what the engine takes: its own words are the answer."""
        super().on_upstream_head(head)
        if self._sink is not None:
            self._sink.on_upstream_body(body, final=True)
        super().on_upstream_end()

    # the decode worker

    def on_upstream_head(self, head: ResponseHead) -> None:
        if self._helper is not None and head.status == 200:
            self._early = head
        else:
            super().on_upstream_head(head)

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        self._take_head()
        super().on_upstream_body(data, final=final)

    def _take_head(self) -> None:
        head, self._early = self._early, None
        if head is not None:
            super().on_upstream_head(head)

    def pass_on(self, data: bytes, *, final: bool) -> None:
        if self._tail is not None:
            self._tail += data
            if len(self._tail) > _MAX_TAIL_BYTES:
                self._flush()
        elif self._events is not None and self._helper is not None and self._patient and HAS_USAGE.search(data):
            self._tail = data
            self._loop.call_later(USAGE_SECONDS, self._flush)
        else:
            super().pass_on(data, final=final and self._helper is None)

    def on_upstream_end(self) -> None:
        self._call = None
        self._take_head()
        if self._helper is not None and self._sink is not None:
            self._ended = True  # an answer in one piece, or the tail of a stream: the usage is to be completed
            self._loop.call_later(USAGE_SECONDS, self._flush)
        else:
            super().on_upstream_end()

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        if self._tail is not None and self._sink is not None:
            self._flush()
        super().on_upstream_failure(failure, detail)

    def _flush(self) -> None:
        """Do not wait for the prefill worker any more."""
        self._patient = False
        if self._sink is None:
            return
        tail, self._tail = self._tail, None
        if tail is not None:
            super().pass_on(tail, final=self._ended)
        if self._ended:
            super().on_upstream_end()
