"""What the planner remembers: the snapshots of the last minutes, and what it found necessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem_api.names import Role

from tandem_operator.scaling.contract import Decision, Snapshot

KEPT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class History:
    """Immutable: every look makes a new one."""

    snapshots: tuple[Snapshot, ...] = ()
    """The oldest first, those without counters left out."""
    needs: tuple[tuple[float, Mapping[Role, int]], ...] = ()
    """When, and how many replicas were necessary to meet every target."""

    def observe(self, snapshot: Snapshot) -> History:
        """With a snapshot more. One that is not newer than the last changes nothing; counters that went back, because
        gateways were replaced, begin a new history of demand.
        """
        if snapshot.counters is None:
            return self
        kept = self.snapshots
        if kept:
            last = kept[-1]
            if snapshot.at <= last.at:
                return self
            assert last.counters is not None
            if snapshot.counters.requests < last.counters.requests:
                kept = ()
        kept = tuple(one for one in kept if one.at >= snapshot.at - KEPT_SECONDS)
        return replace(self, snapshots=(*kept, snapshot))

    def record(self, decision: Decision) -> History:
        """With what a decision found necessary."""
        if not decision.needs:
            return self
        kept = tuple(entry for entry in self.needs if entry[0] >= decision.at - KEPT_SECONDS)
        return replace(self, needs=(*kept, (decision.at, decision.needs)))

    def most_needed(self, role: Role, since: float) -> int:
        """The most replicas that were necessary at any time since then."""
        return max((needs.get(role, 0) for at, needs in self.needs if at >= since), default=0)

    def warming_since(self, role: Role) -> float | None:
        """Since when replicas of this role have been on their way, without a pause."""
        since = None
        for snapshot in reversed(self.snapshots):
            state = snapshot.roles.get(role)
            if state is None or not state.warming:
                break
            since = snapshot.at
        return since
