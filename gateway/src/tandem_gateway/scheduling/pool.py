"""The endpoints of one role and revision, kept so that choosing among them needs no scan.

Endpoints that may be chosen lie in buckets by their load; a bucket spans an eighth of its load, and what is below 64
tokens counts as idle. Moving on a change of load, finding the least loaded and knowing the sum of all loads are O(1).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.ring import Ring

_FINE_BITS = 3
_IDLE_BITS = 6


def find_level(load: float) -> int:
    """The bucket of a load: eight for every doubling, none below 64 tokens."""
    tokens = int(load)
    bits = tokens.bit_length()
    if bits <= _IDLE_BITS:
        return 0
    return ((bits - _IDLE_BITS) << _FINE_BITS) + ((tokens >> (bits - 1 - _FINE_BITS)) & 7) - 7


def find_range(level: int) -> tuple[int, int]:
    """The loads of a bucket: from the first one to below the second."""
    if level == 0:
        return 0, 1 << _IDLE_BITS
    doublings, eighth = divmod(level - 1, 1 << _FINE_BITS)
    width = 1 << doublings + _IDLE_BITS - _FINE_BITS
    start = (1 << doublings + _IDLE_BITS) + eighth * width
    return start, start + width


class Pool:
    """Endpoints of one role and revision."""

    __slots__ = ("_buckets", "_filled", "available", "load", "members", "ring")

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
        self._put(endpoint, find_level(endpoint.load))

    def bar(self, endpoint: Endpoint) -> None:
        """It may not be chosen until it is admitted."""
        if endpoint.level < 0:
            return
        self.available -= 1
        self.load -= endpoint.load
        self._take(endpoint)
        endpoint.level = -1

    def relevel(self, endpoint: Endpoint) -> None:
        """Its load has left the range of its level."""
        self._take(endpoint)
        self._put(endpoint, find_level(endpoint.load))

    def find_idle(self, count: int, excluded: Collection[str], start: int = 0) -> list[Endpoint]:
        """The `count` least loaded that may be chosen, by bucket. Within one, `start` says where to begin: gateways
        that hear the same of workers have them in the same order, and would all send to the first.
        """
        found: list[Endpoint] = []
        filled = self._filled
        while filled:
            lowest = filled & -filled
            filled ^= lowest
            bucket: Iterable[Endpoint] = self._buckets[lowest.bit_length() - 1]
            spare = len(self._buckets[lowest.bit_length() - 1]) - count
            if spare > 0 and start:
                bucket = islice(bucket, start % (spare + 1), None)
            for endpoint in bucket:
                if not (excluded and endpoint.worker.name in excluded):
                    found.append(endpoint)
                    if len(found) == count:
                        return found
        return found

    def _put(self, endpoint: Endpoint, level: int) -> None:
        endpoint.level = level
        endpoint.level_from, endpoint.level_below = find_range(level)
        bucket = self._buckets.get(level)
        if bucket is None:
            bucket = self._buckets[level] = {}
        bucket[endpoint] = None
        self._filled |= 1 << level

    def _take(self, endpoint: Endpoint) -> None:
        level = endpoint.level
        bucket = self._buckets[level]
        del bucket[endpoint]
        if not bucket:
            self._filled &= ~(1 << level)
