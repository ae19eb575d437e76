"""Prompts that will be late by the time a replica ordered now serves, and what it takes to work them off. Pure.

Who waits too long is turned away or gives up: of a backlog those are left that came within that time before the
replicas do. Replicas are paid for from their order on: the longer they take to come, the longer they are to work it off
in, and in all no more are ordered than for a few times what arrives.
"""

from __future__ import annotations

from math import ceil

from tandem_operator.autoscale.plan.contract import RoleState, ScalingSpec
from tandem_operator.autoscale.plan.load import Load, learn_start
from tandem_operator.autoscale.plan.sizing import MOST_REPLICAS

DRAIN_SECONDS = 20.0
"""In which a backlog is worked off once all replicas are there, at least."""
DRAIN_SHARE = 0.4
"""The part of a start in which it is worked off where that is longer."""
MOST_SHARE = 2.0
"""Times the replicas that do for what arrives: no more are ordered, however large the backlog is."""


def foresee_backlog(
    spec: ScalingSpec, state: RoleState, load: Load, velocity: float, waited: float
) -> float:  # fmt: skip
    """Uncached tokens that will be late by the time at which a replica ordered now is ready; 0 where none will.

    Until those on their way, for `waited` seconds so far, are there the ready ones work alone, then all of them.
    """
    start, rate = learn_start(state, spec, waited), load.tokens.now
    if load.bursting or _drain_seconds(start) > _lasts(spec, state):
        return 0.0  # who waits has left before a backlog is worked off
    remaining = max(0.0, start - waited) if state.warming else 0.0
    since = max(0.0, start - _lasts(spec, state))
    ready, coming = state.ready * velocity, state.replicas * velocity
    late = 0.0
    if not since:
        slack = max(0.0, spec.ttft.limit(load.prompts.tokens) - load.prompts.uncached / velocity)
        late = max(0.0, state.queued_tokens - 0.5 * slack * ready)
    late = max(0.0, late + (rate - ready) * max(0.0, remaining - since))
    return max(0.0, late + (rate - coming) * (start - max(remaining, since)))


def count_clearing(
    spec: ScalingSpec, state: RoleState, load: Load, velocity: float, backlog: float, waited: float, *, enough: int
) -> int:
    """Replicas that compute what arrives, for which `enough` would do, and work off the backlog in time."""
    if backlog <= 0:
        return 0
    drain = _drain_seconds(learn_start(state, spec, waited))
    clearing = ceil((load.tokens.now + backlog / drain) / velocity)
    return min(MOST_REPLICAS, clearing, ceil(MOST_SHARE * enough))


def _drain_seconds(start: float) -> float:
    return max(DRAIN_SECONDS, DRAIN_SHARE * start)


def _lasts(spec: ScalingSpec, state: RoleState) -> float:
    """Seconds for which a request waits at most, where most of them wait now."""
    return spec.queue_seconds if 2 * state.waiting_tokens >= state.queued_tokens else spec.first_token_seconds
