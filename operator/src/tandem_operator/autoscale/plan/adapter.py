"""The planner as a class that any simulator can drive: `period` and `decide(now, snapshot)`."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import Decision, ScalingSpec, Snapshot
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.planner import plan


class Autoscaler:
    """Keeps the history between two decisions, and the last decision to read."""

    def __init__(self, spec: ScalingSpec, *, period: float = 5.0) -> None:
        self.spec = spec
        self.period = period
        """Seconds between two calls of `decide`."""
        self.last: Decision | None = None
        self._history = History()

    def decide(self, now: float, snapshot: Snapshot | None) -> Mapping[Role, int]:
        """Replicas per role, by the clock of `snapshot.at`. Empty: nothing is known, leave what there is."""
        if snapshot is not None:
            self._history = self._history.observe(snapshot)
        self.last = plan(self.spec, snapshot, self._history, now)
        self._history = self._history.record(self.last)
        return self.last.replicas
