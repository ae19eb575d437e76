"""Prometheus text format 0.0.4: as much of it as a worker needs. Pure, but for the histograms' state."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence


class Histogram:
    """Observations in fixed buckets. Any thread."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self.bounds, value)] += 1
            self._sum += value

    def snapshot(self) -> tuple[list[int], float]:
        """Observations per bucket (the last one is above every bound) and their sum."""
        with self._lock:
            return list(self._counts), self._sum


class Exposition:
    """Collects lines. A sample whose value is None is left out, together with its metric if it has no other."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._lines: list[str] = []

    def gauge(self, name: str, text: str, value: float | None) -> None:
        self.samples(name, text, "gauge", [({}, value)])

    def counter(self, name: str, text: str, value: float | None) -> None:
        self.samples(name, text, "counter", [({}, value)])

    def samples(
        self, name: str, text: str, kind: str, samples: Sequence[tuple[Mapping[str, str], float | None]]
    ) -> None:
        known = [(labels, value) for labels, value in samples if value is not None]
        if known:
            self._head(name, text, kind)
            self._lines += [f"{name}{self._braces(labels)} {_number(value)}" for labels, value in known]

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        counts, total = histogram.snapshot()
        self._head(name, text, "histogram")
        running = 0
        for bound, count in zip((*histogram.bounds, float("inf")), counts, strict=True):
            running += count
            self._lines.append(f"{name}_bucket{self._braces({'le': _number(bound)})} {running}")
        self._lines.append(f"{name}_sum{self._braces({})} {_number(total)}")
        self._lines.append(f"{name}_count{self._braces({})} {running}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def _head(self, name: str, text: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _braces(self, labels: Mapping[str, str]) -> str:
        pairs = ",".join(f'{key}="{_escape(value)}"' for key, value in (self._labels | dict(labels)).items())
        return f"{{{pairs}}}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return str(int(value)) if float(value).is_integer() else repr(float(value))
