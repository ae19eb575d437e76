"""What a decision about replicas means for the status of a model: pure.

A decision is made every few seconds and its figures always differ a little. What it says in substance is told at once;
figures, and which bound it was, are told again every `REPORTED_AGAIN_SECONDS` at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Literal

from tandem_api.crd.status import Condition, RoleScalingStatus, ScalingStatus
from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import COMPONENTS, Decision, RoleDecision
from tandem_operator.autoscale.plan.sleep import WAKE_LIMIT
from tandem_operator.autoscale.plan.slo import Attainment
from tandem_operator.autoscale.plan.temper import PARTLY_KNOWN

ACTIVE, SLO_MET = "ScalingActive", "SLOMet"
REPORTED_AGAIN_SECONDS = 30.0


def report_scaling(
    scaling: ScalingStatus,
    decision: Decision | None,
    *,
    before: ScalingStatus | None,
    suspended: bool,
    dry_run: bool,
    conditions: Sequence[Condition],
    now: datetime,
) -> tuple[ScalingStatus, list[Condition]]:
    """`scaling`, which has the numbers in force, with what there is to say about them, and the condition for it.

    `before` and `conditions` are what was told last.
    """
    if not any(role is not None and role.mode == "SLO" for role in (scaling.prefill, scaling.decode)):
        return scaling.model_copy(update={"message": "", "decided_at": None}), []
    known = next((condition for condition in conditions if condition.type == ACTIVE), None)
    found = _judge(decision, suspended=suspended, dry_run=dry_run)
    if found is None:
        waits = Condition(type=ACTIVE, status="Unknown", reason="NotDecidedYet", message="nothing was decided yet")
        is_over = known is not None and known.reason == "Suspended"
        return scaling, [waits if known is None or is_over else known]
    state, reason, sentence = found
    same = known is not None and (known.status, known.reason) == (state, reason)
    if same and before is not None and _numbers(before) == _numbers(scaling) and not _is_due(before, decision, now):
        return scaling, [known] if known is not None else []
    roles: Mapping[Role, RoleDecision] = decision.roles if decision is not None else {}
    update: dict[str, object] = {
        component: _with_decision(getattr(scaling, component), roles.get(role))
        for component, role in COMPONENTS.items()
    }
    scaling = scaling.model_copy(update=update | {"message": sentence, "decided_at": f"{now.astimezone(UTC):%FT%TZ}"})
    return scaling, [Condition(type=ACTIVE, status=state, reason=reason, message=sentence)]


def report_attainment(
    attainment: Attainment | None, conditions: Sequence[Condition], *, again: bool
) -> list[Condition]:
    """Whether targets are met. `again`: figures are told anew."""
    known = next((condition for condition in conditions if condition.type == SLO_MET), None)
    if attainment is None:
        return [] if known is None else [known]
    if known is not None and not again and (known.status, known.reason) == (attainment.status, attainment.reason):
        return [known]
    return [
        Condition(type=SLO_MET, status=attainment.status, reason=attainment.reason, message=attainment.message)
    ]  # fmt: skip


def scaled_by(before: ScalingStatus | None, after: ScalingStatus | None) -> list[str]:
    """Sentences about roles whose number was decided anew."""
    if before is None or after is None or _sleeps(before) != _sleeps(after):
        return []
    told: list[str] = []
    for component in COMPONENTS:
        old: RoleScalingStatus | None = getattr(before, component)
        new: RoleScalingStatus | None = getattr(after, component)
        if old is None or new is None or old.desired == new.desired or not old.mode == new.mode == "SLO":
            continue
        is_decided = new.limit is not None and new.observed == old.desired
        why = f"({new.limit}): {after.message}" if is_decided else "for its scaling.min and scaling.max"
        told.append(f"{component} {old.desired} → {new.desired} {why}")
    return told


def rested_by(before: ScalingStatus | None, after: ScalingStatus | None) -> tuple[bool, str] | None:
    """Whether a model fell asleep now, or woke up, in a sentence; None where it is as it was."""
    if before is None or after is None or _sleeps(before) == _sleeps(after):
        return None
    asleep, moves, waits = _sleeps(after), list[str](), False
    for component in COMPONENTS:
        old: RoleScalingStatus | None = getattr(before, component)
        new: RoleScalingStatus | None = getattr(after, component)
        if new is not None:
            moves.append(f"{component} {'0' if old is None else old.desired} → {new.desired}")
            waits |= new.limit == WAKE_LIMIT
    why = after.message if asleep or waits else "The model is not to sleep any more, so it wakes up."
    return asleep, f"{', '.join(moves)}. {why}"


def _sleeps(scaling: ScalingStatus) -> bool:
    return scaling.asleep_since is not None


def _judge(
    decision: Decision | None, *, suspended: bool, dry_run: bool
) -> tuple[Literal["True", "False"], str, str] | None:
    if suspended:
        return "False", "Suspended", "spec.suspend is true; replicas come back with their numbers when it is false"
    if decision is None:
        return None
    if decision.held:
        return "False", decision.reason, decision.sentence
    if dry_run and decision.reason in ("", PARTLY_KNOWN):
        return "False", "DryRun", f"spec.autoscaling.dryRun is true, so nothing moves: {decision.sentence}"
    return "True", decision.reason or "DemandFollowed", decision.sentence


def _numbers(scaling: ScalingStatus) -> list[tuple[str, int] | None]:
    return [None if r is None else (r.mode, r.desired) for r in (scaling.prefill, scaling.decode)]


def _is_due(before: ScalingStatus, decision: Decision | None, now: datetime) -> bool:
    """Whether figures, or bounds, are others and were told long enough ago."""
    roles: Mapping[Role, RoleDecision] = decision.roles if decision is not None else {}
    told = {
        role: (one.required, one.limit)
        for component, role in COMPONENTS.items()
        if (one := getattr(before, component)) is not None and role in roles
    }
    if told == {role: (one.required, one.limit) for role, one in roles.items()}:
        return False
    try:
        since = datetime.fromisoformat(before.decided_at or "")
    except ValueError:
        return True
    return since.tzinfo is None or (now - since).total_seconds() >= REPORTED_AGAIN_SECONDS


def _with_decision(role: RoleScalingStatus | None, one: RoleDecision | None) -> RoleScalingStatus | None:
    if role is None or role.mode != "SLO":
        return role
    if one is None:
        return role.model_copy(update={"observed": None, "required": None, "limit": None})
    return role.model_copy(update={"observed": one.observed, "required": one.required, "limit": one.limit})
