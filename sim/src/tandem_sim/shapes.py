"""Load that changes: a recording played faster and slower, so that its mix and its small bursts stay.

A shape is a list of (seconds, intensity), intensity 1 being the recording's own pace, linear in between. The request
that comes at time t of the recording comes when the integral of the intensity reaches t.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
from numpy.typing import NDArray

from tandem_sim.traces import Arrival, multiply


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Intensity over time."""

    points: tuple[tuple[float, float], ...]
    steady: tuple[tuple[float, float], ...] = ()
    """Windows in which the intensity is the same and has been for a while."""

    @property
    def seconds(self) -> float:
        return self.points[-1][0]

    def at(self, seconds: float) -> float:
        times, values = zip(*self.points, strict=True)
        return float(np.interp(seconds, times, values))


def build_ramp(*, peak: float = 4.0, warm: float = 300.0, rise: float = 900.0, hold: float = 780.0) -> Shape:
    """From 1 to `peak` over `rise` seconds, and back; `hold` at the top and at the end."""
    times = np.cumsum([0.0, warm, rise, hold, rise, hold])
    values = (1.0, 1.0, peak, peak, 1.0, 1.0)
    settle = 180.0
    steady = ((times[2] + settle, times[3]), (times[4] + settle, times[5]))
    return Shape(points=tuple(zip(times.tolist(), values, strict=True)), steady=steady)


def build_spike(
    *, peak: float = 5.0, warm: float = 300.0, rise: float = 30.0, hold: float = 240.0, rest: float = 600.0
) -> Shape:
    """From 1 to `peak` within `rise` seconds, there for `hold`, and back as fast."""
    times = np.cumsum([0.0, warm, rise, hold, rise, rest]).tolist()
    return Shape(points=tuple(zip(times, (1.0, 1.0, peak, peak, 1.0, 1.0), strict=True)))


def build_step(*, peak: float = 5.0, warm: float = 300.0, rise: float = 30.0, hold: float = 1800.0) -> Shape:
    """From 1 to `peak` within `rise` seconds, and there to the end."""
    times = np.cumsum([0.0, warm, rise, hold]).tolist()
    return Shape(points=tuple(zip(times, (1.0, 1.0, peak, peak), strict=True)))


def build_bursts(
    *, peak: float = 5.0, every: float = 600.0, last: float = 120.0, edge: float = 10.0, count: int = 6
) -> Shape:
    """From 1 to `peak` for `last` seconds, `count` times, one every so many; `edge` seconds up, and down."""
    times = [0.0]
    for burst in range(count):
        begin = (burst + 1) * every - last
        times += [begin - edge, begin, begin + last - edge, begin + last]
    times.append(count * every + every - last)
    values = (1.0, *(1.0, peak, peak, 1.0) * count, 1.0)
    return Shape(points=tuple(zip(times, values, strict=True)))


def build_constant(seconds: float, *, settle: float = 300.0) -> Shape:
    return Shape(points=((0.0, 1.0), (seconds, 1.0)), steady=((settle, seconds),))


def play(recording: Sequence[Arrival], shape: Shape, load: float) -> list[Arrival]:
    """The recording at `load` times the shape's intensity. Independent copies of it run beside one another, each from
    another place, and as often as the shape lasts."""
    times: NDArray[np.float64] = np.array([at for at, _ in shape.points])
    values: NDArray[np.float64] = np.array([value for _, value in shape.points])
    moments_known = {second * 1.0 for second in range(ceil(shape.seconds))} | {at for at, _ in shape.points}
    grid: NDArray[np.float64] = np.array(sorted(moments_known))
    intensity = np.interp(grid, times, values)
    area = np.concatenate([[0.0], np.cumsum((intensity[1:] + intensity[:-1]) / 2 * np.diff(grid))])
    copies = max(1, ceil(load))
    base = multiply(list(recording), copies, 1.0) if copies > 1 else list(recording)
    last = float(area[-1])
    pace = load / copies
    span = max(arrival.at for arrival in recording) + 1
    rounds = ceil(last * pace / span)
    if rounds > 1:
        base = _repeat(base, rounds, span)
    at: NDArray[np.float64] = np.array([arrival.at for arrival in base]) / pace
    kept = sum(arrival.at <= last * pace for arrival in base)
    moments = np.interp(at[:kept], area, grid)
    return [
        Arrival(float(moment), arrival.prompt, arrival.output, arrival.blocks, arrival.session)
        for moment, arrival in zip(moments, base, strict=False)
    ]


def _repeat(arrivals: list[Arrival], rounds: int, span: float) -> list[Arrival]:
    """One after the other, as other conversations."""
    width = 1 + max(max(arrival.blocks, default=0) for arrival in arrivals)
    sessions = 1 + max(arrival.session for arrival in arrivals)
    return [
        Arrival(
            arrival.at + turn * span,
            arrival.prompt,
            arrival.output,
            tuple([block + turn * width for block in arrival.blocks]),
            arrival.session + turn * sessions,
        )
        for turn in range(rounds)
        for arrival in arrivals
    ]
