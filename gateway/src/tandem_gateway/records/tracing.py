"""The spans of an exchange: the request, its waits, and each attempt with the decision that it went by.

Only exchanges that are traced have one of these; the others pay for a look whether they do.
"""

from __future__ import annotations

from time import monotonic
from typing import Any

from tandem_api.spans import Span, TraceContext, Value, read_context
from tandem_api.tracing import Tracer

from tandem_gateway.http.sse import find_cached
from tandem_gateway.paths import COMPLETIONS, EMBEDDINGS, GENERATES
from tandem_gateway.records.contract import RecordedExchange
from tandem_gateway.scheduling import Choice

PROVIDER = "tandem"
TRACE_PARENT = b"traceparent"
MAX_SPANS = 64
"""Spans of one request: one that is refused again and again until its time is over has no more."""
_TRACE_STATE = b"tracestate"


class ExchangeTrace:
    __slots__ = ("_attempt", "_attempt_began", "_choice", "_context", "_last", "_num_attempts", "_parent", "_resumes",
                 "_spans", "_tracer", "_waits_since")  # fmt: skip

    def __init__(self, tracer: Tracer, context: TraceContext, parent: TraceContext | None) -> None:
        self._tracer, self._context, self._parent = tracer, context, parent
        self._spans: list[Span] = []
        self._waits_since = 0.0
        self._attempt: TraceContext | None = None
        """The one that has not ended."""
        self._last: TraceContext | None = None
        """The one before."""
        self._attempt_began = 0.0
        self._choice: Choice | None = None
        self._num_attempts = 0
        self._resumes = False

    def queued(self) -> None:
        """It waits for a worker."""
        self._waits_since = self._waits_since or monotonic()

    def left_queue(self, outcome: str) -> None:
        since, self._waits_since = self._waits_since, 0.0
        self._add("queue", since, {"tandem.queue.outcome": outcome})

    def chose(self, exchange: RecordedExchange, choice: Choice, began: float, *, resumes: bool) -> None:
        """An attempt begins: what goes to the worker names it as the parent. `began`: the decision, monotonic."""
        canary = exchange.inquiry.canary
        self._add(
            "route",
            began,
            {
                "tandem.route.decode": choice.decode.worker.name,
                "tandem.route.prefill": [endpoint.worker.name for endpoint in choice.prefill] or None,
                "tandem.route.converted": exchange.converted or None,
                "tandem.route.revision": choice.decode.worker.revision,
                "tandem.route.candidates": sum(len(offer[4]) + len(offer[5]) for offer in choice.offers),
                "tandem.route.cached_tokens": choice.cached_tokens,
                "tandem.route.uncached_tokens": choice.uncached_tokens,
                "tandem.route.predicted_ttft": choice.expected,
                "tandem.route.canary": canary,
            },
        )
        self._attempt = self._context.child()
        self._attempt_began, self._choice, self._resumes = monotonic(), choice, resumes
        self._num_attempts += 1
        exchange.request.headers[TRACE_PARENT] = self._attempt.header.encode()

    def attempt_ended(self, exchange: RecordedExchange, error: str | None, status: int | None) -> None:
        """`error`: in one word, why it has to be tried again or has failed."""
        attempt, choice, request = self._attempt, self._choice, exchange.request
        if attempt is None or choice is None:
            return
        before, self._last, self._attempt = self._last, attempt, None
        if len(self._spans) >= MAX_SPANS:
            return
        host, _, port = choice.decode.worker.address.rpartition(":")
        resent = self._num_attempts - 1
        method = request.method.decode("latin-1")
        self._spans.append(
            Span(
                name=f"{method} {request.path}",
                context=attempt,
                parent=self._context,
                kind="client",
                began=self._attempt_began,
                ended=monotonic(),
                attributes={
                    "http.request.method": method,
                    "http.request.resend_count": resent or None,
                    "http.response.status_code": status,
                    "url.path": request.path,
                    "server.address": host.strip("[]"),
                    "server.port": int(port) if port.isdigit() else None,
                    "tandem.worker": choice.decode.worker.name,
                    "tandem.revision": choice.decode.worker.revision,
                    "tandem.resumed": self._resumes or None,
                },
                # A stream that goes on elsewhere follows from the attempt before.
                links=(before,) if self._resumes and before is not None else (),
                error=error,
            )
        )

    def end(self, exchange: RecordedExchange, model: str, now: float) -> None:
        """The exchange is over. `now` is monotonic."""
        failed = exchange.error or (str(exchange.status) if exchange.status >= 400 else None)
        self.attempt_ended(exchange, failed, exchange.answered_status)
        operation = _operation(exchange.request.path)
        model = exchange.inquiry.model or model
        self._spans.append(
            Span(
                name=f"{operation} {model}",
                context=self._context,
                parent=self._parent,
                kind="server",
                began=exchange.started_at,
                ended=now,
                attributes=self._describe(exchange, operation, model),
                # What the client did wrong is no failure of this server: only then is the span an error.
                error=failed if exchange.status >= 500 or exchange.error is not None else None,
            )
        )
        self._tracer.add(self._spans)

    def _add(self, name: str, began: float, attributes: dict[str, Value | None]) -> None:
        if len(self._spans) < MAX_SPANS:
            context = self._context
            self._spans.append(
                Span(name=name, context=context.child(), parent=context, began=began, ended=monotonic(),
                     attributes=attributes)
            )  # fmt: skip

    def _describe(self, exchange: RecordedExchange, operation: str, model: str) -> dict[str, Value | None]:
        usage, first = exchange.usage or {}, exchange.first_byte_at
        answered = model if exchange.status == 200 else None
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": answered,
            "gen_ai.request.max_tokens": exchange.inquiry.max_tokens,
            "gen_ai.request.stream": exchange.inquiry.stream,
            "gen_ai.response.time_to_first_chunk": first - exchange.started_at if first else None,
            "gen_ai.usage.input_tokens": _number(usage.get("prompt_tokens")),
            "gen_ai.usage.cache_read.input_tokens": find_cached(usage),
            "gen_ai.usage.output_tokens": _number(usage.get("completion_tokens")),
            "http.request.method": exchange.request.method.decode("latin-1"),
            "http.response.status_code": exchange.status,
            "url.path": exchange.request.path,
            "tandem.request_id": exchange.request_id.decode("latin-1"),
            "tandem.attempts": exchange.attempts,
            "tandem.resumes": exchange.resumes,
            "tandem.queue.seconds": exchange.queue_seconds or None,
        }


def begin_trace(tracer: Tracer, headers: dict[bytes, bytes]) -> ExchangeTrace | None:
    """The trace of a request with these headers; None where it is not recorded. Where it is, logs and workers read the
    context of its first span in `traceparent`."""
    given = headers.get(TRACE_PARENT)
    parent = None if given is None else read_context(given)
    context = tracer.begin(parent)
    if context is None:
        return None
    headers[TRACE_PARENT] = context.header.encode()
    if parent is None:
        headers.pop(_TRACE_STATE, None)  # it belongs to a trace that nobody can read
    return ExchangeTrace(tracer, context, parent)


def _operation(path: str) -> str:
    """As the GenAI conventions name it; for what they have no name, the last word of the path."""
    if path == COMPLETIONS:
        return "text_completion"
    if path in GENERATES:
        return "chat"
    return "embeddings" if path == EMBEDDINGS else path.rpartition("/")[2]


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
