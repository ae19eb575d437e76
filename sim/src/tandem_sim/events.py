"""What is to happen, by time."""

from __future__ import annotations

from heapq import heappop, heappush

from tandem_sim.workers import NEVER


class Events:
    """A heap; of events at one time the one that was planned first comes first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, object, int]] = []
        self._order = 0

    @property
    def next_at(self) -> float:
        """When the next one is; infinite: there is none."""
        return self._heap[0][0] if self._heap else NEVER

    def plan(self, at: float, kind: int, subject: object, version: int = 0) -> None:
        self._order += 1
        heappush(self._heap, (at, self._order, kind, subject, version))

    def pop(self) -> tuple[float, int, object, int]:
        at, _, kind, subject, version = heappop(self._heap)
        return at, kind, subject, version
