"""Traces of requests: whose spans are recorded, and where they go. OpenTelemetry itself is loaded by the thread that
exports, once tracing is switched on; a process that traces nothing never loads it.

A span is recorded when it has ended, with times that were taken anyway. Recording one never waits: what does not fit
into the queue is dropped and counted.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from tandem_api.collectors import check_collector
from tandem_api.launch import TracingConfig
from tandem_api.names import Role
from tandem_api.spans import Span, TraceContext, make_id

log = logging.getLogger(__name__)

MAX_QUEUED = 4096
"""Spans that wait for the exporter. Beyond this new ones are dropped."""
MAX_BATCH = 512
BATCH_SECONDS = 1.0
MAX_SHARE = 0.25
"""Share of a core that exporting may take: clients that have all of their requests traced take no more from the
others."""
CLOSE_SECONDS = 2.0
"""What the spans of the last requests may take at the end of a process."""


def read_environment(environment: Mapping[str, str]) -> TracingConfig | None:
    """Tracing as OpenTelemetry's own variables switch it on; None where they do not.

    Raises:
        ValueError: a variable does not say what it should.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    endpoint = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip()
    endpoint = endpoint or (base and f"{base.rstrip('/')}/v1/traces")
    sampler = environment.get("OTEL_TRACES_SAMPLER", "").strip().lower()
    if not endpoint or environment.get("OTEL_TRACES_EXPORTER", "").strip() == "none":
        return None
    percent = 100.0
    if sampler.endswith("always_off"):
        percent = 0.0
    elif sampler.endswith("traceidratio"):
        ratio = environment.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1"
        try:
            percent = 100 * float(ratio)
        except ValueError:
            percent = -1.0
        if not 0 <= percent <= 100:
            raise ValueError(f"OTEL_TRACES_SAMPLER_ARG is {ratio!r}; write a number from 0 to 1")
    try:
        check_collector(endpoint)
    except ValueError as error:
        raise ValueError(f"OpenTelemetry's endpoint in the environment: {error}") from error
    return TracingConfig(endpoint=endpoint, sampling_percent=percent)


def describe_pod(pod: str, namespace: str, model: str, role: Role) -> dict[str, str]:
    """What every span of a pod says of it."""
    return {
        "service.instance.id": pod,
        "k8s.pod.name": pod,
        "k8s.namespace.name": namespace,
        "tandem.model": model,
        "tandem.role": role.value,
    }


class Tracer:
    """The spans of one process. Any thread may record."""

    def __init__(self, service: str, facts: Mapping[str, str], fallback: TracingConfig | None = None) -> None:
        """`service` and `facts` are told of every span (OpenTelemetry's resource). `fallback` holds while nothing else
        is configured."""
        self._service, self._facts, self._fallback = service, dict(facts), fallback
        self._config: TracingConfig | None = None
        self._threshold = 0
        self._sender: _Sender | None = None
        self.active = False
        """Whether spans are wanted."""
        self.counts: Counter[str] = Counter()
        """Spans by what became of them: `exported`, `queue_full`, `export_failed`. Empty where none were recorded."""
        self.follow(None)

    def follow(self, config: TracingConfig | None) -> None:
        """From now on it is so; None is off, unless the environment has switched it on. What waits is sent still."""
        config = config or self._fallback
        if config == self._config:
            return
        before, self._sender = self._sender, None
        self.active = False
        if before is not None:
            before.end()
        self._config = config
        if config is None:
            log.info("requests are not traced any more")
            return
        self._threshold = int(config.sampling_percent / 100 * 2**64)
        sender = _Sender(config.traces_url, self._service, self._facts, self.counts)
        try:
            sender.start()
        except RuntimeError as error:
            log.error("requests are not traced: %s", error)  # noqa: TRY400 - the system has no thread for it
            self._config = None  # to be tried again
            return
        self._sender, self.active = sender, True
        extra = {"endpoint": config.traces_url, "sampling_percent": config.sampling_percent}
        log.info("requests are traced", extra=extra)

    def begin(self, parent: TraceContext | None) -> TraceContext | None:
        """The first span of this part of a trace; None where the trace is not recorded. A client that names a trace has
        decided that; of the others as many as configured."""
        if self._sender is None:
            return None
        if parent is not None:
            return parent.child() if parent.sampled else None
        trace_id = random.getrandbits(128) or 1
        if trace_id & (2**64 - 1) >= self._threshold:
            return None
        return TraceContext(f"{trace_id:032x}", make_id(64))

    def add(self, spans: Iterable[Span]) -> None:
        """Record spans of one process and trace. Never waits for the exporter."""
        sender = self._sender
        if sender is not None:
            sender.add(list(spans))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what waits, for so long at most; the rest is dropped."""
        sender, self._sender = self._sender, None
        self.active = False
        if sender is not None:
            sender.end()
            sender.join(seconds)


class _Sender:
    """The thread that exports, and the queue before it."""

    def __init__(self, url: str, service: str, facts: Mapping[str, str], counts: Counter[str]) -> None:
        self._url, self._service, self._facts, self._counts = url, service, facts, counts
        self._queue: deque[tuple[Span, float]] = deque()
        """With what is to be added to its times to get the time of day."""
        self._lock = threading.Lock()
        """Guards queue and counts."""
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="trace-export", daemon=True)

    def start(self) -> None:
        """Raises RuntimeError where the system has no thread."""
        self._thread.start()

    def add(self, spans: list[Span]) -> None:
        offset = time.time() - time.monotonic()
        with self._lock:
            room = 0 if self._broken or self._ending.is_set() else MAX_QUEUED - len(self._queue)
            self._queue.extend((span, offset) for span in spans[:room])
            if len(spans) > room:
                self._counts["queue_full"] += len(spans) - room
            full = len(self._queue) >= MAX_BATCH
        if full:
            self._wake.set()

    def end(self) -> None:
        self._ending.set()
        self._wake.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        with self._lock:
            self._drop()

    def _run(self) -> None:
        try:
            from tandem_api.span_export import SpanExport

            export = SpanExport(self._url, self._service, self._facts)
        except Exception:
            log.exception("no span can be exported; requests are served all the same")
            with self._lock:
                self._broken = True
                self._drop()
            return
        over = False
        while not over:
            self._wake.wait(BATCH_SECONDS)
            self._wake.clear()
            over = self._ending.is_set()  # before the last look at the queue
            while batch := self._take():
                began = time.thread_time()
                try:
                    sent = export.send(batch)
                except Exception:  # whatever a span or a library does: the next batch has its chance
                    log.exception("a batch of spans cannot be exported and is dropped")
                    sent = False
                with self._lock:
                    self._counts["exported" if sent else "export_failed"] += len(batch)
                if self._ending.is_set() and not sent:
                    over = True  # a collector that does not answer is not waited for
                    break
                self._ending.wait((time.thread_time() - began) * (1 / MAX_SHARE - 1))
        with self._lock:
            self._drop()
        export.close()

    def _drop(self) -> None:
        """Under the lock: what waits is not sent."""
        if self._queue:
            self._counts["export_failed"] += len(self._queue)
            self._queue.clear()

    def _take(self) -> list[tuple[Span, float]]:
        with self._lock:
            return [self._queue.popleft() for _ in range(min(MAX_BATCH, len(self._queue)))]
