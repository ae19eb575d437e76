"""Workers that nobody complains of and that are not well: silent while they owe answers, or slower than the others."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.health import WANTED, Outcome
from tandem_gateway.scheduling.pool import Pool

SILENT_SECONDS = 3.0
SILENT_FACTOR = 4.0
"""A worker that owes first tokens is silent after this long, and this many times what its prompts should take."""
SLOW_FACTOR = 5.0
"""Slower than the median of its pool by this is an outlier, once it has computed `SLOW_SAMPLES` prompts."""
SLOW_SAMPLES = 8
SLOW_LATENCY = 0.25
"""Seconds of latency that are no outlier, whatever the others have."""
DESERTIONS = 3
"""Clients that waited for long enough and left, after which a worker counts as silent as if they still waited."""


def check(pool: Pool, now: float, report: Callable[[Endpoint, Outcome, float], None]) -> None:
    """Report who is silent, or slower than the others; and let another request probe who has not told yet."""
    members = pool.members.values()
    speed = _usual([endpoint.speed.value for endpoint in members if endpoint.speed.samples >= SLOW_SAMPLES])
    latency = _usual([e.speed.latency for e in members if e.speed.short_samples >= SLOW_SAMPLES])
    for endpoint in members:
        health = endpoint.health
        if health.probe is not None and health.probe is not WANTED and now >= health.probe_until:
            endpoint.retry_probe()
        if _is_silent(endpoint, now):
            endpoint.quiet_since = now
            endpoint.deserted = 0
            report(endpoint, Outcome.SILENT, now)
        elif endpoint.level >= 0 and _is_slow(endpoint, speed, latency):
            report(endpoint, Outcome.SLOW, now)
            endpoint.speed.forget()


def _is_silent(endpoint: Endpoint, now: float) -> bool:
    """It owes a first sign for longer than that one should take, or as long as three clients cared to wait, and nobody
    else has heard of it in that time.
    """
    if endpoint.deserted < DESERTIONS:
        quiet = now - endpoint.quiet_since - SILENT_SECONDS
        for wait in endpoint.owing if quiet > 0 else ():
            spare = SILENT_FACTOR * max(wait.patience, endpoint.gap)
            if quiet > spare and now - wait.since > SILENT_SECONDS + spare:
                break
        else:
            return False
    return endpoint.level >= 0 or endpoint.health.probe is not None


def _usual(values: list[float]) -> float:
    """The median of enough workers to say what is usual, else 0."""
    return median(values) if len(values) > 2 else 0.0


def _is_slow(endpoint: Endpoint, usual_speed: float, usual_latency: float) -> bool:
    speed = endpoint.speed
    if usual_speed and speed.samples >= SLOW_SAMPLES and speed.value * SLOW_FACTOR < usual_speed:
        return True
    if not usual_latency or speed.short_samples < SLOW_SAMPLES:
        return False
    return speed.latency > SLOW_FACTOR * usual_latency + SLOW_LATENCY
