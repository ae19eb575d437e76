"""Which requests go to a canary's workers: a share of them, evenly, and a session always to the same side.

A session's seed decides, so that the caches of both sides stay warm; a running account corrects where sessions are few
or of unequal size, so that after any number of requests the share is right to within `MAX_DEBT` of them.
"""

from __future__ import annotations

MAX_DEBT = 4.0
"""Requests. Of many equal sessions about 3% of the requests change sides for it at most."""
BY_CANARY = 0xD1B54A32D192ED03
BY_REVISION = 0x9E3779B97F4A7C15
"""Odd, and irrational to 2^64: what a seed gives with one tells nothing of what it gives with the other, nor of where
it lies on the ring.
"""
_MASK = (1 << 64) - 1


def find_point(seed: int, mix: int) -> float:
    """A number in [0, 1) for a session, or for the n-th of many: those of consecutive numbers are spread evenly."""
    return (seed * mix & _MASK) / 2**64


class Split:
    """Between a canary and the others."""

    __slots__ = ("_debt", "share")

    def __init__(self, percent: float) -> None:
        self.share = percent / 100
        self._debt = 0.0
        """Requests that the canary should have had beyond those it was given."""

    def decide(self, seed: int) -> bool:
        """Whether a new request goes to the canary. `seed` names its session; 0: nothing does."""
        share = self.share
        if share <= 0 or share >= 1:
            return share >= 1
        debt = self._debt + share
        canary = find_point(seed, BY_CANARY) < share if seed else debt >= 0.5
        if canary and debt - 1 < -MAX_DEBT:
            canary = False
        elif not canary and debt > MAX_DEBT:
            canary = True
        self._debt = debt - canary
        return canary
