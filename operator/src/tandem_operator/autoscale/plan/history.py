"""What the planner remembers: the snapshots of the last hour, and what it found necessary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile

from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import Decision, Snapshot

KEPT_SECONDS = 3600.0
"""A replica's room follows from steps at unequal contexts, which come when replicas change: who forgets them under
steady load thinks replicas smaller, and orders one more.
"""
DEMAND_SECONDS = 900.0
"""What came before says nothing of present demand."""
PAUSE_SECONDS = 120.0
"""Between two snapshots: over a longer one no mean rate is known."""


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

    def lately(self) -> tuple[Snapshot, ...]:
        """Snapshots that tell of demand: not those before a pause in which nobody knows when how much came."""
        first, after = len(self.snapshots), self.snapshots[-1].at if self.snapshots else 0.0
        since = after - DEMAND_SECONDS
        for index in range(len(self.snapshots) - 1, -1, -1):
            at = self.snapshots[index].at
            if at < since or after - at > PAUSE_SECONDS:
                break
            first, after = index, at
        return self.snapshots[first:]

    def record(self, decision: Decision) -> History:
        """With what a decision found necessary."""
        if not decision.needs:
            return self
        kept = tuple(entry for entry in self.needs if entry[0] >= decision.at - KEPT_SECONDS)
        return replace(self, needs=(*kept, (decision.at, decision.needs)))

    def most_needed(self, role: Role, since: float) -> int:
        """The most replicas that were necessary at any time since then."""
        return max((needs.get(role, 0) for at, needs in self.needs if at >= since), default=0)

    def waited(self, role: Role) -> float:
        """For how many seconds replicas of this role have been on their way, without a pause; 0 where none is."""
        since = end = self.snapshots[-1].at if self.snapshots else 0.0
        for snapshot in reversed(self.snapshots):
            state = snapshot.roles.get(role)
            if state is None or not state.warming:
                break
            since = snapshot.at
        return end - since

    def most_held(self, role: Role) -> float:
        """Tokens of context that a replica which decodes has held at most."""
        states = (one.roles[role] for one in self.snapshots if role in one.roles)
        return max((state.kv_tokens_used / max(1, state.decoding or state.ready) for state in states), default=0.0)

    def link_share(self, role: Role, seconds: float) -> float | None:
        """Share of what NVLinks of the busiest GPU can carry, in the mean over the last so many seconds. None: nobody
        tells."""
        end = self.snapshots[-1].at if self.snapshots else 0.0
        lately = takewhile(lambda one: end - one.at < seconds, reversed(self.snapshots))
        shares = [one.roles[role].gpus.link_share for one in lately if role in one.roles]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    def mean_ready(self, role: Role, seconds: float) -> float:
        """Replicas that were ready, in the mean over the last so many seconds."""
        end = self.snapshots[-1].at if self.snapshots else 0.0
        lately = takewhile(lambda one: end - one.at < seconds, reversed(self.snapshots))
        counts = [one.roles[role].ready for one in lately if role in one.roles]
        return sum(counts) / len(counts) if counts else 0.0
