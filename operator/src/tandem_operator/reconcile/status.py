"""The status of a model from what was observed. Pure; the time comes from the caller.

`Ready` is true while what the spec promises is served, `Available` while anything is. `Reconciling` and `Stalled` are
present only while true, and never both: Stalled means that it stays so until a person acts. The other conditions tell
where it stands. An unchanged state gives an equal status, so nothing is written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

from tandem_api import names
from tandem_api.inferencemodel import Condition, ImagesStatus, InferenceModelStatus, RolloutStatus, ScalingStatus
from tandem_api.names import Role
from tandem_api.quantities import parse_duration
from tandem_api.version import VERSION

from tandem_operator.autoscale.desired import scaling_memory, scaling_to_keep
from tandem_operator.gateways.routing import plan_routing
from tandem_operator.objects.errors import InvalidSpecError
from tandem_operator.objects.manifests import ChildKey, Children, dig, parse_time
from tandem_operator.objects.pods import is_up
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.roles import (
    STALLED_BY_REQUEST,
    RoleState,
    last_progress,
    observe_role,
    pods_of,
    workload_key,
)
from tandem_operator.rollout.canary import WAITING_FOR_TURN
from tandem_operator.rollout.replacement import capacity_of
from tandem_operator.runtime import metrics
from tandem_operator.weights.commits import CommitPlan
from tandem_operator.weights.prewarm import PREWARMING
from tandem_operator.workloads.blueprint import Blueprint

_OVERDUE = "ProgressDeadlineExceeded"
_ASLEEP, _WAKING = metrics.ASLEEP, "Waking"
_NOT_OVERDUE = frozenset({"Suspended", _ASLEEP, WAITING_FOR_TURN, "Canary", PREWARMING})
"""What takes as long as it takes; a canary has a deadline of its own, and a Job an end."""
INVALID_SPEC = InvalidSpecError.reason
_NOT_FOLLOWED = frozenset({"RevisionNotFound", "RevisionUnreadable", INVALID_SPEC})
"""The spec is not followed before somebody acts. To be told before what ails pods: the spec may be what heals them."""
_LONGEST = 4000
"""Characters of a condition's message: each of some twelve conditions may have as many."""
_NAMED_STARTS = 3
"""Workers that are not ready of which a message says what they are doing."""
State = Literal["True", "False", "Unknown"]
_NO_WEIGHTS = CommitPlan()
_SLEEPS = "no worker serves because nobody uses the model; the next request waits in a gateway and wakes it"


def build_status(
    blueprint: Blueprint,
    live: Children,
    *,
    problems: Sequence[Problem],
    failures: Mapping[ChildKey, str],
    waiting: Sequence[str],
    now: str,
    weights: CommitPlan = _NO_WEIGHTS,
    images: ImagesStatus | None = None,
    more: Sequence[Condition] = (),
    rollout: RolloutStatus | None = None,
    scaling: ScalingStatus | None = None,
    trial: Problem | None = None,
    starting: Mapping[str, tuple[str, str]] | None = None,
) -> InferenceModelStatus:
    """The whole status. `problems` are those of planning and applying, `waiting` what has to vanish first, `trial` what
    a canary, or the wait for a turn, has to say, `more` conditions of other parts, `starting` what workers that are not
    ready are doing, by pod, with its address."""
    model = blueprint.model
    roles, present = (*blueprint.worker_roles, Role.GATEWAY), parse_time(now)
    states = {role: observe_role(blueprint, role, live, failures, now=present) for role in roles}
    workers = [state for role, state in states.items() if role is not Role.GATEWAY]
    asleep = scaling is not None and scaling.asleep_since is not None and not model.spec.suspend
    if asleep and trial is not None and not trial.stalled:
        trial = None  # a canary begins when there is somebody to try it with
    doing = _tell_starting(blueprint, live, starting or {})
    conditions = _summary(
        blueprint, states, live, problems=problems, waiting=waiting, trial=trial, now=now, asleep=asleep, doing=doing
    )
    conditions += _resolved_condition(weights)
    conditions.append(_model_condition(blueprint, workers, weights.problem))
    conditions += [*(_role_condition(blueprint, state) for state in states.values()), *more]
    gateway = states[Role.GATEWAY]
    present = parse_time(now)
    assert present is not None
    return InferenceModelStatus(
        observed_generation=model.metadata.generation,
        url=names.service_url(blueprint.name, model.metadata.namespace, tls=model.spec.gateway.tls is not None),
        revision=blueprint.revision,
        model=weights.status,
        images=images,
        routing=plan_routing(blueprint, now=present),
        rollout=rollout,
        scaling=scaling,
        prefill=states[Role.PREFILL].to_status() if Role.PREFILL in states else None,
        decode=states[blueprint.decode_role].to_status(),
        gateway=gateway.to_status(),
        updated=f"{sum(state.updated for state in workers)}/{sum(state.replicas for state in workers)}",
        conditions=stamp(conditions, model.status, generation=model.metadata.generation, now=now),
    )


def refused_status(
    problem: Problem, previous: InferenceModelStatus, *, generation: int, now: str, suspended: bool = False
) -> InferenceModelStatus:
    """The status of a model that cannot be read: what was seen last, each with the generation that it was seen at.
    Suspension holds nevertheless."""
    if suspended:
        text = f"{problem.message}; spec.suspend is true, so its pods are scaled to zero"
        problem = Problem(reason=problem.reason, message=text, stalled=True)
        previous = previous.model_copy(update={"scaling": scaling_to_keep(previous.scaling)})
    kept = [c for c in previous.conditions if c.type not in ("Ready", "Reconciling", "Stalled", UNDERSTOOD)]
    fresh = [_condition("Ready", "False", problem.reason, problem.message), _stalled(problem)]
    if suspended:
        kept = [c for c in kept if c.type != "Available"]
        fresh.append(_condition("Available", "False", "Suspended", "spec.suspend is true; set it to false to resume"))
    conditions = [*stamp(fresh, previous, generation=generation, now=now), *kept]
    return previous.model_copy(update={"observed_generation": generation, "conditions": conditions})


def held_status(
    blueprint: Blueprint,
    live: Children,
    problem: Problem,
    *,
    failures: Mapping[ChildKey, str],
    now: str,
    more: Sequence[Condition],
) -> InferenceModelStatus:
    """The status of a model that has values which cannot be read, so that its pods stay as they are: what these are
    is looked at anew, all else is what was seen last. `blueprint` is what can be read."""
    previous = blueprint.model.status
    seen = build_status(
        blueprint, live, problems=(), failures=failures, waiting=(), now=now, trial=problem, more=more,
        rollout=previous.rollout, scaling=previous.scaling,
    )  # fmt: skip
    fresh = [c for c in seen.conditions if c.type not in _OF_THE_SPEC]
    told = {*(c.type for c in fresh), "Reconciling", UNDERSTOOD}
    kept = [c for c in previous.conditions if c.type not in told]
    counts = {name: getattr(seen, name) for name in ("observed_generation", "prefill", "decode", "gateway", "updated")}
    return previous.model_copy(update=counts | {"conditions": [*fresh, *kept]})


UNDERSTOOD = "SpecUnderstood"
_OF_THE_SPEC = frozenset({"ModelReady", "ModelResolved"})
"""What only the whole spec tells."""
_NAMED = 12


def understood_condition(unknown: Sequence[str]) -> list[Condition]:
    """What to say of fields that this release does not know; nothing where there are none."""
    if not unknown:
        return []
    rest = "" if len(unknown) <= _NAMED else f" and {len(unknown) - _NAMED} more"
    text = (
        f"the CRD is of another release than this operator, {VERSION}, which does not know"
        f" {', '.join(unknown[:_NAMED])}{rest}: no effect until an operator runs that does. All else is followed"
    )
    return [_condition(UNDERSTOOD, "False", "UnknownFields", text)]


_SUMMARY = frozenset({"Ready", "Available", "Reconciling", "Stalled"})


def is_same_but_counts(before: InferenceModelStatus, after: InferenceModelStatus) -> bool:
    """Whether two statuses differ in counts of replicas, words and detail conditions alone, so that nobody waits for
    the newer one."""
    summaries = [{(c.type, c.status, c.reason) for c in s.conditions if c.type in _SUMMARY} for s in (before, after)]
    return summaries[0] == summaries[1] and is_same_memory(before, after)


def is_same_memory(before: InferenceModelStatus, after: InferenceModelStatus) -> bool:
    """Whether the next look would decide by both alike: conditions and counts are for people."""
    return _memory(before) == _memory(after)


def _memory(status: InferenceModelStatus) -> tuple[InferenceModelStatus, object]:
    roles = {"prefill": status.prefill, "decode": status.decode, "gateway": status.gateway}
    promised = {name: None if role is None else role.promised for name, role in roles.items()}
    scaling = None if status.scaling is None else scaling_memory(status.scaling)
    told: dict[str, object] = {"conditions": [], "scaling": None, "updated": ""}
    return status.model_copy(update=dict.fromkeys(roles) | told), (promised, scaling)


def true_conditions(status: InferenceModelStatus) -> set[str]:
    """Types of the conditions that hold, for figures; one more where a model sleeps, or is stalled because somebody
    asked."""
    held = {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}
    asked_for = held.get("Stalled") in STALLED_BY_REQUEST
    asleep = status.scaling is not None and status.scaling.asleep_since is not None and not asked_for
    return {*held, *([metrics.SUSPENDED] if asked_for else []), *([metrics.ASLEEP] if asleep else [])}


def known_conditions(status: InferenceModelStatus) -> set[str]:
    """Types of the conditions that have a figure. Of targets that nothing can be said about there is none: they are not
    missed."""
    return {each.type for each in status.conditions if (each.type, each.status) != ("SLOMet", "Unknown")}


def stamp(
    conditions: Sequence[Condition], previous: InferenceModelStatus, *, generation: int, now: str
) -> list[Condition]:
    """Conditions with their times: a transition is a change of `status` alone. What others say in them, webhooks above
    all, has no bounds, and an object that is too large is never written."""
    before = {condition.type: condition for condition in previous.conditions}
    stamped: list[Condition] = []
    for condition in conditions:
        old = before.get(condition.type)
        time = old.last_transition_time if old is not None and old.status == condition.status else now
        update = {"observed_generation": generation, "last_transition_time": time, "message": _cut(condition.message)}
        stamped.append(condition.model_copy(update=update))
    return stamped


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _condition(kind: str, state: State, reason: str, message: str) -> Condition:
    return Condition(type=kind, status=state, reason=reason, message=message)


def _stalled(problem: Problem) -> Condition:
    return _condition("Stalled", "True", problem.reason, problem.message)


def _summary(
    blueprint: Blueprint,
    states: Mapping[Role, RoleState],
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
        ready = _condition("Ready", "False", blocked.reason, blocked.message)
    elif lacking is not None and stalled is None and _wakes(blueprint, states):
        ready = _condition("Ready", "True", _WAKING, f"requests wait in gateways until workers serve: {counts}")
    elif lacking is not None:
        why = stalled or next(iter(troubles), None) or moving or lacking
        ready = _condition("Ready", "False", why.reason, why.message)
    elif asleep:
        ready = _condition("Ready", "True", _ASLEEP, f"{_SLEEPS}: {counts}{_tell_standby(states)}")
    else:
        ready = _condition("Ready", "True", "AllReplicasReady" if settled else "Serving", counts)
    available = _available(states, counts)
    if available.status == "False" and states[Role.GATEWAY].ready and (asleep or ready.reason == _WAKING):
        held = _ASLEEP if asleep else _WAKING
        available = _condition("Available", "True", held, "requests wait in gateways, and wake the model")
    conditions = [ready, available]
    if stalled is not None:
        return [*conditions, _stalled(stalled)]
    return (
        conditions
        if moving is None
        else [*conditions, _condition("Reconciling", "True", moving.reason, moving.message)]
    )


def _tell_starting(blueprint: Blueprint, live: Children, starting: Mapping[str, tuple[str, str]]) -> str:
    """What pods say that they are doing, as far as these are the pods that are there."""
    told: list[str] = []
    for role in blueprint.worker_roles:
        for pod in pods_of(workload_key(blueprint, role), live):
            address, waits_for = starting.get(pod["metadata"]["name"], ("", ""))
            if address and address == dig(pod, "status", "podIP") and not is_up(pod):
                told.append(f"{pod['metadata']['name']} is still {waits_for}")
    rest = f", and {len(told) - _NAMED_STARTS} more" if len(told) > _NAMED_STARTS else ""
    return f"; {', '.join(sorted(told)[:_NAMED_STARTS])}{rest}" if told else ""


def _tell_standby(states: Mapping[Role, RoleState]) -> str:
    """How many workers are on standby; nothing where none is to be."""
    told = [f"{state.component} {state.standby}/{state.resting}" for state in states.values() if state.resting]
    return f"; on standby: {', '.join(told)}" if told else ""


def _wakes(blueprint: Blueprint, states: Mapping[Role, RoleState]) -> bool:
    """A model that slept gets its workers, and gateways hold what comes meanwhile."""
    was = next((condition for condition in blueprint.model.status.conditions if condition.type == "Ready"), None)
    is_held = states[Role.GATEWAY].ready >= states[Role.GATEWAY].promised
    return is_held and was is not None and was.status == "True" and was.reason in (_ASLEEP, _WAKING)


def _zero(blueprint: Blueprint, states: Mapping[Role, RoleState]) -> Problem | None:
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
    states: Mapping[Role, RoleState],
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
        text = f"pods are leaving, or go on standby: {counts}{_tell_standby(states)}"
        return Problem(reason=_ASLEEP if zero is None else zero.reason, message=text)
    return next(iter(troubles), None) or trial or Problem(reason="Progressing", message=f"{counts}{doing}")


def _paused(blueprint: Blueprint, states: Mapping[Role, RoleState], counts: str) -> Problem | None:
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


def _lacking(blueprint: Blueprint, states: Mapping[Role, RoleState], counts: str) -> Problem | None:
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


def _available(states: Mapping[Role, RoleState], counts: str) -> Condition:
    decode = next(state for role, state in states.items() if role in (Role.DECODE, Role.UNIFIED))
    if sum(decode.partners.values()) and states[Role.GATEWAY].ready:
        return _condition("Available", "True", "Serving", counts)
    if decode.ready and states[Role.GATEWAY].ready:
        text = (
            f"no decode replica has a prefill replica of its build, without which this engine serves nothing: {counts}"
        )
        return _condition("Available", "False", "NothingServed", text)
    missing = decode if not decode.ready else states[Role.GATEWAY]
    return _condition("Available", "False", "NothingServed", f"no {missing.component} replica is ready")


def _resolved_condition(weights: CommitPlan) -> list[Condition]:
    """Whether the workers load one commit that the operator knows; of `hf://` models alone."""
    if weights.finding is None:
        return []
    holds, reason, message = weights.finding
    return [_condition("ModelResolved", "Unknown" if holds is None else "True" if holds else "False", reason, message)]


def _model_condition(blueprint: Blueprint, workers: Sequence[RoleState], unresolved: Problem | None) -> Condition:
    """Whether the weights are where they should be: a worker is ready only after it has computed a token with them."""
    uri = blueprint.model.spec.model.uri
    problems = [unresolved, *(state.problem for state in workers)]
    told = next((problem for problem in problems if problem is not None and problem.from_worker), None)
    if told is not None:
        return _condition("ModelReady", "False", told.reason, told.message)
    loaded = any(blueprint.revision_of(state.role) in state.builds for state in workers)
    if loaded:
        return _condition("ModelReady", "True", "Loaded", f"{uri} is loaded")
    if not any(state.desired for state in workers):
        return _condition("ModelReady", "Unknown", "NoWorkers", "no worker is wanted, so none has loaded the model")
    return _condition("ModelReady", "Unknown", "Loading", f"no worker has loaded {uri} yet")


def _role_condition(blueprint: Blueprint, state: RoleState) -> Condition:
    kind = f"{state.component.capitalize()}Ready"
    if state.problem is not None:
        return _condition(kind, "False", state.problem.reason, state.problem.message)
    if not state.settled:
        return _condition(
            kind, "False", "Progressing", f"{state.summary} ready, {state.updated} of the newest template"
        )
    if state.desired == 0:
        suspended = blueprint.model.spec.suspend
        return _condition(kind, "False", "Suspended" if suspended else "ScaledToZero", "0 replicas")
    return _condition(kind, "True", "AllReplicasReady", f"{state.summary} ready")
