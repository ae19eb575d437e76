"""Requests that were aboard a worker when it died: one of them may have killed it, and nothing tells which.

Each goes to a worker where no other one is, and the next follows when it has been answered, begun, or outlived its
suspicion. So whoever kills a second worker is known by being there, and the others were not with it twice.
"""

from __future__ import annotations

from tandem_gateway.scheduling.ledger import Reservation

PROVEN_SECONDS = 0.5
"""What a request does to its worker it mostly does when it is read or computed first: one that shows nothing, as an
answer in one piece, is held apart for so long."""
LONGEST_WAIT_SECONDS = 10.0
"""Who waited for so long for a worker without another suspect goes to any: hundreds may have been aboard."""


class Isolation:
    """Which workers have a suspect. Small: only those of the last half second."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held: dict[str, tuple[Reservation, float]] = {}

    def names(self, now: float) -> frozenset[str]:
        """Workers that are to get no other suspect now."""
        held = self._held
        for name in [name for name, (suspect, until) in held.items() if not suspect.owing or now >= until]:
            del held[name]
        return frozenset(held)

    def add(self, name: str, suspect: Reservation, now: float) -> None:
        """This worker is given one."""
        self._held[name] = suspect, now + PROVEN_SECONDS
