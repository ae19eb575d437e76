"""In what share of the time workers computed, and received keys and values. Pure.

Workers tell totals of seconds. A share is the growth of a total over the time between two samples, which lie far enough
apart that one long prompt, or one long transfer, does not look like a worker that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tandem_api.telemetry import WorkerTelemetry

from tandem_operator.autoscale.plan.contract import SHARE_SECONDS

LEAST_SECONDS = 30.0
"""A shorter time between two samples tells no share."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a worker had counted at some time."""

    at: float
    busy: float | None
    received: float | None


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of time of workers, by pod. Immutable: every look makes a new one."""

    marks: Mapping[str, tuple[Mark, ...]] = field(default_factory=dict[str, tuple[Mark, ...]])
    """The oldest first."""

    def observe(self, samples: Mapping[str, tuple[float, WorkerTelemetry]]) -> Shares:
        """With each worker's sample and when it was taken. A worker that is not among them is forgotten; one whose
        totals went back has begun anew."""
        return Shares({name: self._add(name, *sample) for name, sample in samples.items()})

    def busy(self, names: Iterable[str]) -> float | None:
        """Share of the time in which these workers computed, in the mean. None: nobody tells."""
        found = self._tell(names, lambda mark: mark.busy)
        return sum(found) / len(found) if found else None

    def receiving(self, names: Iterable[str]) -> float | None:
        """Share of the time in which keys and values arrived at the one of these workers where it is largest."""
        return max(self._tell(names, lambda mark: mark.received), default=None)

    def _tell(self, names: Iterable[str], read: Callable[[Mark], float | None]) -> list[float]:
        """The mean of those that tell."""
        found: list[float] = []
        for name in names:
            known = [(mark.at, total) for mark in self.marks.get(name, ()) if (total := read(mark)) is not None]
            if known and (passed := known[-1][0] - known[0][0]) >= LEAST_SECONDS:
                found.append(min(1.0, (known[-1][1] - known[0][1]) / passed))
        return found

    def _add(self, name: str, at: float, sample: WorkerTelemetry) -> tuple[Mark, ...]:
        mark = Mark(at, sample.busy_seconds_total, sample.kv_transfer_seconds_total)
        kept = self.marks.get(name, ())
        if kept and (_fell(mark.busy, kept[-1].busy) or _fell(mark.received, kept[-1].received)):
            kept = ()
        if kept and at <= kept[-1].at:
            return kept
        # One that is older than the window stays, so that the window is covered.
        first = sum(one.at <= at - SHARE_SECONDS for one in kept[1:])
        return (*kept[first:], mark)


def _fell(now: float | None, before: float | None) -> bool:
    return now is not None and before is not None and now < before
