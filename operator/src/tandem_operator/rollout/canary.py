"""Which revision the workers of a model get, and how far a canary has come. Pure; all that is remembered is in status.

A change without a canary is given to all workers at once; how fast, `replacement` decides. With one, the workers are
first brought to one revision (`Preparing`), then some get the new one and with it a part of the requests (`Canary`),
step by step. It ends by promotion, which is a rollout like any other, or by `RolledBack`: the model then goes on with
the revision before until the spec asks for something else, or somebody asks to try again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tandem_api.crd.rollout import Canary, CanaryStep
from tandem_api.crd.status import CanaryStatus, RolloutStatus
from tandem_api.launch import CanaryTraffic
from tandem_api.names import ANNOTATION_RETRY_CANARY, Role
from tandem_api.quantities import parse_duration

from tandem_operator.objects.manifests import format_time, parse_time
from tandem_operator.objects.problem import Problem
from tandem_operator.rollout.figures import Judgement, Verdict
from tandem_operator.rollout.trial import RoleFleet, TrialFleet, replicas_for

CANARY_FAILED = "CanaryFailed"
WAITING_FOR_TURN = "WaitingForTurn"
_PAUSED = "spec.rollout.paused is true"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """What the spec asks for."""

    revision: int
    digest: str
    canary: Canary | None = None
    """None too where a canary cannot be, or is not meant."""
    paused: bool = False
    deadline_seconds: float = 3600.0
    retry: str | None = None
    """The wish to try again that the object carries."""
    may_roll: bool = True
    """Its turn has come."""


def limits(state: RolloutStatus | None, canary: Canary | None, fleet: TrialFleet) -> dict[Role, int]:
    """How many replicas of each role there may be of the newest template; no entry: all."""
    if state is None or state.phase != "Canary" or state.canary is None or canary is None:
        return {}
    weight = _step(canary, state.canary).weight
    return {name: replicas_for(role, weight) for name, role in fleet.roles.items() if role.is_tried and role.wanted}


def target_of(state: RolloutStatus) -> int:
    """Number of the revision that the workers' templates have."""
    if state.phase == "Canary" and state.canary is not None:
        return state.canary.revision
    return state.stable_revision


def wants_slot(before: RolloutStatus | None, request: RolloutRequest, fleet: TrialFleet) -> bool:
    """Whether replicas are to be replaced. What goes back asks nobody."""
    if before is None or request.paused or fleet.serves_nothing:
        return False
    is_asked = _is_asked(before, request)
    if before.phase == "RolledBack" and not is_asked:
        return False
    if before.phase in ("Preparing", "Canary") or fleet.num_old > 0:
        return True
    # Nobody is outdated yet, and will be in a moment: the turn must not be given to another model in between.
    is_written = before.phase == "Progressing" and before.complete_revision is not None and not fleet.is_current
    return is_written or (is_asked and (request.canary is not None or before.complete_revision is not None))


def advance(
    before: RolloutStatus | None, request: RolloutRequest, fleet: TrialFleet, *, verdict: Verdict, now: datetime
) -> RolloutStatus:
    """The state after this look. `fleet` counts as new what has the template of `target_of(before)`."""
    if before is None:
        return RolloutStatus(
            phase="Progressing",
            revision=request.revision,
            digest=request.digest,
            stable_revision=request.revision,
            since=format_time(now),
            retry=request.retry,
        )
    state = before
    if _is_asked(before, request):
        state = _begin(before, request, fleet, now)
    elif request.canary is None and (
        before.revision != before.stable_revision or before.phase in ("Preparing", "Canary")
    ):
        state = _roll(before, request, now)
    elif before.phase == "Preparing":
        state = _prepare(before, request, fleet, now)
    elif before.phase == "Canary":
        state = _try(before, request, request.canary, fleet, verdict, now)
    elif before.phase != "RolledBack":
        state = _follow(before, fleet, now)
    return _with_slot(state, before, request, fleet, now)


def _is_asked(before: RolloutStatus, request: RolloutRequest) -> bool:
    """The spec asks for another revision, or somebody to try again."""
    return request.revision != before.revision or (before.phase == "RolledBack" and request.retry != before.retry)


def _with_slot(
    state: RolloutStatus, before: RolloutStatus, request: RolloutRequest, fleet: TrialFleet, now: datetime
) -> RolloutStatus:
    waiting = not request.may_roll and wants_slot(state, request, fleet)
    given = {"since": format_time(now)} if before.waiting and request.may_roll else {}
    return state if waiting == state.waiting and not given else state.model_copy(update={"waiting": waiting} | given)


def _begin(before: RolloutStatus, request: RolloutRequest, fleet: TrialFleet, now: datetime) -> RolloutStatus:
    """Another revision is asked for."""
    never_served = before.complete_revision is None and not fleet.is_up
    if request.canary is None or request.revision == before.stable_revision or never_served:
        return _roll(before, request, now)
    state = _change(before, request, phase="Preparing", since=now)
    if before.phase == "Canary":
        return state  # those of the canary before go back first
    complete = before.complete_revision
    if before.phase == "Progressing" and complete is not None and fleet.is_mostly_old:
        state = state.model_copy(update={"stable_revision": complete})
        if complete != before.stable_revision:
            return state
    return _prepare(state, request, fleet, now)


def _roll(before: RolloutStatus, request: RolloutRequest, now: datetime) -> RolloutStatus:
    """All workers get what is wanted."""
    return _change(before, request, phase="Progressing", since=now, stable_revision=request.revision)


def _prepare(state: RolloutStatus, request: RolloutRequest, fleet: TrialFleet, now: datetime) -> RolloutStatus:
    if not fleet.has_new_up:
        # What is broken cannot be gone back to, whatever serves beside it. What starts, or is suspended, is waited for.
        return _roll(state, request, now) if fleet.is_current and fleet.trouble is not None else state
    if not fleet.is_even or not request.may_roll or fleet.serves_nothing:
        return state
    trial = CanaryStatus(revision=request.revision, since=format_time(now))
    return state.model_copy(update={"phase": "Canary", "since": format_time(now), "canary": trial})


def _try(
    state: RolloutStatus,
    request: RolloutRequest,
    canary: Canary | None,
    fleet: TrialFleet,
    verdict: Verdict,
    now: datetime,
) -> RolloutStatus:
    """One look at a canary."""
    trial = state.canary
    assert canary is not None
    if trial is None or fleet.serves_nothing or fleet.has_lost_old:
        return state.model_copy(update={"phase": "Preparing", "since": format_time(now), "canary": None})
    state = state.model_copy(update={"since": _not_ahead(state.since, now)})
    trial = trial.model_copy(update={"step": min(trial.step, len(canary.steps)), "since": _not_ahead(trial.since, now)})
    if (failure := _failure(canary, state, trial, request, fleet, verdict, now)) is not None:
        ended = trial.model_copy(
            update={"weight": 0, "ready": False, "reason": failure.reason, "message": failure.message}
        )
        failed = {"phase": "RolledBack", "since": format_time(now), "canary": ended, "retry": request.retry}
        return state.model_copy(update=failed)
    step = _step(canary, trial)
    ready = fleet.is_ready_for(step.weight)
    was_paused = trial.message == _PAUSED and not request.paused
    if ready != trial.ready or (was_paused and not ready):
        trial = trial.model_copy(update={"since": format_time(now), "ready": ready})
    is_over = ready and _seconds_since(trial.since, now) >= parse_duration(step.duration)
    if is_over and not request.paused and verdict.judgement is Judgement.GOOD:
        if trial.step == len(canary.steps):
            return _roll(state, request, now)
        trial = CanaryStatus(revision=trial.revision, step=trial.step + 1, since=format_time(now))
        ready = fleet.is_ready_for(_step(canary, trial).weight)
        trial = trial.model_copy(update={"ready": ready})
    reached = [s.weight for s in canary.steps[: trial.step] if fleet.is_ready_for(s.weight)]
    update = {"weight": max(reached, default=0), "message": _waits_for(canary, trial, request, verdict, now)}
    return state.model_copy(update={"canary": trial.model_copy(update=update)})


def _failure(
    canary: Canary,
    state: RolloutStatus,
    trial: CanaryStatus,
    request: RolloutRequest,
    fleet: TrialFleet,
    verdict: Verdict,
    now: datetime,
) -> Problem | None:
    """Why this canary ends."""
    if fleet.is_current and (trouble := fleet.trouble) is not None:
        return Problem(reason=trouble.reason, message=trouble.message)
    if verdict.judgement is Judgement.BAD:
        return Problem(reason=verdict.reason, message=verdict.text)
    # Neither a pause nor the wait for a turn counts.
    waited = min(_seconds_since(since, now) for since in (trial.since, state.since))
    is_held = request.paused or trial.message == _PAUSED or not request.may_roll or state.waiting
    is_late = not trial.ready and not fleet.is_ready_for(_step(canary, trial).weight)
    if is_late and not is_held and waited >= request.deadline_seconds:
        text = f"its workers were not ready within {request.deadline_seconds:g} s (spec.rollout.progressDeadline)"
        return Problem(reason="ProgressDeadlineExceeded", message=text)
    return None


def _waits_for(canary: Canary, trial: CanaryStatus, request: RolloutRequest, verdict: Verdict, now: datetime) -> str:
    step = _step(canary, trial)
    if request.paused:
        return _PAUSED
    if not trial.ready:
        return "its workers are starting"
    if _seconds_since(trial.since, now) < parse_duration(step.duration):
        return f"the step takes {step.duration}"
    return verdict.text


def _follow(state: RolloutStatus, fleet: TrialFleet, now: datetime) -> RolloutStatus:
    """How far the workers are from what all of them should have."""
    if fleet.is_complete and (state.phase != "Complete" or state.complete_revision != state.stable_revision):
        update = {"phase": "Complete", "complete_revision": state.stable_revision, "since": format_time(now)}
        return state.model_copy(update=update)
    if state.phase == "Complete" and fleet.num_old:
        return state.model_copy(update={"phase": "Progressing", "since": format_time(now)})
    return state


def _change(
    before: RolloutStatus, request: RolloutRequest, *, phase: str, since: datetime, **update: Any
) -> RolloutStatus:
    named = {"revision": request.revision, "digest": request.digest, "retry": request.retry, "canary": None}
    return before.model_copy(update=named | {"phase": phase, "since": format_time(since)} | update)


def _step(canary: Canary, trial: CanaryStatus) -> CanaryStep:
    return canary.steps[min(trial.step, len(canary.steps)) - 1]


def _seconds_since(text: str, now: datetime) -> float:
    began = parse_time(text)
    return 0.0 if began is None else (now - began).total_seconds()


def _not_ahead(text: str, now: datetime) -> str:
    """A time that is written down; now where that has not come yet: the clock that told it was ahead of this one."""
    return format_time(now) if _seconds_since(text, now) < 0 else text


def canary_traffic(
    state: RolloutStatus | None, fleet: TrialFleet, before: CanaryTraffic | None
) -> CanaryTraffic | None:
    """What gateways are told of a canary. What was on trial and goes gets no requests any more."""
    if state is None:
        return None
    on_trial = state.phase == "Canary" and state.canary is not None
    if not fleet.is_current:
        # Which workers are new is not known in this moment.
        return before if before is None or on_trial else before.model_copy(update={"percent": 0.0})
    if on_trial and state.canary is not None:
        workers = _workers_on_trial(fleet, state.canary.weight)
        return CanaryTraffic(percent=float(state.canary.weight), workers=workers) if workers else None
    going = _going(fleet.roles.values(), before)
    return CanaryTraffic(percent=0.0, workers=going) if going else None


def _going(roles: Iterable[RoleFleet], before: CanaryTraffic | None) -> list[str]:
    old = {worker for role in roles for worker in role.old_workers}
    return [] if before is None else [worker for worker in before.workers if worker in old]


def _workers_on_trial(fleet: TrialFleet, weight: int) -> list[str]:
    """New workers, and of a role that the revision does not change a share, if there is one to spare: requests are
    served by these alone."""
    chosen: list[str] = []
    for role in fleet.roles.values():
        if role.is_tried:
            chosen += role.new_workers
        elif len(role.new_workers) > 1:
            count = max(1, min(len(role.new_workers) - 1, replicas_for(role, weight)))
            chosen += role.new_workers[-count:]
    return sorted(chosen)


def rollout_problem(state: RolloutStatus | None, canary: Canary | None, *, paused: bool) -> Problem | None:
    """What the state of a canary, or the wait for a turn, means for the conditions."""
    if state is None:
        return None
    trial = state.canary
    if state.phase == "RolledBack" and trial is not None:
        text = (
            f"revision {trial.revision} failed its canary at step {trial.step}: {trial.reason}: {trial.message};"
            f" revision {state.stable_revision} serves. Change the spec, or annotate the model with"
            f" {ANNOTATION_RETRY_CANARY}"
        )
        return Problem(reason=CANARY_FAILED, message=text, stalled=True)
    if state.waiting and not paused:
        text = "as many models are being rolled as may at a time (rollouts.maxConcurrent of the chart)"
        return Problem(reason=WAITING_FOR_TURN, message=text)
    if state.phase == "Preparing":
        reason = "PreparingCanary"
        text = f"all workers are brought to revision {state.stable_revision} before revision {state.revision} is tried"
    elif state.phase == "Canary" and trial is not None and canary is not None:
        reason = "Canary"
        text = f"revision {trial.revision}, step {trial.step} of {len(canary.steps)}, {trial.weight} % of requests"
        if trial.message and not paused:
            text = f"{text}: {trial.message}"
    else:
        return None
    if paused:
        return Problem(reason="RolloutPaused", message=f"{text}; {_PAUSED}, set it to false to go on", stalled=True)
    return Problem(reason=reason, message=text)
