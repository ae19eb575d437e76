"""What finished requests tell: counts by status, time to first token, time per output token."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import Histogram
from tandem_api.telemetry import Metric

from tandem_worker.server.text.output import Usage

_TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TPOT_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """One finished request, for metrics."""

    path: str
    status: int
    """HTTP status; 499 when the client went away."""
    seconds: float
    first_token_seconds: float | None
    usage: Usage | None


class RequestObserver(Protocol):
    def __call__(self, outcome: RequestOutcome) -> None: ...


@dataclass(slots=True)
class RequestMetrics:
    """Any thread."""

    ttft: Histogram = field(
        default_factory=lambda: Histogram(
            Metric.WORKER_TTFT_SECONDS,
            "Time to the first token of streamed answers.",
            buckets=_TTFT_BOUNDS,
            registry=None,  # a worker's figures are its own, not the process's
        )
    )
    tpot: Histogram = field(
        default_factory=lambda: Histogram(
            Metric.WORKER_TPOT_SECONDS,
            "Time per further token of streamed answers.",
            buckets=_TPOT_BOUNDS,
            registry=None,
        )
    )
    _by_status: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record(
        self, *, status: int, seconds: float, first_token_seconds: float | None, num_generated: int, streamed: bool
    ) -> None:
        """One finished request. Only a streamed one shows when its first token was there."""
        with self._lock:
            self._by_status[status] += 1
        if first_token_seconds is None or not streamed or num_generated == 0:
            return
        self.ttft.observe(first_token_seconds)
        if num_generated > 1:
            self.tpot.observe((seconds - first_token_seconds) / (num_generated - 1))

    def by_status(self) -> dict[int, int]:
        """Answers so far by HTTP status; a copy."""
        with self._lock:
            return dict(self._by_status)
