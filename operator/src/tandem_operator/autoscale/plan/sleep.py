"""Whether a model that nobody uses sleeps, with no worker at all. Pure.

It falls asleep on nothing but what every gateway that takes requests says, lately and for itself: that nothing was
under way for as long as the spec says, so that each has been there for longer. Both roles must have served for as long
too: what was woken is not taken away before it is up because its client has left meanwhile. Where something is not
known it stays as it is. A request that waits wakes it, whatever else is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_operator.autoscale.plan.snapshots import Heard

FRESH_SECONDS = 10.0
"""An older report lets nothing fall asleep."""
ASLEEP = "ScaledToZero"
"""The reason of what is told of a model that sleeps."""
SLEEP_LIMIT, WAKE_LIMIT = "asleep", "waiting requests"
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What is known of a model's requests at one moment. Times are in seconds, of one clock."""

    at: float
    asleep: bool
    reports: tuple[Heard, ...] = ()
    """Those of gateways that take requests."""
    silent: Mapping[str, str] = field(default_factory=dict[str, str])
    """Gateways that take requests and do not report, and why."""
    serves: bool = True
    """A replica of every role is ready."""
    woken: bool = False
    """A worker serves though the model sleeps: one that was on standby, and that a gateway has woken."""
    rolling: bool = False
    """Replicas are being replaced, or tried. A rollout that waits, is paused or is stuck moves nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest:
    """Whether the model should sleep, and why."""

    asleep: bool
    sentence: str = ""
    """For people; empty where an awake model stays so."""
    unknown: str = ""
    """Why it is not known whether somebody uses it; of a model that sleeps."""


def follow_quiet(since: float | None, sight: Sight) -> float | None:
    """Since when the model has served and nobody has used it, with what is seen now; None: it does not serve."""
    if sight.asleep or not sight.serves:
        return None
    latest = sight.at if since is None else since
    for one in sight.reports:
        traffic = one.report.traffic
        if _is_computing(one) or _is_used(one):
            latest = max(latest, sight.at - one.age)
        elif traffic is not None and traffic.idle_seconds is not None:
            latest = max(latest, sight.at - one.age - traffic.idle_seconds)
    return latest


def decide_rest(idle_after: float | None, sight: Sight, quiet_since: float | None) -> Rest:
    """`idle_after` is None where the model is not to sleep; `quiet_since` is of `follow_quiet`, with this sight."""
    if sight.asleep:
        return _stay_or_wake(idle_after, sight)
    if idle_after is None or quiet_since is None or sight.rolling or sight.silent or not sight.reports:
        return Rest(asleep=False)
    is_quiet = sight.at - quiet_since >= idle_after and all(_has_rested(one, idle_after) for one in sight.reports)
    if not is_quiet:
        return Rest(asleep=False)
    return Rest(
        asleep=True, sentence=f"No request came for {idle_after:g} s, so the model sleeps; the next one wakes it."
    )


def _stay_or_wake(idle_after: float | None, sight: Sight) -> Rest:
    if idle_after is None:
        return Rest(asleep=False, sentence="The model is not to sleep any more, so it wakes up.")
    waiting = sum(one.report.traffic.waiting_requests for one in sight.reports if one.report.traffic is not None)
    if waiting:
        return Rest(asleep=False, sentence=f"{waiting} requests wait in gateways, so the model wakes up.")
    if any(_is_used(one) for one in sight.reports):
        return Rest(asleep=False, sentence="A request is under way, so the model wakes up.")
    if sight.woken:
        return Rest(asleep=False, sentence="A worker that was on standby serves, so the model wakes up.")
    if sight.silent:
        named = "; ".join(f"{name}: {sight.silent[name]}" for name in sorted(sight.silent)[:_NAMED])
        text = f"the model sleeps, and {len(sight.silent)} gateways do not say whether requests wait: {named}"
        return Rest(asleep=True, sentence=f"{text[0].upper()}{text[1:]}.", unknown=text)
    return Rest(asleep=True, sentence="The model sleeps: the next request waits in a gateway and wakes it.")


def _is_used(one: Heard) -> bool:
    """A request waits in this gateway, or is under way."""
    traffic = one.report.traffic
    return traffic is not None and (traffic.waiting_requests > 0 or traffic.idle_seconds == 0)


def _is_computing(one: Heard) -> bool:
    """A worker has requests, of whomever."""
    return any(
        sample.running_requests > 0 or sample.queued_requests > 0
        for worker in one.report.workers
        if (sample := worker.telemetry) is not None and (worker.telemetry_age or 0.0) + one.age <= FRESH_SECONDS
    )


def _has_rested(one: Heard, idle_after: float) -> bool:
    traffic = one.report.traffic
    if traffic is None or traffic.idle_seconds is None or one.age > FRESH_SECONDS:
        return False
    return traffic.idle_seconds >= idle_after and not traffic.waiting_requests
