"""The homes of sessions: a consistent-hash ring, the same in every gateway process without any talk.

Every endpoint owns a fixed number of points that follow from its name; a session's homes are the owners of the points
that come next after its own. When an endpoint leaves, only its own sessions move. Joining costs O(points log n), a look
at the ring O(log n): ranking every endpoint for every request (rendezvous hashing) costs O(n).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from operator import itemgetter

from xxhash import xxh3_64_intdigest

from tandem_gateway.scheduling.endpoint import Endpoint

POINTS = 64
"""Per endpoint: shares of the ring differ by about 1/sqrt(64), which bounded load evens out."""
MAX_HOMES = 2
"""Homes of a session: where it belongs, and where it goes when that has too much to do."""
MAX_STEPS = 64
"""Points looked at for one session, so that a ring of which most endpoints are out is no scan."""
MAX_REMEMBERED = 4096
"""Sessions whose homes are remembered, about 1 MB: a search goes through memory that nothing else touches."""
_FEW = 8
"""Endpoints that join one by one; more are sorted in together."""


build_seed = xxh3_64_intdigest
"""From a session's name to the number that stands for it."""


class Ring:
    """Points in order, and who owns them."""

    __slots__ = ("_homes", "_owners", "_points")

    def __init__(self) -> None:
        self._points: list[int] = []
        self._owners: list[Endpoint] = []
        self._homes: dict[int, list[Endpoint]] = {}
        """The homes of sessions, if everybody may be chosen; forgotten when the ring changes."""

    def add(self, endpoints: list[Endpoint]) -> None:
        self._homes.clear()
        if len(endpoints) > _FEW:
            joined = [*zip(self._points, self._owners, strict=True)]
            joined += [(point, endpoint) for endpoint in endpoints for point in _place(endpoint)]
            joined.sort(key=itemgetter(0))
            self._points = [point for point, _ in joined]
            self._owners = [owner for _, owner in joined]
            return
        for endpoint in endpoints:
            for point in _place(endpoint):
                position = bisect_right(self._points, point)
                self._points.insert(position, point)
                self._owners.insert(position, endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        self._homes.clear()
        for point in _place(endpoint):
            position = bisect_left(self._points, point)
            while self._owners[position] is not endpoint:  # another's equal point
                position += 1
            del self._points[position], self._owners[position]

    def find_homes(self, seed: int, excluded: Collection[str]) -> list[Endpoint]:
        """The first `MAX_HOMES` from the session's point on that may be chosen, nearest first."""
        homes = self._homes.get(seed)
        if homes is None:
            if len(self._homes) >= MAX_REMEMBERED:
                self._homes.clear()
            homes = self._homes[seed] = self._walk(seed, lambda _: True)
        if excluded:
            return self._walk(seed, lambda endpoint: endpoint.level >= 0 and endpoint.worker.name not in excluded)
        for endpoint in homes:
            if endpoint.level < 0:
                return self._walk(seed, lambda endpoint: endpoint.level >= 0)
        return homes

    def _walk(self, seed: int, may: Callable[[Endpoint], bool]) -> list[Endpoint]:
        owners, position = self._owners, bisect_left(self._points, seed)
        ahead = owners[position : position + MAX_STEPS]
        homes: list[Endpoint] = []
        for endpoint in ahead if len(ahead) == MAX_STEPS else ahead + owners[:MAX_STEPS]:  # the ring goes round
            if endpoint not in homes and may(endpoint):
                homes.append(endpoint)
                if len(homes) == MAX_HOMES:
                    break
        return homes


def _place(endpoint: Endpoint) -> list[int]:
    # The index is hashed with the name: as a seed it leaves short names' points close together.
    name = endpoint.worker.name
    return [xxh3_64_intdigest(f"{name}/{index}".encode()) for index in range(POINTS)]
