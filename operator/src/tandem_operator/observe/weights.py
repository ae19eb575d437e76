"""In which form a role's workers keep the model's matrices, as they say themselves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from tandem_api.telemetry import WeightsTelemetry

_NAMED = 3


def describe_forms(told: Iterable[WeightsTelemetry]) -> str | None:
    """A form and why, where all say the same, else each with the number of workers, the most frequent first; None where
    nobody has said anything."""
    counts = Counter((each.form, each.why) for each in told)
    if not counts:
        return None
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    if len(ranked) == 1:
        return _join(*ranked[0][0])
    parts = [f"{_join(form, why)} ({count} workers)" for (form, why), count in ranked[:_NAMED]]
    rest = sum(count for _, count in ranked[_NAMED:])
    return "; ".join(parts) + (f"; others ({rest} workers)" if rest else "")


def _join(form: str, why: str) -> str:
    return f"{form}: {why}" if why else form
