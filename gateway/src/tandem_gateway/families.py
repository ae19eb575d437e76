"""Families of Prometheus metrics, made of counters that parts of the gateway keep."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily


def by_label(name: str, text: str, counts: Mapping[str, int], *, label: str = "reason") -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=(label,))
    for value, count in sorted(counts.items()):
        family.add_metric((value,), count)
    return family
