"""Requests that were aboard a worker when it died: one of them may have killed it, and nothing tells which.

Each goes to a worker where no other one is, and the next follows when it has been answered, begun, or outlived its
suspicion. So whoever kills a second worker is known by being there, and the others were not with it twice.
"""

from __future__ import annotations

from tandem_gateway.scheduling.ledger import Reservation

PROVEN_SECONDS = 2.0
"""What a request does to its worker it mostly does when it is read or computed first: one that shows nothing, as an
answer in one piece, is held apart for so long. A worker on a busy machine may take a second to read it."""
DYING_SECONDS = 0.5
"""A worker whose connection broke off gets no suspect for so long: by then its sockets refuse, or it is alive."""
LONGEST_WAIT_SECONDS = 10.0
"""Who waited for so long for a worker without another suspect goes to any: hundreds may have been aboard."""


class Isolation:
    """Which workers have a suspect, or have died just now. Small: only those of a moment."""

    __slots__ = ("_died", "_held")

    def __init__(self) -> None:
        self._held: dict[str, tuple[Reservation, float]] = {}
        self._died: dict[str, float] = {}

    def find_occupied(self, now: float) -> frozenset[str]:
        """Workers with a suspect that has shown nothing yet, however long it has been there, and those that have just
        died, whose sockets may still take a request that nobody will read: better none of them."""
        held, died = self._held, self._died
        for name in [name for name, (suspect, _) in held.items() if not suspect.owing]:
            del held[name]
        for name in [name for name, until in died.items() if now >= until]:
            del died[name]
        return frozenset(held).union(died)

    def find_closed(self, now: float) -> frozenset[str]:
        """Those of them that are to get no suspect now, even if there is no better worker."""
        held = (name for name, (suspect, until) in self._held.items() if suspect.owing and now < until)
        return frozenset(held).union(name for name, until in self._died.items() if now < until)

    def add(self, name: str, suspect: Reservation, now: float) -> None:
        """This worker is given one."""
        self._held[name] = suspect, now + PROVEN_SECONDS

    def report_death(self, name: str, now: float) -> None:
        """A connection to this worker broke off: to other requests it may not have been told yet."""
        self._died[name] = now + DYING_SECONDS
