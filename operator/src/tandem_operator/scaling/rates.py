"""Demand: how much arrives per second, how sure that is, whether it has jumped and where it goes.

Arrivals are taken for a compound Poisson process: the tokens of a window w have the variance λ E[X²] w, so a mean rate
over it has the standard deviation sqrt(λ E[X²] / w). A slope fitted over the same window has sqrt(12 λ E[X²] / w³)
(least squares of white noise). Both follow from counters alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from tandem_operator.scaling.contract import Tuning

LONG_SECONDS = 120.0
"""Over which the mean is taken."""
TREND_SECONDS = 240.0
SHORT_SECONDS = (5.0, 10.0, 20.0, 40.0)
"""Windows in which a jump is looked for: a large one shows at once, a small one a little later."""
JUMP_DEVIATIONS = 4.0
JUMP_AHEAD = 2.0
"""A jump that still grows is taken to go on growing for so many times what it grew between the shortest windows."""
JUMP_SHARE = 1.3
"""A jump is at least so much more than the mean, however sure it is."""
TREND_DEVIATIONS = 3.0
FALL_DEVIATIONS = 4.0
FALL_SHARE = 0.2
"""Of the mean, in `TREND_SECONDS`: replicas go sooner only where demand falls for good."""

Point = tuple[float, float]
"""A time and a total up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Of something that is counted, per second."""

    now: float
    """Expected at present."""
    ahead: float
    """Expected when a replica that is ordered now will be ready."""
    deviation: float
    """Standard deviation of `now`."""
    jumped: bool
    falls: bool = False
    """It goes down, and chance does not explain it."""


def estimate_rate(points: Sequence[Point], diffusion: float, lead: float, tuning: Tuning) -> Rate | None:
    """From totals over time, the oldest first. `diffusion` is λ E[X²]; `lead` the seconds that `ahead` lies ahead.

    None while there are not two points a second apart.
    """
    end = points[-1][0] if points else 0.0
    mean = mean_over(points, LONG_SECONDS)
    if mean is None:
        return None
    covered = max(1.0, min(LONG_SECONDS, end - points[0][0]))
    deviation = sqrt(diffusion / covered)
    jump = _find_jump(points, mean, diffusion) if tuning.jump else None
    if jump is not None:
        rate, window = jump
        shortest = mean_over(points, SHORT_SECONDS[0]) or rate
        rate += JUMP_AHEAD * max(0.0, shortest - (mean_over(points, 3 * SHORT_SECONDS[0]) or rate))
        return Rate(now=rate, ahead=rate, deviation=sqrt(diffusion * rate / max(mean, 1e-9) / window), jumped=True)
    now = ahead = mean
    falls = False
    if tuning.trend:
        slope, middle, centre = _fit(points, TREND_SECONDS)
        noise = sqrt(12 * diffusion / TREND_SECONDS**3)
        if abs(slope) > TREND_DEVIATIONS * noise:
            recent, _, _ = _fit(points, TREND_SECONDS / 2)
            slope = min(slope, max(0.0, recent)) if slope > 0 else max(slope, min(0.0, recent))
            now = max(0.0, middle + slope * (end - centre)) if slope else mean
            falls = slope * TREND_SECONDS < -FALL_SHARE * middle and -slope > FALL_DEVIATIONS * noise
            ahead = now + max(0.0, slope) * lead
    return Rate(now=now, ahead=ahead, deviation=deviation, jumped=False, falls=falls)


def mean_over(points: Sequence[Point], seconds: float) -> float | None:
    """The mean rate over the last so many seconds, or over what there is of them."""
    if len(points) < 2:
        return None
    end, total = points[-1]
    begin = points[0]
    for point in reversed(points):
        begin = point
        if end - point[0] >= seconds:
            break
    passed = end - begin[0]
    return (total - begin[1]) / passed if passed >= 1.0 else None


def _find_jump(points: Sequence[Point], mean: float, diffusion: float) -> tuple[float, float] | None:
    """The highest rate of a short window that chance does not explain, and the window's length."""
    if points[-1][0] - points[0][0] < LONG_SECONDS / 2:
        return None
    found: tuple[float, float] | None = None
    for window in SHORT_SECONDS:
        rate = mean_over(points, window)
        if rate is None or rate < JUMP_SHARE * mean or rate - mean < JUMP_DEVIATIONS * sqrt(diffusion / window):
            continue
        if found is None or rate > found[0]:
            found = rate, window
    return found


def _fit(points: Sequence[Point], seconds: float) -> tuple[float, float, float]:
    """Least squares over the rates between neighbouring points: slope, rate in the middle, and when that is.

    The slope is 0 where they cover less than half of `seconds`.
    """
    end = points[-1][0]
    rows: list[tuple[float, float, float]] = []
    for (begin, before), (until, after) in pairwise(points):
        if begin >= end - seconds and until > begin:
            rows.append(((begin + until) / 2, (after - before) / (until - begin), until - begin))
    weight = sum(width for *_, width in rows)
    if weight < seconds / 2:
        return 0.0, 0.0, end
    centre = sum(at * width for at, _, width in rows) / weight
    middle = sum(rate * width for _, rate, width in rows) / weight
    spread = sum(width * (at - centre) ** 2 for at, _, width in rows)
    slope = sum(width * (at - centre) * (rate - middle) for at, rate, width in rows) / spread if spread else 0.0
    return slope, middle, centre
