"""Counters and histograms of one gateway process, and their Prometheus text.

Observing is a dictionary update; the text is made only when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping

from tandem_api.telemetry import Metric

from tandem_gateway.prompt import INFERENCE_PATHS, MODELS

_PATHS = INFERENCE_PATHS | {MODELS}
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds. From a cached prompt on a fast GPU to a long answer on a CPU."""


class Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Metrics:
    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        """By path and status. 499 is a client that went away before its answer was complete."""
        self.retries: Counter[str] = Counter()
        """By what made the retry necessary."""
        self.disconnects = 0
        self.in_flight = 0
        self.ttft = Histogram()
        self.duration = Histogram()

    def count(self, path: str, status: int) -> None:
        """A request was answered. Paths that nothing is behind are one, whatever clients make up."""
        self.requests[path if path in _PATHS else "other", status] += 1

    def render(self, *, endpoints: Mapping[tuple[str, str], int], tokens: Mapping[str, int]) -> str:
        """Prometheus text. `endpoints` counts by role and state, `tokens` are in flight by kind."""
        lines: list[str] = []
        _family(
            lines, Metric.GATEWAY_REQUESTS_TOTAL, "counter", "Requests answered, by path and status.",
            ((f'path="{path}",code="{code}"', count) for (path, code), count in sorted(self.requests.items())),
        )  # fmt: skip
        _family(
            lines, Metric.GATEWAY_RETRIES_TOTAL, "counter", "Requests sent to another worker, by reason.",
            ((f'reason="{reason}"', count) for reason, count in sorted(self.retries.items())),
        )  # fmt: skip
        _family(
            lines, Metric.GATEWAY_CLIENT_DISCONNECTS_TOTAL, "counter", "Clients that left before their answer ended.",
            [("", self.disconnects)],
        )  # fmt: skip
        _family(lines, Metric.GATEWAY_REQUESTS_IN_FLIGHT, "gauge", "Requests not yet ended.", [("", self.in_flight)])
        _family(
            lines, Metric.GATEWAY_TOKENS_IN_FLIGHT, "gauge", "Estimated tokens sent to workers and not yet computed.",
            ((f'kind="{kind}"', value) for kind, value in sorted(tokens.items())),
        )  # fmt: skip
        _family(
            lines, Metric.GATEWAY_ENDPOINTS, "gauge", "Workers known, by role and state.",
            ((f'role="{role}",state="{state}"', value) for (role, state), value in sorted(endpoints.items())),
        )  # fmt: skip
        _histogram(lines, Metric.GATEWAY_TTFT_SECONDS, "From a request's last byte to its answer's first.", self.ttft)
        _histogram(
            lines, Metric.GATEWAY_DURATION_SECONDS, "From a request's last byte to its answer's last.", self.duration
        )
        return "\n".join(lines) + "\n"


def _family(lines: list[str], name: str, kind: str, text: str, samples: Iterable[tuple[str, int]]) -> None:
    lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
    lines += (f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for labels, value in samples)


def _histogram(lines: list[str], name: str, text: str, histogram: Histogram) -> None:
    lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
    running = 0
    for bound, count in zip((*BUCKETS, "+Inf"), histogram.counts, strict=True):
        running += count
        lines.append(f'{name}_bucket{{le="{bound}"}} {running}')
    lines += (f"{name}_sum {histogram.total:.6f}", f"{name}_count {running}")
