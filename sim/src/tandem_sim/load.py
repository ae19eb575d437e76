"""Sources of requests: a recording, or somebody who waits for answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Protocol

from tandem_sim.traces import Arrival


class Load(Protocol):
    @property
    def total(self) -> int:
        """Requests that there will have been."""
        ...

    @property
    def next_at(self) -> float:
        """When the next request comes; infinite while none is known to come."""
        ...

    def pop(self) -> Arrival:
        """The next request."""
        ...

    def end(self, session: int, at: float) -> None:
        """The answer to a request of this session has ended then."""
        ...


class Recorded:
    """Requests that come when they come, however slowly others are answered."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals = arrivals
        self._index = 0
        self.total = len(arrivals)

    @property
    def next_at(self) -> float:
        return self._arrivals[self._index].at if self._index < self.total else inf

    def pop(self) -> Arrival:
        self._index += 1
        return self._arrivals[self._index - 1]

    def end(self, session: int, at: float) -> None:
        pass
