"""Requests that wait for a worker: which is next, and how many a worker is given at once.

The order is that of deadlines, which do not move: who waits for longer comes nearer to the front, and a request
overtakes none that came more than `LONGEST_LEAD` before it. Workers that appear are given few requests at first and
more as they answer: how much one can take is not known before, and others may be about to appear.

Places are shared among sources: where there are no more, one who has fewer than another gets the other's newest.
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

    __slots__ = ("item", "since", "source", "tokens")

    def __init__(self, item: T, since: float, tokens: int, source: str) -> None:
        self.item: T | None = item
        """Who waits; None: not any more."""
        self.since = since
        self.tokens = tokens
        self.source = source


class DeadlineQueue(Generic[T]):
    """Earliest deadline first; of equal ones, who came first. Adding, taking and leaving are O(log n) amortized."""

    __slots__ = ("_heap", "_order", "_sources", "size", "tokens")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket[T]]] = []
        """Tickets of those who left stay until they come up, or until there are more of them than of others."""
        self._order = 0
        self._sources: dict[str, dict[Ticket[T], None]] = {}
        """The tickets of each, the newest last."""
        self.size = 0
        self.tokens = 0
        """Prompt tokens of all who wait."""

    def add(self, item: T, due: float, tokens: int, now: float, source: str = "") -> Ticket[T]:
        ticket = Ticket(item, now, tokens, source)
        self._sources.setdefault(source, {})[ticket] = None
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

    def find_excess(self, source: str) -> Ticket[T] | None:
        """The newest of the source with most places, where that still has no fewer than `source` once this one has
        changed hands; else None. O(sources)."""
        most = max(self._sources.values(), key=len, default=None)
        if most is None or len(most) <= len(self._sources.get(source, ())) + 1:
            return None
        return next(reversed(most))

    def remove(self, ticket: Ticket[T]) -> None:
        """It does not wait any more."""
        if ticket.item is None:
            return
        ticket.item = None
        places = self._sources[ticket.source]
        del places[ticket]
        if not places:
            del self._sources[ticket.source]
        self.size -= 1
        self.tokens -= ticket.tokens
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[2].item is not None]
            heapify(self._heap)


class _Window:
    """What one worker has been given and has not begun to answer, and how much that may be."""

    __slots__ = ("given", "size")

    def __init__(self) -> None:
        self.given = 0
        self.size = FIRST_WINDOW

    @property
    def is_full(self) -> bool:
        return self.given >= self.size


class Slot:
    """One of the requests that a worker has been given and has not begun to answer."""

    __slots__ = ("_window", "endpoint", "since")

    def __init__(self, window: _Window, endpoint: Endpoint, since: float) -> None:
        window.given += 1
        self._window: _Window | None = window
        self.endpoint = endpoint
        self.since = since

    def end(self, *, answered: bool) -> None:
        """The worker has begun its answer, or never will. Safe to call again."""
        window, self._window = self._window, None
        if window is not None:
            window.given -= 1
            window.size += answered


class Ramp:
    """How many requests of the queue each worker has, and may have, that it has not begun to answer.

    A worker's window grows by one with every answer that it begins: it doubles in the time of a first token. One that
    begins none is given no more.
    """

    __slots__ = ("_presumed", "_windows", "full")

    def __init__(self) -> None:
        self._windows: dict[Endpoint, _Window] = {}
        self._presumed: deque[Slot] = deque()
        """Slots of answers in one piece, the oldest first."""
        self.full: set[str] = set()
        """Names of workers that are given no more for now."""

    def begin_turn(self, now: float) -> None:
        """Take note of the time: workers that are gone are forgotten, what must have begun by now counts as begun."""
        presumed = self._presumed
        while presumed and now - presumed[0].since >= PRESUMED_SECONDS:
            slot = presumed.popleft()
            slot.end(answered=slot.endpoint.heard_at > slot.since)
        for endpoint in [endpoint for endpoint in self._windows if endpoint.gone]:
            del self._windows[endpoint]
        self.full = {endpoint.worker.name for endpoint, window in self._windows.items() if window.is_full}

    def take(self, endpoint: Endpoint, now: float, *, stream: bool) -> Slot:
        """It is given one more."""
        window = self._windows.setdefault(endpoint, _Window())
        slot = Slot(window, endpoint, now)
        if window.is_full:
            self.full.add(endpoint.worker.name)
        if not stream:
            self._presumed.append(slot)
        return slot

    def forget(self) -> None:
        """Nobody waits any more: the next queue begins anew, and slots of this one say nothing to it."""
        self._windows.clear()
        self._presumed.clear()
        self.full = set()
