"""Spans to OpenTelemetry's SDK and from there to a collector, as OTLP over HTTP. Loaded where tracing is on, alone.

What the SDK's exporter reads of its environment holds here too: `OTEL_EXPORTER_OTLP_HEADERS`, `_TIMEOUT`,
`_COMPRESSION`, `_CERTIFICATE` and their forms for traces, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Any

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from tandem_api.spans import Span, TraceContext, Value
from tandem_api.version import VERSION

MAX_ANSWER_BYTES = 64 * 1024
ANSWER_SECONDS = 5.0
"""What the body of a collector's answer may take; then the connection is closed."""

_KINDS = {"server": SpanKind.SERVER, "client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}


class _GivenIds(IdGenerator):
    """Spans have their ids before the SDK hears of them: requests carried them on."""

    def __init__(self) -> None:
        self.next = TraceContext("", "")

    def generate_trace_id(self) -> int:
        return int(self.next.trace_id, 16)

    def generate_span_id(self) -> int:
        return int(self.next.span_id, 16)


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class _Session(requests.Session):
    """Reads no more of an answer than a collector has to say: its body is of no use, and may have any size."""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        """Raises what `requests` raises, and InvalidURL where the collector is somewhere else."""
        response = super().request(*arguments, **options, stream=True)
        self._skip_body(response)
        if response.is_redirect:
            where = response.headers["location"][:200]
            raise requests.exceptions.InvalidURL(f"the collector is at {where!r} now; name that as the endpoint")
        return response

    @staticmethod
    def _skip_body(response: requests.Response) -> None:
        deadline, room = monotonic() + ANSWER_SECONDS, MAX_ANSWER_BYTES
        while room > 0 and monotonic() < deadline:
            data = response.raw.read1(room, decode_content=False)
            if not data:
                return  # the connection is there for the next batch
            room -= len(data)
        response.close()


class SpanExport:
    """For one thread."""

    def __init__(self, url: str, service: str, facts: Mapping[str, str]) -> None:
        """Raises what the SDK raises on a variable that it cannot read."""
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
        resource = Resource.create({"service.version": VERSION, **facts, **named})
        self._ids, self._ended = _GivenIds(), _Ended()
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("tandem", VERSION)
        self._exporter = OTLPSpanExporter(endpoint=url, session=_Session())

    def send(self, spans: Sequence[tuple[Span, float]]) -> bool:
        """Whether a collector took them. `spans` come with what makes their times the time of day. Waits for the
        collector as long as its timeout says, and logs why it failed."""
        batch: list[ReadableSpan] = []
        self._ended.spans = batch
        for span, offset in spans:
            self._convert(span, offset)
        return self._exporter.export(batch) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _convert(self, span: Span, offset: float) -> None:
        self._ids.next = span.context
        parent = Context() if span.parent is None else set_span_in_context(_remote(span.parent), Context())
        made = self._tracer.start_span(
            span.name,
            context=parent,
            kind=_KINDS[span.kind],
            attributes={key: value for key, value in span.attributes.items() if _fits(value)},
            links=[Link(_remote(link).get_span_context()) for link in span.links],
            start_time=_nanoseconds(span.began + offset),
        )
        if span.error is not None:
            made.set_attribute("error.type", span.error)
            made.set_status(Status(StatusCode.ERROR))
        made.end(_nanoseconds(max(span.began, span.ended) + offset))


def _fits(value: Value | None) -> bool:
    """Whether it is something that the protocol has room for; numbers may be a client's own."""
    return value is not None and (type(value) is not int or -(2**63) <= value < 2**63)


def _remote(context: TraceContext) -> NonRecordingSpan:
    flags = TraceFlags(TraceFlags.SAMPLED)
    ids = int(context.trace_id, 16), int(context.span_id, 16)
    return NonRecordingSpan(SpanContext(*ids, is_remote=True, trace_flags=flags))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
