"""Bursts of demand that came and went, and whether the present one is over before a replica ordered now serves. Pure.

A burst begins where requests come much faster than before, and ends where they come about as they did before it. What
lasts for `LONGEST_SECONDS` is no burst: it is what demand is now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from tandem_operator.autoscale.plan.rates import Point

BIN_SECONDS = 20.0
"""Over which requests are counted: a burst's beginning and end are known to about so much."""
CALM_SECONDS = 120.0
"""Over which the rate before a burst is taken."""
LEAST_CALM_SECONDS = 60.0
LONGEST_SECONDS = 1200.0
RISE_SHARE = 1.5
"""Times the rate before: less is no burst."""
RISE_DEVIATIONS = 4.0
"""Square roots of counts, as for jumps (`rates.find_jump`)."""
LAST = 3
"""Bursts by which the next one is judged, and `LEAST` of them at least."""
LEAST = 2
ALIKE = 0.5
"""Share of the growth of the present burst: lower ones before it tell nothing of it."""
OVERDUE = 1.5
"""A burst that has lasted so many times as long as the longest of the last ones is none like them."""
WORTH = 0.25
"""Share of a start: a replica that would serve a burst for less is not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Requests came faster for a while."""

    begin: float
    end: float
    """While it is not over, the time of the last count."""
    growth: float
    """Requests per second above those before it."""
    over: bool = True

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Passing:
    """What nothing is ordered for: bursts shorter than a start."""

    cut: tuple[Burst, ...]
    """Left out of demand."""
    longest: float
    """Seconds, of the last ones."""
    present: bool
    """One of them is under way."""
    counted: float
    """Until when it is known whether one is: what came since says nothing yet."""


def find_bursts(points: Sequence[Point]) -> tuple[list[Burst], float]:
    """The oldest first, of which the last one may not be over; and until when requests are counted."""
    found: list[Burst] = []
    calm = _Calm()
    begin, base = None, 0.0
    seconds = count = end = 0.0
    for start, end, more in _bins(points):
        passed = end - start
        rate = more / passed
        if begin is None:
            base = calm.rate
            if calm.rises(more, base * passed):
                begin, seconds, count = start, passed, more
            else:
                calm.add(passed, more)
        elif rate < (base + count / seconds) / 2:
            found.append(Burst(begin=begin, end=start, growth=count / seconds - base))
            begin = None
            calm.add(passed, more)
        elif seconds + passed > LONGEST_SECONDS:
            begin = None
            calm = _Calm()
            calm.add(passed, more)
        else:
            seconds, count = seconds + passed, count + more
    if begin is not None:
        found.append(Burst(begin=begin, end=points[-1][0], growth=count / seconds - base, over=False))
    return found, end


def find_passing(bursts: Sequence[Burst], start: float, counted: float) -> Passing | None:
    """Bursts that are over before a replica that is ordered when they begin is of use, as the last ones were; None
    where there were too few, or where they last longer. `start`: seconds that a replica takes.
    """
    if not bursts:
        return None
    present = None if bursts[-1].over else bursts[-1]
    past = [one for one in bursts if one.over and (present is None or one.growth >= ALIKE * present.growth)][-LAST:]
    if len(past) < LEAST:
        return None
    longest = max(one.seconds for one in past)
    fits = present is not None and present.seconds <= OVERDUE * longest
    if longest < (1 + WORTH) * start:
        lasts = (*past, present) if fits and present is not None else tuple(past)
        return Passing(cut=lasts, longest=longest, present=fits, counted=counted)
    if fits and present is not None and present.seconds + (1 + WORTH) * start > longest:
        return Passing(cut=(present,), longest=longest, present=True, counted=counted)
    return None


def _bins(points: Sequence[Point]) -> Iterator[tuple[float, float, float]]:
    """Begin, end and how many came."""
    if not points:
        return
    at, total = points[0]
    for end, until in points[1:]:
        if end - at >= BIN_SECONDS:
            yield at, end, until - total
            at, total = end, until


class _Calm:
    """What came in the last `CALM_SECONDS` that belong to no burst."""

    def __init__(self) -> None:
        self._bins: deque[tuple[float, float]] = deque()
        self._seconds = self._count = 0.0

    @property
    def rate(self) -> float:
        return self._count / self._seconds if self._bins else 0.0

    def add(self, seconds: float, count: float) -> None:
        self._bins.append((seconds, count))
        self._seconds, self._count = self._seconds + seconds, self._count + count
        while self._seconds - self._bins[0][0] >= CALM_SECONDS:
            seconds, count = self._bins.popleft()
            self._seconds, self._count = self._seconds - seconds, self._count - count

    def rises(self, count: float, expected: float) -> bool:
        """Whether it is far more than was to be expected."""
        if self._seconds < LEAST_CALM_SECONDS or count < RISE_SHARE * expected:
            return False
        return 2 * (sqrt(count) - sqrt(expected)) >= RISE_DEVIATIONS
