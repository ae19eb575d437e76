"""How many replicas the roles of a model have, and who says so. Pure; all that is remembered is in `status.scaling`.

Everything else goes by the spec's `replicas`: here these are replaced by what the mode of each role makes of them. A
change of the mode moves nothing by itself, but for one to `Static`, which goes to what the spec says:

- `SLO`: the number that was decided last, from the switch on the one that the StatefulSet has.
  A model that sleeps has none (`asleepSince`).
- `External`: what the StatefulSet has. Manifests then leave the number out (`Blueprint.left`), unless it has to be
  restored first: after a suspension, which the operator carries out in every mode, or a surge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem_api import names
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.roles import WorkerRole
from tandem_api.crd.status import RoleScalingStatus, RoleStatus, ScalingStatus
from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import COMPONENTS
from tandem_operator.objects.manifests import DEPLOYMENT, STATEFUL_SET, ChildKey, Children, dig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """A decision of the scaler that waits to be followed."""

    observed: int
    """Replicas that it was made for: where the role has another number by now, it says nothing."""
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredReplicas:
    """What the roles of a model have."""

    model: InferenceModel
    """With the numbers that are in force as `replicas`."""
    left: frozenset[str]
    scaling: ScalingStatus | None
    """None where every role is `Static`."""
    moved: bool
    """A number was decided anew: it is to be kept before anything is made of it."""

    @property
    def asleep_since(self) -> str | None:
        """None of a model that is awake."""
        return None if self.scaling is None else self.scaling.asleep_since


def settle_replicas(
    model: InferenceModel,
    live: Children,
    recommendations: Mapping[Role, Recommendation],
    *,
    now: str,
    rest: bool | None = None,
) -> DesiredReplicas:
    """The numbers in force. `live` has the model's own workloads, `recommendations` is what was decided lately, and
    `rest` whether the model should sleep, where that was."""
    model, left = _follow_gateways(model, live)
    before = model.status.scaling or ScalingStatus()
    asleep = _sleeps(model, before, rest)
    told: dict[str, RoleScalingStatus | None] = dict.fromkeys(COMPONENTS)
    specs: dict[str, WorkerRole] = {}
    for component, role in COMPONENTS.items():
        spec: WorkerRole | None = getattr(model.spec, component)
        if spec is None or spec.scaling.mode == "Static":
            continue
        was: RoleScalingStatus | None = getattr(before, component)
        if was is not None and before.asleep_since is not None and not asleep:
            was = was.model_copy(update={"desired": spec.scaling.min})  # it wakes up, whatever its mode is now
        present = _present(model, component, spec, live)
        if spec.scaling.mode == "SLO":
            found = (
                _asleep(was) if asleep else _decided(model, component, spec, was, present, recommendations.get(role))
            )
        else:
            found, is_left = _followed(model, component, spec, was, present)
            left |= {component} if is_left else set()
        told[component] = found
        specs[component] = spec.model_copy(update={"replicas": found.desired})
    if not specs:
        return DesiredReplicas(model=model, left=frozenset(left), scaling=None, moved=False)
    moved = any(
        found.desired != was.desired
        for found, was in ((told[component], getattr(before, component)) for component in COMPONENTS)
        if found is not None and was is not None and found.mode == was.mode == "SLO"
    )
    update: dict[str, Any] = dict(told) | ({"last_scale_time": now} if moved else {})
    update["asleep_since"] = (before.asleep_since or now) if asleep else None
    return DesiredReplicas(
        model=model.model_copy(update={"spec": model.spec.model_copy(update=specs)}),
        left=frozenset(left),
        scaling=before.model_copy(update=update),
        moved=moved,
    )


def _follow_gateways(model: InferenceModel, live: Children) -> tuple[InferenceModel, set[str]]:
    """The model with as many gateways as something else has set, where it may, and whether they are left to it. None at
    all are those of a suspension: they come back as many as the spec says."""
    gateway = model.spec.gateway
    present = dig(live.get(ChildKey(DEPLOYMENT.name, model.metadata.name)), "spec", "replicas")
    if gateway.scaling.mode != "External" or model.spec.suspend or not present:
        return model, set()
    spec = model.spec.model_copy(update={"gateway": gateway.model_copy(update={"replicas": present})})
    return model.model_copy(update={"spec": spec}), {Role.GATEWAY.value}


def _sleeps(model: InferenceModel, before: ScalingStatus, rest: bool | None) -> bool:
    """Whether the model sleeps now. A dry run and a suspension put nothing to sleep."""
    if model.spec.scale_to_zero is None:
        return False
    if before.asleep_since is not None:
        return rest is not False
    return rest is True and not model.spec.autoscaling.dry_run and not model.spec.suspend


def _asleep(was: RoleScalingStatus | None) -> RoleScalingStatus:
    kept = was if was is not None and was.mode == "SLO" else RoleScalingStatus(mode="SLO", desired=0)
    return kept.model_copy(update={"desired": 0})


def _decided(
    model: InferenceModel,
    component: str,
    spec: WorkerRole,
    was: RoleScalingStatus | None,
    present: int | None,
    recommendation: Recommendation | None,
) -> RoleScalingStatus:
    scaling, holds = spec.scaling, model.spec.autoscaling.dry_run or model.spec.suspend
    if was is not None and was.mode == "SLO":
        desired = was.desired
        if recommendation is not None and recommendation.observed == desired and not holds:
            desired = recommendation.replicas
        kept = was
    else:
        desired = _first(model, component, spec, was, present)
        kept = RoleScalingStatus(mode="SLO", desired=desired)
    if not model.spec.autoscaling.dry_run:
        desired = max(scaling.min, min(desired, scaling.max or desired))
    return kept.model_copy(update={"desired": desired})


def _followed(
    model: InferenceModel, component: str, spec: WorkerRole, was: RoleScalingStatus | None, present: int | None
) -> tuple[RoleScalingStatus, bool]:
    """What is known of a role that something else scales, and whether its number is left to that now."""
    suspended = model.spec.suspend
    if (
        was is not None
        and was.mode == "External"
        and not was.pending
        and (present if suspended else present is not None)
    ):
        desired, pending = present or 0, suspended
    else:
        waits = was is not None and (was.pending or suspended or present is None)
        desired = was.desired if was is not None and waits else _first(model, component, spec, was, present)
        pending = suspended or present != desired
    return RoleScalingStatus(mode="External", desired=desired, pending=pending or None), not pending


def _first(
    model: InferenceModel, component: str, spec: WorkerRole, was: RoleScalingStatus | None, present: int | None
) -> int:
    """What a role begins with in a mode: what is there. A StatefulSet without pods belongs to a model that is, or was
    a moment ago, suspended or not there: it tells nothing."""
    if not present:
        return was.desired if was is not None else spec.replicas
    state = model.status.rollout
    if state is None or state.phase in ("Complete", "RolledBack"):
        return present
    # Some of what is there may be a surge.
    role: RoleStatus | None = getattr(model.status, component)
    promised = 0 if role is None else role.promised or 0
    return min(present, max(promised, present - model.spec.rollout.surge_of(spec.replicas), 1))


def _present(model: InferenceModel, component: str, spec: WorkerRole, live: Children) -> int | None:
    """Replicas that the StatefulSet asks for; None where there is none."""
    key = ChildKey(STATEFUL_SET.name, names.workload_name(model.metadata.name, COMPONENTS[component]))
    pods = dig(live.get(key), "spec", "replicas")
    return -(-pods // spec.nodes_per_replica) if isinstance(pods, int) else None


def scaling_memory(scaling: ScalingStatus) -> object:
    """What the next look goes by; the rest is for people."""
    roles = [(r.mode, r.desired, r.pending) for r in (scaling.prefill, scaling.decode) if r is not None]
    return roles, scaling.asleep_since


def scaling_to_keep(scaling: ScalingStatus | None) -> ScalingStatus | None:
    """What to remember of a model that is suspended though its spec cannot be read."""
    if scaling is None:
        return None
    roles = {component: getattr(scaling, component) for component in COMPONENTS}
    return scaling.model_copy(
        update={
            component: role.model_copy(update={"pending": True})
            for component, role in roles.items()
            if role is not None and role.mode == "External"
        }
    )
