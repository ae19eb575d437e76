"""The endpoints of one role and revision, kept so that choosing among them needs no scan.

Endpoints that may be chosen lie in buckets by their load; a bucket spans an eighth of its load, and what is below 64
tokens counts as idle. Whose load has changed by that much since is moved when somebody asks for the least loaded: where
all are candidates anyway, nobody does. Moving, finding the least loaded and knowing the sum of all loads are O(1).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from itertools import chain, islice

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.ring import Ring

_IDLE_TOKENS = 64
_DOUBLINGS = 64
_STARTS = [0] + [
    (_IDLE_TOKENS << doublings) // 8 * (8 + eighth) for doublings in range(_DOUBLINGS) for eighth in range(8)
]
"""The loads at which buckets begin: eight for every doubling, none below 64 tokens. No load comes near the end."""


def find_level(load: float) -> int:
    """The bucket of a load."""
    return bisect_right(_STARTS, load) - 1


def find_range(level: int) -> tuple[int, int]:
    """The loads of a bucket: from the first one to below the second."""
    return _STARTS[level], _STARTS[level + 1]


class Pool:
    """Endpoints of one role and revision."""

    __slots__ = ("_buckets", "_filled", "available", "load", "members", "moved", "ring")

    def __init__(self) -> None:
        self.members: dict[int, Endpoint] = {}
        """Endpoints by serial, also those that may not be chosen now."""
        self.ring = Ring()
        self.available = 0
        """How many may be chosen."""
        self.load = 0.0
        """Sum over those that may be chosen."""
        self._buckets: dict[int, dict[Endpoint, None]] = {}
        self._filled = 0
        """Bit n: bucket n has somebody."""
        self.moved: dict[Endpoint, None] = {}
        """Those that may be chosen whose load has left the range of their level."""

    def add(self, endpoints: list[Endpoint]) -> None:
        self.ring.add(endpoints)
        for endpoint in endpoints:
            self.members[endpoint.serial] = endpoint
            endpoint.pool = self
            self.admit(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        self.bar(endpoint)
        del self.members[endpoint.serial]
        self.ring.remove(endpoint)
        endpoint.pool = None

    def admit(self, endpoint: Endpoint) -> None:
        """It may be chosen."""
        if endpoint.level >= 0:
            return
        self.available += 1
        self.load += endpoint.load
        self._put(endpoint)

    def bar(self, endpoint: Endpoint) -> None:
        """It may not be chosen until it is admitted."""
        if endpoint.level < 0:
            return
        self.available -= 1
        self.load -= endpoint.load
        self._take(endpoint)
        endpoint.level = -1
        self.moved.pop(endpoint, None)

    def find_idle(self, count: int, excluded: Collection[str], start: int = 0) -> list[Endpoint]:
        """The `count` least loaded that may be chosen, by bucket. Within one, `start` says where to begin: gateways
        that hear the same of workers have them in the same order, and would all send to the first.
        """
        if self.moved:
            self._sort()
        found: list[Endpoint] = []
        filled = self._filled
        while filled:
            lowest = filled & -filled
            filled ^= lowest
            bucket: Iterable[Endpoint] = self._buckets[lowest.bit_length() - 1]
            spare = len(self._buckets[lowest.bit_length() - 1]) - count
            if spare > 0 and start:
                first = start % (spare + 1)
                bucket = chain(islice(bucket, first, None), islice(bucket, first))  # who comes last may be excluded
            for endpoint in bucket:
                if not (excluded and endpoint.worker.name in excluded):
                    found.append(endpoint)
                    if len(found) == count:
                        return found
        return found

    def _sort(self) -> None:
        """Each into the bucket of its load, behind those that were there before."""
        for endpoint in self.moved:
            self._take(endpoint)
            self._put(endpoint)
        self.moved.clear()

    def _put(self, endpoint: Endpoint) -> None:
        endpoint.level = level = find_level(endpoint.load)
        endpoint.level_from, endpoint.level_below = find_range(level)
        self._buckets.setdefault(level, {})[endpoint] = None
        self._filled |= 1 << level

    def _take(self, endpoint: Endpoint) -> None:
        bucket = self._buckets[endpoint.level]
        del bucket[endpoint]
        if not bucket:
            self._filled ^= 1 << endpoint.level
