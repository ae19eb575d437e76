"""Demand: how much arrives per second, how sure that is, whether it has jumped and where it goes.

Arrivals are taken for a compound Poisson process: the tokens of a window w have the variance λ E[X²] w, so a mean rate
over it has the standard deviation sqrt(λ E[X²] / w). A slope fitted over the same window has sqrt(12 λ E[X²] / w³)
(least squares of white noise). Both follow from counters alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import sqrt

from tandem_operator.autoscale.plan.contract import Tuning

LONG_SECONDS = 120.0
"""Over which the mean is taken at least."""
STEADY_SECONDS = (240.0, 480.0, 900.0)
"""Over which it is taken while they say the same as the shorter ones."""
STEADY_DEVIATIONS = 3.0
TREND_SECONDS = 240.0
LONGEST_TREND_SECONDS = 600.0
"""A trend is looked for over as long as a start takes, where that is more than `TREND_SECONDS`, up to this."""
JUMP_SECONDS = (10.0, 20.0, 40.0)
"""Windows in which a jump is looked for: a large one shows at once, a small one a little later."""
JUMP_WATCHED = 0.1
"""The part of a start for which a jump is watched at least: a replica that was ordered by mistake costs all of it."""
JUMP_DEVIATIONS = 4.0
HALF_DEVIATIONS = 0.5
"""Either half of the window shows the jump: what came at one moment and is over is none."""
JUMP_AHEAD = 2.5
"""A jump that still grows is taken to go on growing for so many times what its second half has more than the first."""
GROWTH_DEVIATIONS = 0.5
"""Deviations of the difference of two halves that are put down to chance."""
RISE = 2.0
"""Halves of a steady rise are as much above one another as twice what the first is above the mean before."""
JUMP_SHARE = 1.3
"""A jump is at least so much more than the mean, however sure it is."""
PRIOR_PAIRS = 4
"""Pairs of windows, as unequal as chance makes them, that the measured ones are weighed against."""
TREND_DEVIATIONS = 3.0
STEP_LEAD_SECONDS = 120.0
"""A step that is taken for a trend is dear where replicas are ordered for longer ahead than this: both are compared."""
FALL_DEVIATIONS = 4.0
FALL_SHARE = 0.35
"""Share of the mean, in `TREND_SECONDS`: replicas go sooner only where demand falls for good."""

Point = tuple[float, float]
"""A time and a total up to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """The rate of something that is counted, per second."""

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
    calm = _follow(points, mean, covered, diffusion, lead, tuning)
    jump = find_jump(points, JUMP_WATCHED * lead) if tuning.jump else None
    if jump is None:
        return calm
    rate = jump.rate + JUMP_AHEAD * jump.growth
    deviation = sqrt(diffusion * rate / max(mean, 1e-9) / jump.seconds)
    ahead = max(rate, calm.ahead) if lead > STEP_LEAD_SECONDS else rate
    return Rate(now=rate, ahead=ahead, deviation=deviation, jumped=True)


def _follow(
    points: Sequence[Point], mean: float, covered: float, diffusion: float, lead: float, tuning: Tuning
) -> Rate:  # fmt: skip
    """The rate ahead where nothing jumps: along the longest trend that there is, and no further ahead than it has been
    seen; else the mean."""
    end = points[-1][0]
    found = None
    if tuning.trend:
        longest = min(max(TREND_SECONDS, lead), LONGEST_TREND_SECONDS)
        windows = sorted({TREND_SECONDS, longest}, reverse=True)
        found = next((one for seconds in windows if (one := _find_trend(points, diffusion, lead, seconds))), None)
    if found is not None:
        slope, middle, centre, seconds = found
        now = max(0.0, middle + slope * (end - centre)) if slope else mean
        strong = -slope > FALL_DEVIATIONS * _noise(diffusion, seconds)
        falls = strong and slope * seconds < -FALL_SHARE * middle
        ahead = now + max(0.0, slope) * min(lead, seconds)
        return Rate(now=now, ahead=ahead, deviation=sqrt(diffusion / covered), jumped=False, falls=falls)
    if tuning.steady:
        mean, covered = _widen(points, mean, diffusion)
    return Rate(now=mean, ahead=mean, deviation=sqrt(diffusion / covered), jumped=False)


def _find_trend(
    points: Sequence[Point], diffusion: float, lead: float, seconds: float
) -> tuple[float, float, float, float] | None:
    """Slope, the rate in the middle, when that was, and `seconds`; None where chance explains it, or a step."""
    slope, middle, centre = _fit(points, seconds)
    if abs(slope) <= TREND_DEVIATIONS * _noise(diffusion, seconds):
        return None
    if slope > 0 and lead > STEP_LEAD_SECONDS and _is_step(points, seconds):
        return None
    recent, _, _ = _fit(points, seconds / 2)
    slope = min(slope, max(0.0, recent)) if slope > 0 else max(slope, min(0.0, recent))
    return slope, middle, centre, seconds


def _noise(diffusion: float, seconds: float) -> float:
    """Standard deviation of a slope over so long."""
    return sqrt(12 * diffusion / seconds**3)


def _widen(points: Sequence[Point], mean: float, diffusion: float) -> tuple[float, float]:
    """The mean over the longest time that says the same as all shorter ones but for chance, and how long that is.

    Lepski's way to choose a bandwidth (Theory of Probability and its Applications, 1991): the longer the mean, the less
    it is noise, until it is of another demand than the present one.
    """
    end = points[-1][0]
    known = [(LONG_SECONDS, mean)]
    for seconds in STEADY_SECONDS:
        rate = mean_over(points, seconds)
        if rate is None or end - points[0][0] < seconds:
            break
        if any(abs(rate - one) > STEADY_DEVIATIONS * sqrt(diffusion * (1 / own - 1 / seconds)) for own, one in known):
            break
        known.append((seconds, rate))
    return known[-1][1], known[-1][0]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """Demand that is another one since some seconds."""

    rate: float
    growth: float
    """Growth of the rate from the first half of the window to the second, as far as chance does not explain it."""
    seconds: float
    """In which it was seen."""


def find_jump(points: Sequence[Point], least: float = 0.0) -> Jump | None:
    """The highest rate of a short window that chance does not explain, of those of `least` seconds, or of the longest.

    Square roots of counts have the deviation 1/2 whatever the mean is, if arrivals are a Poisson process (Anscombe's
    transformation); where counts were more unequal than that so far, as much more is asked of a jump.
    """
    times = [at for at, _ in points]
    end, found = times[-1], None
    for seconds in JUMP_SECONDS:
        if seconds < min(least, JUMP_SECONDS[-1]):
            continue
        first, middle = bisect_right(times, end - seconds) - 1, bisect_left(times, end - seconds / 2)
        if first < 1 or times[first] - times[0] < LONG_SECONDS / 2 or not times[first] < times[middle] < end:
            continue
        before, begin, half = points[: first + 1], points[first], points[middle]
        mean = mean_over(before, LONG_SECONDS) or 0.0
        (total, passed), (old, rise), (new, rest) = (
            _count(begin, points[-1]), _count(begin, half), _count(half, points[-1])
        )  # fmt: skip
        rate = total / passed
        if rate < JUMP_SHARE * mean or not _stands_out(total, mean * passed, JUMP_DEVIATIONS):
            continue
        noise = sqrt(measure_dispersion(before, seconds))
        parts = (total, passed, JUMP_DEVIATIONS), (old, rise, HALF_DEVIATIONS), (new, rest, HALF_DEVIATIONS)
        if not all(_stands_out(count, mean * time, least * noise) for count, time, least in parts):
            continue
        growth = new / rest - old / rise - GROWTH_DEVIATIONS * noise * sqrt(rate * (1 / rest + 1 / rise))
        growth = min(growth, RISE * (old / rise - mean))
        if found is None or rate > found.rate:
            found = Jump(rate=rate, growth=max(0.0, growth), seconds=passed)
    return found


def _stands_out(count: float, expected: float, deviations: float) -> bool:
    return 2 * (sqrt(count) - sqrt(expected)) >= deviations


def measure_dispersion(points: Sequence[Point], seconds: float) -> float:
    """How many times as unequal as those of a Poisson process counts in neighbouring windows are: at least 1.

    The mean of (a - b)² / (a + b), which slow changes of demand hardly move.
    """
    windows: list[tuple[float, float]] = []
    last = points[-1]
    for point in reversed(points):
        if last[0] - point[0] >= seconds:
            windows.append(_count(point, last))
            last = point
    ratios = [
        (a / one - b / two) ** 2 / ((a + b) / (one + two) * (1 / one + 1 / two))
        for (a, one), (b, two) in pairwise(windows)
        if a + b
    ]
    return max(1.0, (PRIOR_PAIRS + sum(ratios)) / (PRIOR_PAIRS + len(ratios)))


def _count(begin: Point, end: Point) -> tuple[float, float]:
    """What came, and in how many seconds."""
    return end[1] - begin[1], end[0] - begin[0]


def _is_step(points: Sequence[Point], seconds: float) -> bool:
    """Whether one step explains the rates of the last so many seconds better than a straight line does."""
    rows = _rows(points, seconds)
    weight = sum(width for *_, width in rows)
    middle = sum(rate * width for _, rate, width in rows) / weight
    slope, _, centre = _fit(points, seconds)
    line = slope**2 * sum(width * (at - centre) ** 2 for at, _, width in rows)
    best = passed = above = 0.0
    for _, rate, width in rows[:-1]:
        passed, above = passed + width, above + width * (rate - middle)
        best = max(best, above**2 * weight / (passed * (weight - passed)))
    return best > line


def _rows(points: Sequence[Point], seconds: float) -> list[tuple[float, float, float]]:
    """Middle, rate and width between neighbouring points of the last so many seconds."""
    end = points[-1][0]
    return [
        ((begin + until) / 2, (after - before) / (until - begin), until - begin)
        for (begin, before), (until, after) in pairwise(points)
        if begin >= end - seconds and until > begin
    ]


def _fit(points: Sequence[Point], seconds: float) -> tuple[float, float, float]:
    """Least squares over the rates between neighbouring points: slope, rate in the middle, and when that is.

    The slope is 0 where they cover less than half of `seconds`.
    """
    end, rows = points[-1][0], _rows(points, seconds)
    weight = sum(width for *_, width in rows)
    if weight < seconds / 2:
        return 0.0, 0.0, end
    centre = sum(at * width for at, _, width in rows) / weight
    middle = sum(rate * width for _, rate, width in rows) / weight
    spread = sum(width * (at - centre) ** 2 for at, _, width in rows)
    slope = sum(width * (at - centre) * (rate - middle) for at, rate, width in rows) / spread if spread else 0.0
    return slope, middle, centre
