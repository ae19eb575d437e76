"""What of a decision may be followed now. Pure.

More replicas never hurt what is under way; fewer do while replicas are being replaced or tried, and while one that
would stay does not serve.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import Decision, RoleDecision, ScalingSpec

ROLLOUT, UNREADY = "rollout", "readiness"
PARTLY_KNOWN = "DemandPartlyKnown"
TELEMETRY = "telemetry"


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What the planner does not know."""

    followed: frozenset[Role]
    """Roles whose number is decided; the planner sizes the others along, and what it says of them is left."""
    rolling: bool = False
    """Replicas are being replaced, or tried."""
    steady: Mapping[Role, int] | None = None
    """How many replicas, from the first on, serve: only what comes after the last of them may go."""


def temper(spec: ScalingSpec, decision: Decision, circumstances: Circumstances) -> Decision:
    """The decision with fewer replicas where it may be followed, and more where there is room for these still."""
    if decision.held:
        return replace(decision, roles=_only(decision.roles, circumstances.followed))
    roles = {
        role: _without_loss(role, one, circumstances) if role in circumstances.followed else _as_observed(one)
        for role, one in decision.roles.items()
    }
    cost = sum(one.replicas * spec.roles[role].gpus for role, one in roles.items())
    if spec.gpu_budget is not None and cost > spec.gpu_budget:
        roles = {
            role: replace(one, replicas=one.observed, limit=spec.budget_name) if one.replicas > one.observed else one
            for role, one in roles.items()
        }
    return replace(decision, roles=_only(roles, circumstances.followed))


def only_grow(decision: Decision, why: str) -> Decision:
    """The decision of who knows a part of demand: that is the least there is, so it adds and takes nothing away, and
    what it finds necessary is not to be remembered as all that was. `why` tells what is not known, in a sentence."""
    if decision.held:
        return replace(decision, sentence=f"{decision.sentence} {why}")
    roles = {
        role: one if one.replicas >= one.observed else replace(one, replicas=one.observed, limit=TELEMETRY)
        for role, one in decision.roles.items()
    }
    return replace(
        decision, roles=roles, reason=PARTLY_KNOWN, sentence=f"{why} {decision.sentence}", needs={}
    )  # fmt: skip


def _only(roles: Mapping[Role, RoleDecision], followed: frozenset[Role]) -> dict[Role, RoleDecision]:
    return {role: one for role, one in roles.items() if role in followed}


def _as_observed(one: RoleDecision) -> RoleDecision:
    return replace(one, replicas=one.observed)


def _without_loss(role: Role, one: RoleDecision, circumstances: Circumstances) -> RoleDecision:
    if one.replicas >= one.observed:
        return one
    if circumstances.rolling:
        return replace(one, replicas=one.observed, limit=ROLLOUT)
    if circumstances.steady is not None and circumstances.steady.get(role, 0) < one.replicas:
        return replace(one, replicas=one.observed, limit=UNREADY)
    return one
