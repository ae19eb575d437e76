"""The metric families of one scrape; every sample has the worker's labels beside its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Samples = Sequence[tuple[Mapping[str, str], float | None]]
"""Labels and values."""


class Families:
    """Collects families. A sample whose value is None is left out, together with its family if it has no other."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._families: list[Metric] = []

    def gauge(self, name: str, text: str, value: float | None) -> None:
        """Add a gauge of one sample without labels of its own; `text` is its help line."""
        self.gauges(name, text, [({}, value)])

    def counter(self, name: str, text: str, value: float | None) -> None:
        """Add a counter of one sample; `name` ends in `_total`."""
        self.counters(name, text, [({}, value)])

    def gauges(self, name: str, text: str, samples: Samples) -> None:
        """Add a gauge with a sample for each pair of labels and value."""
        self._add(GaugeMetricFamily(name, text), name, samples)

    def counters(self, name: str, text: str, samples: Samples) -> None:
        """Add a counter with a sample for each pair of labels and value; `name` ends in `_total`."""
        self._add(CounterMetricFamily(name, text), name, samples)

    def histogram(self, histogram: Histogram) -> None:
        """Without the series that says when it was made, a gauge of a name of its own in this format."""
        for found in histogram.collect():
            family = Metric(found.name, found.documentation, found.type)
            for sample in found.samples:
                if not sample.name.endswith("_created"):
                    family.add_sample(sample.name, self._labels | sample.labels, sample.value)
            self._families.append(family)

    def collect(self) -> Iterable[Metric]:
        """As a collector of the library."""
        return self._families

    def text(self) -> str:
        """Prometheus text."""
        return generate_latest(self).decode()

    def _add(self, family: Metric, name: str, samples: Samples) -> None:
        for labels, value in samples:
            if value is not None:
                family.add_sample(name, {**self._labels, **labels}, value)
        if family.samples:
            self._families.append(family)
