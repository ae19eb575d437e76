"""The spans of a request at the worker that answers it: itself, and the phases of what the engine computed for it.

The context of the request that a task answers is found where its engine requests are submitted, so that nothing between
has to know of traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar

from tandem_api.spans import Span, TraceContext, Value, read_context
from tandem_api.tracing import Tracer

from tandem_worker.engine.schedule.params import GenerationRequest
from tandem_worker.engine.trace import Hop, RequestTrace
from tandem_worker.server.text.output import Usage

MAX_TRACED = 16
"""Engine requests of one HTTP request (prompts of a completion, texts to embed) whose phases are recorded."""

current_trace: ContextVar[ServerTrace | None] = ContextVar("current_trace", default=None)


class ServerTrace:
    def __init__(self, tracer: Tracer, parent: TraceContext) -> None:
        self._tracer, self._parent = tracer, parent
        self._context = parent.child()
        self._requests: list[RequestTrace] = []

    def follow(self, requests: Sequence[GenerationRequest]) -> list[GenerationRequest]:
        """The same requests, the first of which note their times."""
        room = max(0, MAX_TRACED - len(self._requests))
        followed = [
            dataclasses.replace(request, trace=RequestTrace(self._context, prompt_tokens=len(request.prompt_token_ids)))
            for request in requests[:room]
        ]
        self._requests += [request.trace for request in followed if request.trace is not None]
        return [*followed, *requests[room:]]

    def end(
        self, *, method: str, path: str, status: int, began: float, ended: float, request_id: str, usage: Usage | None
    ) -> None:
        """The answer is over. Times are monotonic."""
        failed = status >= 500
        counts: dict[str, Value | None] = {}
        if usage is not None:
            counts = {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
            }
        spans = [
            Span(
                name=f"{method} {path}",
                context=self._context,
                parent=self._parent,
                kind="server",
                began=began,
                ended=ended,
                attributes={
                    "http.request.method": method,
                    "http.route": path,
                    "http.response.status_code": status or None,
                    "tandem.request_id": request_id,
                    **counts,
                },
                error=str(status) if failed else None,
            )
        ]
        if self._requests:
            arrived = min(request.arrived or ended for request in self._requests)
            spans.append(Span(name="prepare", context=self._context.child(), parent=self._context, began=began,
                              ended=arrived))  # fmt: skip
        for number, request in enumerate(self._requests):
            if request.arrived:
                spans += build_phases(request, number if len(self._requests) > 1 else None, ended)
        self._tracer.add(spans)


def begin_trace(tracer: Tracer | None, traceparent: str | None) -> ServerTrace | None:
    """None where the request is not traced: whoever sends it decides that."""
    if tracer is None or traceparent is None or not tracer.active:
        return None
    parent = read_context(traceparent.encode("latin-1"))
    return None if parent is None or not parent.sampled else ServerTrace(tracer, parent)


def build_phases(request: RequestTrace, number: int | None, now: float) -> list[Span]:
    """Queue, prefill here or elsewhere, decode. What had not ended when the answer did ends `now`."""
    over = min(request.ended or now, now)
    first = request.hops[0].ordered if request.hops else 0.0
    begun = first or request.admitted or over
    spans = [_phase("queue", request, number, request.arrived, begun)]
    for hop in request.hops:
        spans += _build_hop(hop, request, number, over)
    last = request.hops[-1] if request.hops else None
    prefilled = request.prefilled or over
    if last is None or last.failure is not None:
        computed = _phase("prefill", request, number, begun if last is None else last.ended, prefilled)
        computed.attributes = {
            **computed.attributes,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": request.cached_tokens,
        }
        spans.append(computed)
    if request.prefilled:
        decoded = _phase("decode", request, number, prefilled, over)
        if request.ended:
            decoded.attributes = {**decoded.attributes, "gen_ai.usage.output_tokens": request.output_tokens}
        spans.append(decoded)
    return spans


def _build_hop(hop: Hop, request: RequestTrace, number: int | None, now: float) -> list[Span]:
    host, _, port = hop.endpoint.rpartition(":")
    ended = hop.ended or now
    ordered = Span(
        name="remote prefill",
        context=hop.context,
        parent=request.context,
        kind="client",
        began=hop.ordered,
        ended=ended,
        attributes={
            "server.address": host.strip("[]"),
            "server.port": int(port) if port.isdigit() else None,
            "tandem.prefill_worker": hop.worker,
            "tandem.failure": hop.failure,
            "tandem.prompt": number,
        },
        error=None if hop.failure is None else "cancelled" if hop.failure == "cancelled" else "failed",
    )
    if not hop.first_block:
        return [ordered]
    received = Span(
        name="kv receive",
        context=hop.context.child(),
        parent=hop.context,
        began=hop.first_block,
        ended=hop.last_block,
        attributes={"tandem.kv.bytes": hop.num_bytes},
    )
    return [ordered, received]


def _phase(name: str, request: RequestTrace, number: int | None, began: float, ended: float) -> Span:
    return Span(
        name=name,
        context=request.context.child(),
        parent=request.context,
        began=began,
        ended=ended,
        attributes={"tandem.prompt": number},
    )
