"""What starts of replicas took, lately. Pure.

A worker tells what its own start took, and Kubernetes what came before: a pod that has to be placed, an image and
volumes that it waits for. Of a worker that does not tell, the time from its creation to Ready stands for both. Waking
up from standby is no start: what is ordered next has nothing loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from statistics import median

from tandem_api.crd.status import StartFigures, StartStatus
from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import COMPONENTS

STANDBY = "standby"
"""`WorkerTelemetry.start_from` of a worker that was woken."""
KEPT = 20
"""Starts of each role, the newest."""


@dataclass(frozen=True, slots=True)
class Start:
    """One that was seen."""

    pod: str
    seconds: float
    own: bool
    """The worker has told it."""


Kept = Mapping[Role, tuple[Start, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Starts:
    """Immutable: every look makes a new one."""

    starts: Kept = field(default_factory=dict[Role, tuple[Start, ...]])
    """The newest last."""
    wakes: Kept = field(default_factory=dict[Role, tuple[Start, ...]])
    """The same from standby."""

    def observe(self, role: Role, pod: str, seconds: float, *, own: bool, wakes: bool = False) -> Starts:
        """With the start of a worker that is ready. One that is known changes nothing; what it tells itself takes the
        place of what was measured from outside."""
        kept = self.wakes if wakes else self.starts
        found = kept.get(role, ())
        if any(one.pod == pod and (one.seconds == seconds or (one.own and not own)) for one in found):
            return self
        others = tuple(one for one in found if not (one.pod == pod and own and not one.own))
        new = {**kept, role: (*others, Start(pod, seconds, own))[-KEPT:]}
        return replace(self, wakes=new) if wakes else replace(self, starts=new)

    def seconds(self, role: Role) -> tuple[float, ...]:
        """What starts took, the newest last."""
        return tuple(one.seconds for one in self.starts.get(role, ()))

    def tell(self, before: StartStatus | None) -> StartStatus | None:
        """For the status. Of what is not known now, as after a restart of the operator, what was told last stays."""
        told: dict[str, StartFigures | None] = {}
        for component, role in COMPONENTS.items():
            told[component] = _measure(self.seconds(role)) or (before and getattr(before, component))
            wakes = _measure([one.seconds for one in self.wakes.get(role, ())])
            told[f"{component}_wake"] = wakes or (before and getattr(before, f"{component}_wake"))
        return StartStatus(**told) if any(told.values()) else None


def _measure(seconds: Sequence[float]) -> StartFigures | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    return StartFigures(
        median_seconds=round(median(ordered), 1),
        p90_seconds=round(ordered[ceil(0.9 * len(ordered)) - 1], 1),
        count=len(ordered),
    )
