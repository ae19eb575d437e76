"""A collector of traces on loopback: takes what OpenTelemetry's exporter posts, and reads it with OpenTelemetry's own
messages."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

KINDS = {1: "internal", 2: "server", 3: "client"}


@dataclass(frozen=True)
class Seen:
    """A span as it arrived."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    began: int
    """Nanoseconds since 1970."""
    ended: int
    attributes: dict[str, Any]
    resource: dict[str, Any]
    links: list[str]
    """Ids of spans."""
    failed: bool


@dataclass
class Collector:
    url: str
    status: int = 200
    """What it answers."""
    spans: list[Seen] = field(default_factory=list)
    posts: list[dict[str, str]] = field(default_factory=list)
    """Headers of what was posted."""

    def of(self, trace_id: str) -> list[Seen]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def find(self, wanted: Callable[[Seen], bool]) -> list[Seen]:
        return [span for span in list(self.spans) if wanted(span)]


def read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [read_value(item) for item in value.array_value.values]
    return getattr(value, kind)


def read_spans(body: bytes) -> list[Seen]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Seen(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=KINDS[span.kind],
            began=span.start_time_unix_nano,
            ended=span.end_time_unix_nano,
            attributes={each.key: read_value(each.value) for each in span.attributes},
            resource={each.key: read_value(each.value) for each in resource.resource.attributes},
            links=[link.span_id.hex() for link in span.links],
            failed=span.status.code == 2,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@contextlib.contextmanager
def run_collector() -> Iterator[Collector]:
    collector = Collector("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.posts.append({key.lower(): value for key, value in self.headers.items()} | {"path": self.path})
            if collector.status == 200:
                collector.spans.extend(read_spans(body))
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
