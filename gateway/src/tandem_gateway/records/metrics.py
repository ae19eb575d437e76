"""Counters and histograms of one gateway process, and their Prometheus text.

Observing is a dictionary update; the text is made only when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from tandem_api.telemetry import Metric

from tandem_gateway.families import by_label
from tandem_gateway.paths import INFERENCE_PATHS, MODELS, RESPONSES

_PATHS = INFERENCE_PATHS | {MODELS, f"{RESPONSES}/{{id}}", f"{RESPONSES}/{{id}}/input_items"}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds. From a cached prompt on a fast GPU to a long answer on a CPU."""

RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
"""Buckets for the ratio of what was predicted to what came: 0.8 to 1.25 is right within a fifth or a quarter."""

_CLIENT_GONE = 499
_NONE: Mapping[str, int] = {}


class Histogram:
    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = BUCKETS) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        running = accumulate(self.counts)
        buckets = [(str(bound), count) for bound, count in zip((*self._bounds, "+Inf"), running, strict=True)]
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """Counts by path and status. 499 is a client that went away before its answer was complete."""
        self.retries: Counter[str] = Counter()
        """Counts by what made the retry necessary."""
        self.resumes: Counter[str] = Counter()
        """Streams that went on at another worker, by why."""
        self.failed_resumes: Counter[str] = Counter()
        """Streams that could not, by why not."""
        self.queue_waits: Counter[str] = Counter()
        """Requests that waited for a worker, by how that ended, and those that might not."""
        self.queue_seconds = Histogram()
        self.ttft = Histogram()
        self.prediction = Histogram(RATIOS)
        self.duration = Histogram()

    def count(self, path: str, status: int) -> None:
        """A request was answered. Paths that nothing is behind are one, whatever clients make up."""
        self.requests[path if path in _PATHS else "other", status] += 1

    def count_exchange(
        self, path: str, status: int, seconds: float, ttft: float | None, ratio: float | None = None
    ) -> None:
        """A request to workers has ended, after so many seconds. `ttft`: of them, those before the first token.
        `ratio`: of the predicted to the measured time to the first token.
        """
        self.requests[path, status] += 1
        duration = self.duration
        duration.counts[bisect_left(BUCKETS, seconds)] += 1
        duration.total += seconds
        if ttft is not None:
            first = self.ttft
            first.counts[bisect_left(BUCKETS, ttft)] += 1
            first.total += ttft
        if ratio is not None:
            prediction = self.prediction
            prediction.counts[bisect_left(RATIOS, ratio)] += 1
            prediction.total += ratio

    def count_wait(self, outcome: str, seconds: float) -> None:
        """A request has ended its wait for a worker."""
        self.queue_waits[outcome] += 1
        self.queue_seconds.counts[bisect_left(BUCKETS, seconds)] += 1
        self.queue_seconds.total += seconds

    def render(
        self,
        *,
        endpoints: Mapping[tuple[str, str], int],
        tokens: Mapping[str, int],
        in_flight: int = 0,
        queued: int = 0,
        failures: Mapping[str, int] = _NONE,
        ejections: Mapping[str, int] = _NONE,
        canary: Mapping[tuple[bool, bool], int] | None = None,
        telemetry: Mapping[str, int] = _NONE,
        spans: Mapping[str, int] = _NONE,
        more: Iterable[Family] = (),
    ) -> bytes:
        """Prometheus text. `endpoints` counts by role and state, `tokens` are in flight by kind, and so are requests;
        `queued` of them wait for a worker, `failures` and `ejections` of workers are by reason, `canary` by whether its
        workers served and whether they did in others' stead, `telemetry` reads of samples by how they ended, `spans` by
        what became of them, `more` what other parts tell.
        """
        registry = CollectorRegistry()
        by_reason = [
            by_label(Metric.GATEWAY_WORKER_FAILURES_TOTAL, "Attempts at workers that failed, by reason.", failures),
            by_label(Metric.GATEWAY_EJECTIONS_TOTAL, "Workers left out for a while, by reason.", ejections),
        ]
        sides = CounterMetricFamily(
            Metric.GATEWAY_CANARY_REQUESTS_TOTAL, "Requests sent to workers while there was a canary.",
            labels=("side", "moved"),
        )  # fmt: skip
        for (side, moved), count in sorted((canary or {}).items()):
            sides.add_metric(("canary" if side else "others", "true" if moved else "false"), count)
        reads = by_label(
            Metric.GATEWAY_TELEMETRY_READS_TOTAL,
            "Reads of workers' telemetry, by how they ended.",
            telemetry,
            label="result",
        )
        waits = by_label(
            Metric.GATEWAY_QUEUE_WAITS_TOTAL,
            "Requests that waited for a worker, by how that ended.",
            self.queue_waits,
            label="outcome",
        )
        queue = [
            GaugeMetricFamily(Metric.GATEWAY_QUEUE_REQUESTS, "Requests that wait for a worker.", value=queued),
            waits,
            self.queue_seconds.family(Metric.GATEWAY_QUEUE_SECONDS, "How long requests waited for a worker."),
        ]
        traced = by_label(
            Metric.GATEWAY_TRACE_SPANS_TOTAL, "Spans of traced requests, by what became of them.", spans,
            label="outcome",
        )  # fmt: skip
        more = (*([traced] if spans else []), *more)
        own = self._families(endpoints, tokens, in_flight)
        registry.register(_Snapshot([*own, *by_reason, sides, reads, *queue, *more]))
        return generate_latest(registry)

    def _families(
        self, endpoints: Mapping[tuple[str, str], int], tokens: Mapping[str, int], in_flight: int
    ) -> list[Family]:
        requests = CounterMetricFamily(
            Metric.GATEWAY_REQUESTS_TOTAL, "Requests answered, by path and status.", labels=("path", "code")
        )
        for (path, code), count in sorted(self.requests.items()):
            requests.add_metric((path, str(code)), count)
        retries = by_label(Metric.GATEWAY_RETRIES_TOTAL, "Requests sent to another worker, by reason.", self.retries)
        resumes = by_label(
            Metric.GATEWAY_RESUMES_TOTAL, "Streams that went on at another worker, by why they had to.", self.resumes
        )
        failed = by_label(
            Metric.GATEWAY_FAILED_RESUMES_TOTAL,
            "Streams that broke off because they could not go on at another worker, by why not.",
            self.failed_resumes,
        )
        outstanding = GaugeMetricFamily(
            Metric.GATEWAY_TOKENS_IN_FLIGHT, "Estimated tokens sent to workers and not yet computed.", labels=("kind",)
        )
        for kind, count in sorted(tokens.items()):
            outstanding.add_metric((kind,), count)
        known = GaugeMetricFamily(
            Metric.GATEWAY_ENDPOINTS, "Workers known, by role and state.", labels=("role", "state")
        )
        for labels, count in sorted(endpoints.items()):
            known.add_metric(labels, count)
        return [
            requests, retries, resumes, failed, outstanding, known,
            CounterMetricFamily(
                Metric.GATEWAY_CLIENT_DISCONNECTS_TOTAL, "Clients that left before their answer ended.",
                value=sum(count for (_, status), count in self.requests.items() if status == _CLIENT_GONE),
            ),
            GaugeMetricFamily(Metric.GATEWAY_REQUESTS_IN_FLIGHT, "Requests not yet ended.", value=in_flight),
            self.ttft.family(
                Metric.GATEWAY_TTFT_SECONDS, "From a request's last byte to the first of its stream."
            ),
            self.prediction.family(
                Metric.GATEWAY_TTFT_PREDICTION_RATIO,
                "Predicted over measured time from sending a request to the first of its stream.",
            ),
            self.duration.family(
                Metric.GATEWAY_DURATION_SECONDS, "From a request's last byte to its answer's last."
            ),
        ]  # fmt: skip


class _Snapshot(Collector):
    """What `prometheus_client` turns into text."""

    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families
