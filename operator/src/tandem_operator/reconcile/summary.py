"""The conditions that people and tools wait for: `Ready`, `Available`, `Stalled` and `Reconciling`. Pure.

What stands in the way is looked for in one order: what a person has to act on, then what is meant to be off, then what
is missing of what the spec promises, then what is at work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

from tandem_api.crd.status import Condition
from tandem_api.names import Role
from tandem_api.quantities import parse_duration

from tandem_operator.objects.errors import InvalidSpecError
from tandem_operator.objects.manifests import Children, parse_time
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.roles import ObservedRole, last_progress
from tandem_operator.rollout.canary import WAITING_FOR_TURN
from tandem_operator.rollout.replacement import capacity_of
from tandem_operator.runtime import metrics
from tandem_operator.weights.prewarm import PREWARMING
from tandem_operator.workloads.blueprint import Blueprint

_OVERDUE = "ProgressDeadlineExceeded"
_ASLEEP, _WAKING = metrics.ASLEEP, "Waking"
_NOT_OVERDUE = frozenset({"Suspended", _ASLEEP, WAITING_FOR_TURN, "Canary", PREWARMING})
"""What takes as long as it takes; a canary has a deadline of its own, and a Job an end."""
INVALID_SPEC = InvalidSpecError.reason
_NOT_FOLLOWED = frozenset({"RevisionNotFound", "RevisionUnreadable", INVALID_SPEC})
"""The spec is not followed before somebody acts. To be told before what ails pods: the spec may be what heals them."""
ConditionState = Literal["True", "False", "Unknown"]
_SLEEPS = "no worker serves because nobody uses the model; the next request waits in a gateway and wakes it"


def build_condition(kind: str, state: ConditionState, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=state, reason=reason, message=message)


def stalled_condition(problem: Problem) -> Condition:
    return build_condition("Stalled", "True", problem.reason, problem.message)


def summarize(
    blueprint: Blueprint,
    states: Mapping[Role, ObservedRole],
    live: Children,
    *,
    problems: Sequence[Problem],
    waiting: Sequence[str],
    trial: Problem | None,
    now: str,
    asleep: bool = False,
    doing: str = "",
) -> list[Condition]:
    """Ready, Available, and Stalled or Reconciling where they hold. `doing`: what workers are that are not ready."""
    counts = ", ".join(f"{state.component} {state.summary}" for state in states.values())
    zero = None if asleep else _zero(blueprint, states)
    refused = next((problem for problem in problems if problem.stalled), None)
    troubles = [*problems, *(state.problem for state in states.values() if state.problem is not None)]
    unfollowed = trial if refused is None and trial is not None and trial.reason in _NOT_FOLLOWED else None
    stalled = unfollowed or next((problem for problem in troubles if problem.stalled), None)
    settled = all(state.settled for state in states.values()) and not waiting and not troubles
    if zero is not None and stalled is None and settled:
        stalled = zero
    if trial is not None and trial.stalled and stalled is None:
        stalled = trial
    lacking = _lacking(blueprint, states, counts)
    if settled and lacking is not None and stalled is None:
        stalled = dataclasses.replace(lacking, stalled=True)  # nothing is at work that could change it
    moving: Problem | None = None
    if stalled is None and (trial is not None or not settled):
        moving = _moving(waiting, troubles, zero, states, trial, asleep=asleep, doing=doing)
        stalled = _paused(blueprint, states, counts) or _overdue(blueprint, live, moving, now=now)
    if (blocked := refused or zero) is not None:
        ready = build_condition("Ready", "False", blocked.reason, blocked.message)
    elif lacking is not None and stalled is None and _wakes(blueprint, states):
        ready = build_condition("Ready", "True", _WAKING, f"requests wait in gateways until workers serve: {counts}")
    elif lacking is not None:
        why = stalled or next(iter(troubles), None) or moving or lacking
        ready = build_condition("Ready", "False", why.reason, why.message)
    elif asleep:
        ready = build_condition("Ready", "True", _ASLEEP, f"{_SLEEPS}: {counts}{_describe_standby(states)}")
    else:
        ready = build_condition("Ready", "True", "AllReplicasReady" if settled else "Serving", counts)
    available = _available(states, counts)
    if available.status == "False" and states[Role.GATEWAY].ready and (asleep or ready.reason == _WAKING):
        held = _ASLEEP if asleep else _WAKING
        available = build_condition("Available", "True", held, "requests wait in gateways, and wake the model")
    conditions = [ready, available]
    if stalled is not None:
        return [*conditions, stalled_condition(stalled)]
    return (
        conditions
        if moving is None
        else [*conditions, build_condition("Reconciling", "True", moving.reason, moving.message)]
    )


def _describe_standby(states: Mapping[Role, ObservedRole]) -> str:
    """How many workers are on standby; nothing where none is to be."""
    told = [f"{state.component} {state.standby}/{state.resting}" for state in states.values() if state.resting]
    return f"; on standby: {', '.join(told)}" if told else ""


def _wakes(blueprint: Blueprint, states: Mapping[Role, ObservedRole]) -> bool:
    """A model that slept gets its workers, and gateways hold what comes meanwhile."""
    was = next((condition for condition in blueprint.model.status.conditions if condition.type == "Ready"), None)
    is_held = states[Role.GATEWAY].ready >= states[Role.GATEWAY].promised
    return is_held and was is not None and was.status == "True" and was.reason in (_ASLEEP, _WAKING)


def _zero(blueprint: Blueprint, states: Mapping[Role, ObservedRole]) -> Problem | None:
    """Why nothing is meant to be served."""
    if blueprint.model.spec.suspend:
        return Problem(reason="Suspended", message="spec.suspend is true; set it to false to resume", stalled=True)
    for role in (blueprint.decode_role, Role.GATEWAY):
        if states[role].desired == 0:
            text = f"spec.{states[role].component}.replicas is 0, so nothing is served; raise it"
            if role is not Role.GATEWAY and blueprint.worker_spec(role).scaling.mode == "External":
                text = f"what scales the StatefulSet of {states[role].component} has set it to 0; raise it there"
            return Problem(reason="ScaledToZero", message=text, stalled=True)
    return None


def _moving(
    waiting: Sequence[str],
    troubles: Sequence[Problem],
    zero: Problem | None,
    states: Mapping[Role, ObservedRole],
    trial: Problem | None,
    *,
    asleep: bool,
    doing: str = "",
) -> Problem:
    """What is at work, where nobody is needed."""
    counts = ", ".join(
        f"{s.component} {s.summary}" + (f" ({s.updated} of {s.replicas} updated)" if s.updated < s.replicas else "")
        for s in states.values()
    )
    if waiting:
        text = f"waiting for the removal of an earlier object: {', '.join(waiting)}"
        return Problem(reason="WaitingForRemoval", message=text)
    if zero is not None or (asleep and not troubles and trial is None):
        text = f"pods are leaving, or go on standby: {counts}{_describe_standby(states)}"
        return Problem(reason=_ASLEEP if zero is None else zero.reason, message=text)
    return next(iter(troubles), None) or trial or Problem(reason="Progressing", message=f"{counts}{doing}")


def _paused(blueprint: Blueprint, states: Mapping[Role, ObservedRole], counts: str) -> Problem | None:
    """A rollout that is held, once all else is done."""
    if not blueprint.model.spec.rollout.paused:
        return None
    workers = [state for role, state in states.items() if role is not Role.GATEWAY]
    whole = all(state.observed and state.ready == state.replicas == state.desired for state in states.values())
    if not whole or all(state.updated == state.desired for state in workers):
        return None
    left = ", ".join(f"{s.component} {s.updated}/{s.desired} updated" for s in workers)
    text = f"spec.rollout.paused is true and replicas of an older template are left ({left}); set it to false to go on"
    return Problem(reason="RolloutPaused", message=text, stalled=True)


def _overdue(blueprint: Blueprint, live: Children, moving: Problem, *, now: str) -> Problem | None:
    """Nothing has come up for longer than the deadline. It stays so until something has."""
    model = blueprint.model
    before = next((c for c in model.status.conditions if c.type in ("Reconciling", "Stalled")), None)
    if before is None or before.observed_generation != model.metadata.generation or moving.reason in _NOT_OVERDUE:
        return None
    deadline = model.spec.rollout.progress_deadline
    began, progress, present = parse_time(before.last_transition_time), last_progress(live), parse_time(now)
    turn = parse_time(model.status.rollout.since) if model.status.rollout is not None else None
    if began is not None and turn is not None and before.type != "Stalled":
        began = max(began, turn)  # the wait for a turn, or a canary, is over since then
    if began is None or present is None or began > present:
        return None  # a clock that was ahead says nothing of how long it took
    if before.type == "Stalled":
        is_over = before.reason == _OVERDUE and (progress is None or progress <= began)
    else:
        is_over = present - max(began, progress or began) >= timedelta(seconds=parse_duration(deadline))
    if not is_over:
        return None
    text = f"no pod has come up for {deadline} (spec.rollout.progressDeadline): {moving.message}"
    return Problem(reason=_OVERDUE, message=text, stalled=True)


def _lacking(blueprint: Blueprint, states: Mapping[Role, ObservedRole], counts: str) -> Problem | None:
    """What is missing of what the spec promises: ready replicas of each role, and pairs of one build among them."""
    short = Problem(reason="Progressing", message=counts)
    workers = {role: state for role, state in states.items() if role is not Role.GATEWAY}
    is_rolling = any(state.updated < state.replicas for state in workers.values())
    floors = {
        role: max(1, state.promised - (blueprint.unavailable_of(role, state.promised) if is_rolling else 0))
        for role, state in workers.items()
        if state.desired and state.promised
    }
    if states[Role.GATEWAY].ready < states[Role.GATEWAY].promised:
        return short
    if any(states[role].ready < floor for role, floor in floors.items()):
        return short
    promised = {role: workers[role].promised for role in floors}
    share = min(floor / promised[role] for role, floor in floors.items()) if floors else 0.0
    if float(capacity_of({role: workers[role].partners for role in floors}, promised)) + 1e-9 < share:
        prefill = workers.get(Role.PREFILL)
        if prefill is not None and prefill.desired == 0:
            text = f"no prefill replica is wanted, and decode workers of this engine need one: raise it ({counts})"
            return Problem(reason="NoPrefill", message=text)
        text = (
            "workers of one build are too few on one side for key-value blocks to move between them; give both roles"
            f" one image: {counts}"
        )
        return Problem(reason="BuildsApart", message=text)
    return None


def _available(states: Mapping[Role, ObservedRole], counts: str) -> Condition:
    decode = next(state for role, state in states.items() if role in (Role.DECODE, Role.UNIFIED))
    if sum(decode.partners.values()) and states[Role.GATEWAY].ready:
        return build_condition("Available", "True", "Serving", counts)
    if decode.ready and states[Role.GATEWAY].ready:
        text = (
            f"no decode replica has a prefill replica of its build, without which this engine serves nothing: {counts}"
        )
        return build_condition("Available", "False", "NothingServed", text)
    missing = decode if not decode.ready else states[Role.GATEWAY]
    return build_condition("Available", "False", "NothingServed", f"no {missing.component} replica is ready")
