"""What pods were there and when, what they could serve, and between which builds blocks went. Pure: fed with events.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from typing import Literal

from tandem_api.names import LABEL_NODES_PER_REPLICA, LABEL_REVISION, LABEL_ROLE

from e2e.suite.fleet import Object, is_ready
from e2e.suite.load import LoadOutcome

SLACK = 1.0
"""Seconds by which an event may be seen late."""
Meeting = Literal["none", "same", "between", "unsure"]


@dataclass(slots=True)
class Life:
    """One pod from the first to the last time that it was seen."""

    name: str
    role: str
    build: str
    nodes: int
    ready: bool = False
    able: float | None = None
    """Since when its containers answer: from then on gateways may send it requests."""
    gone: float | None = None

    @property
    def replica(self) -> int:
        return int(self.name.rpartition("-")[2]) // self.nodes

    def could_serve(self, start: float, end: float) -> bool:
        return self.able is not None and self.able - SLACK <= end and (self.gone is None or self.gone + SLACK >= start)


def containers_ready(pod: Object) -> bool:
    return any(
        c["type"] == "ContainersReady" and c["status"] == "True" for c in pod.get("status", {}).get("conditions", [])
    )


@dataclass(slots=True)
class Evidence:
    """Worker pods of one model, as a watch tells of them, and the capacity after each event."""

    wanted: Mapping[str, int]
    """Replicas of each role."""
    lives: dict[str, Life] = field(default_factory=dict[str, Life])
    """By uid."""
    levels: list[tuple[float, Fraction]] = field(default_factory=list[tuple[float, Fraction]])
    """Capacity since each time that it changed."""

    def see(self, kind: str, pod: Object, now: float) -> None:
        """One event of a watch: ADDED, MODIFIED or DELETED."""
        labels = pod["metadata"].get("labels", {})
        role = labels.get(LABEL_ROLE)
        if role not in self.wanted:
            return
        life = self.lives.setdefault(
            pod["metadata"]["uid"],
            Life(
                name=pod["metadata"]["name"],
                role=role,
                build=labels.get(LABEL_REVISION, ""),
                nodes=int(labels.get(LABEL_NODES_PER_REPLICA, 1)),
            ),
        )
        if kind == "DELETED":
            life.gone = life.gone or now
        if life.able is None and containers_ready(pod):
            life.able = now
        life.ready = kind != "DELETED" and is_ready(pod)
        level = self.capacity()
        if self.level != level:
            self.levels.append((now, level))

    @property
    def level(self) -> Fraction:
        """Capacity after the last event."""
        return self.levels[-1][1] if self.levels else Fraction(0)

    def capacity(self) -> Fraction:
        """Share of the model that complete pairs of one build can serve now; at most 1."""
        groups: defaultdict[tuple[str, str, int], int] = defaultdict(int)
        sizes: dict[tuple[str, str, int], int] = {}
        for life in self.lives.values():
            if life.ready and life.gone is None:
                key = (life.build, life.role, life.replica)
                groups[key] += 1
                sizes[key] = life.nodes
        ready: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for build, role, _ in (key for key, count in groups.items() if count == sizes[key]):
            ready[build][role] += 1
        shares = (min(Fraction(roles[role], n) for role, n in self.wanted.items()) for roles in ready.values())
        return min(Fraction(1), sum(shares, Fraction(0)))

    def lowest(self, start: float, end: float) -> Fraction:
        """Of the capacity between two times."""
        return min((level for _, until, level in self._spans(end) if until > start), default=Fraction(0))

    def seconds_below(self, promise: Fraction, start: float, end: float) -> float:
        return sum(
            max(0.0, min(until, end) - max(since, start)) for since, until, level in self._spans(end) if level < promise
        )

    def _spans(self, end: float) -> Iterable[tuple[float, float, Fraction]]:
        ends = [since for since, _ in self.levels[1:]] + [end]
        for (since, level), until in zip(self.levels, ends, strict=True):
            if since <= end:
                yield since, until, level

    def meeting(self, outcome: LoadOutcome) -> Meeting:
        """Whether blocks went between builds for a request: by the pods that its answer names, and those that had these
        names between its start and its first token. `unsure` where a name had two builds in that time, or none."""
        decode, prefill = outcome.decode_worker, outcome.prefill_worker
        if decode is None or prefill is None or decode == prefill:
            return "none"
        first = outcome.seconds if outcome.first_token_seconds is None else outcome.first_token_seconds
        found = [self._builds(name, outcome.started, outcome.started + first) for name in (decode, prefill)]
        pairs = {mine == theirs for mine, theirs in product(*found)}
        if pairs == {True}:
            return "same"
        return "between" if pairs == {False} else "unsure"

    def _builds(self, name: str, start: float, end: float) -> set[str]:
        return {life.build for life in self.lives.values() if life.name == name and life.could_serve(start, end)}
