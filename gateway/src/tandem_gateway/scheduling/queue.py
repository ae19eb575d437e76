"""Requests that wait for a worker: which is next, and how many a worker is given at once.

The order is that of deadlines, which do not move: who waits for longer comes nearer to the front, and a request
overtakes none that came more than `LONGEST_LEAD` before it. Workers that appear are given few requests at first and
more as they answer: how much one can take is not known before, and others may be about to appear.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

from tandem_api.launch import TTFTDeadline

from tandem_gateway.scheduling.endpoint import Endpoint

LONGEST_LEAD = 10.0
"""Seconds by which a long prompt's deadline may be later than a short one's: short ones that came after it go first
for so long and no longer."""
FIRST_WINDOW = 16
"""Requests without a first token that a worker is given at first: enough for a batch, few of a queue."""
PRESUMED_SECONDS = 1.0
"""An answer in one piece shows no first token: it counts as begun after so long."""

T = TypeVar("T")


def find_due(arrived: float, tokens: int, target: TTFTDeadline | None) -> float:
    """When the first token of a request should be there, for its place in the queue: its arrival without a target."""
    if target is None:
        return arrived
    return arrived + target.seconds + min(LONGEST_LEAD, target.seconds_per_token * tokens)


class Ticket(Generic[T]):
    """A place in the queue."""

    __slots__ = ("item", "since", "tokens")

    def __init__(self, item: T, since: float, tokens: int) -> None:
        self.item: T | None = item
        """Who waits; None: not any more."""
        self.since = since
        self.tokens = tokens


class DeadlineQueue(Generic[T]):
    """Earliest deadline first; of equal ones, who came first. Adding, taking and leaving are O(log n) amortized."""

    __slots__ = ("_heap", "_order", "size", "tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket[T]]] = []
        """Tickets of those who left stay until they come up, or until there are more of them than of others."""
        self._order = 0
        self.size = 0
        self.tokens = 0
        """Prompt tokens of all who wait."""

    def add(self, item: T, due: float, tokens: int, now: float) -> Ticket[T]:
        ticket = Ticket(item, now, tokens)
        self._order += 1
        heappush(self._heap, (due, self._order, ticket))
        self.size += 1
        self.tokens += tokens
        return ticket

    def first(self) -> T | None:
        """Who is next, and stays so until its ticket is given back."""
        heap = self._heap
        while heap and heap[0][2].item is None:
            heappop(heap)
        return heap[0][2].item if heap else None

    def remove(self, ticket: Ticket[T]) -> None:
        """It does not wait any more."""
        if ticket.item is None:
            return
        ticket.item = None
        self.size -= 1
        self.tokens -= ticket.tokens
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[2].item is not None]
            heapify(self._heap)


class Slot:
    """One of the requests that a worker has been given and has not begun to answer."""

    __slots__ = ("_ramp", "endpoint", "since")

    def __init__(self, ramp: Ramp, endpoint: Endpoint, since: float) -> None:
        self._ramp: Ramp | None = ramp
        self.endpoint = endpoint
        self.since = since

    def end(self, *, answered: bool) -> None:
        """The worker has begun its answer, or never will. Safe to call again."""
        ramp, self._ramp = self._ramp, None
        if ramp is not None:
            ramp.give_back(self.endpoint, answered=answered)


class Ramp:
    """How many requests of the queue each worker has, and may have, that it has not begun to answer.

    A worker's window grows by one with every answer that it begins: it doubles in the time of a first token. One that
    begins none is given no more.
    """

    __slots__ = ("_given", "_presumed", "_windows", "full")

    def __init__(self) -> None:
        self._given: dict[Endpoint, int] = {}
        self._windows: dict[Endpoint, int] = {}
        self._presumed: deque[Slot] = deque()
        """Of answers in one piece, the oldest first."""
        self.full: set[str] = set()
        """Names of workers that are given no more for now."""

    def begin_turn(self, now: float) -> None:
        """Take note of the time: workers that are gone are forgotten, what must have begun by now counts as begun."""
        presumed = self._presumed
        while presumed and now - presumed[0].since >= PRESUMED_SECONDS:
            slot = presumed.popleft()
            slot.end(answered=slot.endpoint.heard_at > slot.since)
        for endpoint in [endpoint for endpoint in self._given if endpoint.gone]:
            del self._given[endpoint], self._windows[endpoint]
        self.full = {endpoint.worker.name for endpoint in self._given if self._is_full(endpoint)}

    def take(self, endpoint: Endpoint, now: float, *, stream: bool) -> Slot:
        """It is given one more."""
        self._windows.setdefault(endpoint, FIRST_WINDOW)
        self._given[endpoint] = self._given.get(endpoint, 0) + 1
        if self._is_full(endpoint):
            self.full.add(endpoint.worker.name)
        slot = Slot(self, endpoint, now)
        if not stream:
            self._presumed.append(slot)
        return slot

    def give_back(self, endpoint: Endpoint, *, answered: bool) -> None:
        if endpoint in self._given:
            self._given[endpoint] -= 1
            self._windows[endpoint] += answered

    def forget(self) -> None:
        """Nobody waits any more: the next queue begins anew."""
        self._given.clear()
        self._windows.clear()
        self._presumed.clear()
        self.full = set()

    def _is_full(self, endpoint: Endpoint) -> bool:
        return self._given[endpoint] >= self._windows[endpoint]
