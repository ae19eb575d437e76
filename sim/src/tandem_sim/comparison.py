"""Whether to disaggregate: prefill and decode apart against workers that do both, at equal GPUs, over the rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from tandem_sim.capacity import Trial, Trials, find_chunk, find_split
from tandem_sim.shapes import build_constant, play
from tandem_sim.workload import Workload

SATURATED = 0.5
"""All attain less: higher rates tell nothing new."""
KINDS = ("disaggregated", "convertible", "aggregated")
STEP = 1.25
"""From one rate to the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The best of each kind at one rate."""

    load: float
    """Multiple of the trace's own pace."""
    requests_per_second: float
    apart: Trial
    """Prefill and decode."""
    convertible: Trial
    """The same, with decode workers that compute short prompts while prefill is behind."""
    both: Trial
    """Workers that do both."""

    @property
    def trials(self) -> tuple[Trial, Trial, Trial]:
        """In the order of KINDS."""
        return self.apart, self.convertible, self.both

    def row(self) -> dict[str, object]:
        row: dict[str, object] = {"load": self.load, "requests_per_second": self.requests_per_second}
        for name, trial in zip(KINDS, self.trials, strict=True):
            row[name] = asdict(trial.fleet) | trial.seen.row()
        return row


def compare(
    workload: Workload, replicas: int, *, seconds: float, loads: Sequence[float] | None = None, around: float = 1.0,
    tell: Callable[[str, float], None] | None = None,
) -> list[Rate]:  # fmt: skip
    """At each of the loads, or from 0.4 of `around` up to saturation; some minutes of steady load each."""
    rates: list[Rate] = []
    share = 0.6
    for load in loads or _climb(around):
        arrivals = play(workload.recording, build_constant(seconds), load)
        trials = Trials(workload, arrivals, tell=None if tell is None else partial(_tell, tell, load))
        apart = find_split(trials, replicas, share)
        share = apart.fleet.prefills / replicas
        rate = Rate(
            load=round(load, 4), requests_per_second=round(len(arrivals) / seconds, 4), apart=apart,
            convertible=find_split(trials, replicas, share, convertible=True), both=find_chunk(trials, replicas),
        )  # fmt: skip
        rates.append(rate)
        if loads is None and max(trial.seen.attainment for trial in rate.trials) < SATURATED:
            break
    return rates


def _tell(tell: Callable[[str, float], None], load: float, name: str, share: float) -> None:
    tell(f"{load:.2f} of the trace's pace on {name}", share)


def _climb(around: float) -> list[float]:
    return [around * STEP**step for step in range(-4, 16)]


def find_goodput(points: Sequence[tuple[float, float]], goal: float) -> float:
    """The highest rate at which the goal is attained, of (rate, attainment) by rate; linear in between, 0 for none."""
    enough = [index for index, (_, attained) in enumerate(points) if attained >= goal]
    if not enough:
        return 0.0
    low, good = points[enough[-1]]
    if enough[-1] + 1 == len(points):
        return low
    high, bad = points[enough[-1] + 1]
    return low + (high - low) * (good - goal) / (good - bad)


def judge(rates: Sequence[Rate], goal: float) -> dict[str, object]:
    """How many requests per second each kind serves within the targets, and which is to be preferred."""
    served = {
        kind: find_goodput([(rate.requests_per_second, rate.trials[index].seen.attainment) for rate in rates], goal)
        for index, kind in enumerate(KINDS)
    }
    apart, both = max(served["disaggregated"], served["convertible"]), served["aggregated"]
    better = "disaggregated" if apart > both else "aggregated"
    if max(apart, both) <= 1.05 * min(apart, both):
        better = "either"
    verdict: dict[str, object] = {kind: round(rate, 3) for kind, rate in served.items()}
    return verdict | {"better": better}
