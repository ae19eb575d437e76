"""What a look at a model tells those who decide about its replicas. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import RolloutStatus
from tandem_api.names import Role
from tandem_api.quantities import parse_duration

from tandem_operator.autoscale.accelerators import count_gpus
from tandem_operator.autoscale.plan.allotment import Claim
from tandem_operator.autoscale.plan.contract import COMPONENTS, Behavior, Decision, RoleSpec, ScalingSpec, Target
from tandem_operator.autoscale.plan.snapshots import LONGEST_START, PodStart, RoleCount
from tandem_operator.autoscale.plan.temper import Circumstances
from tandem_operator.objects.manifests import Children, Manifest, ModelKey, dig, dig_list, parse_time
from tandem_operator.objects.pods import is_leaving, is_up
from tandem_operator.observe.groups import PodGroup, group_pods
from tandem_operator.observe.roles import pods_of, workload_key
from tandem_operator.rollout.plan import is_resting, is_rolling
from tandem_operator.workloads.blueprint import Blueprint, component_of

_STARTS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedModel:
    """One model with targets."""

    generation: int = 0
    """The spec's, as it was seen."""
    spec: ScalingSpec | None
    """None where the planner cannot size this model; `problem` says why."""
    problem: str = ""
    ttft: Target
    tpot: Target
    counts: Mapping[Role, RoleCount] = field(default_factory=dict[Role, RoleCount])
    circumstances: Circumstances
    dry_run: bool = False
    idle_after: float | None = None
    """Seconds without a request after which the model sleeps; None: it does not."""
    asleep: bool = False
    woken: bool = False
    """A worker of it serves all the same: a gateway has woken one that was on standby."""
    fewest: Mapping[Role, int] = field(default_factory=dict[Role, int])
    """Replicas that a model has when it wakes up."""
    priority: int = 0
    """Among the models of its namespace, for the namespace's GPU quota."""
    gpu_resource: str = ""
    """The one kind of GPUs that all its replicas ask for, as a quota counts them; empty where there is none."""
    gpus: Mapping[Role, int] = field(default_factory=dict[Role, int])
    """How many of these a replica asks for."""


def observe_model(
    blueprint: Blueprint, live: Children, rollout: RolloutStatus | None, *, asleep: bool = False
) -> ObservedModel | None:
    """What there is of a model, for decisions about its replicas; None where it has no targets, or is suspended.

    `blueprint` has the replicas that are in force, `live` the model's own workloads.
    """
    model = blueprint.model
    slo = model.spec.slo
    if slo is None or model.spec.suspend:
        return None
    ttft = Target(
        percentile=slo.ttft.percentile / 100,
        seconds=slo.ttft.seconds,
        seconds_per_token=slo.ttft.seconds_per_token,
    )
    tpot = Target(seconds=slo.tpot.seconds)
    followed = frozenset(
        role
        for component, role in COMPONENTS.items()
        if (own := getattr(model.spec, component)) is not None and own.scaling.mode == "SLO"
    )
    planned = {COMPONENTS[component_of(role)]: role for role in blueprint.worker_roles}
    groups = {role: _groups(blueprint, own, live) for role, own in planned.items()}
    counts = {role: _count(blueprint, planned[role], found) for role, found in groups.items()}
    resource, gpus = _find_gpus(blueprint, planned, live)
    spec, problem = None, ""
    if followed:
        try:
            spec = _scaling_spec(model.spec, ttft=ttft, tpot=tpot)
        except ValueError as error:
            problem = str(error)
    return ObservedModel(
        generation=model.metadata.generation,
        spec=spec,
        problem=problem,
        ttft=ttft,
        tpot=tpot,
        counts=counts,
        circumstances=Circumstances(
            followed=followed,
            rolling=is_rolling(rollout) and not is_resting(blueprint, rollout),
            steady={role: _steady(found) for role, found in groups.items()},
        ),
        dry_run=model.spec.autoscaling.dry_run,
        idle_after=None if (rest := model.spec.scale_to_zero) is None else parse_duration(rest.idle_after),
        asleep=asleep,
        woken=asleep and any(_is_woken(pod, blueprint) for found in groups.values() for g in found for pod in g.pods),
        priority=model.spec.autoscaling.priority,
        gpu_resource=resource,
        gpus=gpus,
        fewest={role: blueprint.worker_spec(own).scaling.min for role, own in planned.items()},
    )


def _is_woken(pod: Manifest, blueprint: Blueprint) -> bool:
    """Whether a pod serves that came after the model fell asleep; those from before are on their way out."""
    made, since = parse_time(dig(pod, "metadata", "creationTimestamp")), parse_time(blueprint.asleep_since)
    return made is not None and since is not None and made > since and is_up(pod) and not is_leaving(pod)


def _scaling_spec(spec: InferenceModelSpec, *, ttft: Target, tpot: Target) -> ScalingSpec:
    """Raises ValueError where no number of replicas would do."""
    roles: dict[Role, RoleSpec] = {}
    for role, own in ((Role.PREFILL, spec.prefill), (Role.DECODE, spec.decode)):
        if own is None:
            continue
        fixed = max(1, own.replicas)  # of a role that somebody else decides about
        least, most = (own.scaling.min, own.scaling.max) if own.scaling.mode == "SLO" else (fixed, fixed)
        roles[role] = RoleSpec(min=least, max=most or fixed, gpus=own.num_gpus)
    scaling = spec.autoscaling
    patience = parse_duration(scaling.behavior.scale_down_stabilization)
    return ScalingSpec(
        roles=roles,
        ttft=ttft,
        tpot=tpot,
        gpu_budget=scaling.gpu_budget,
        min_ratio=scaling.role_ratio.min,
        queue_seconds=parse_duration(spec.queue_ttl),
        first_token_seconds=parse_duration(spec.gateway.timeouts.first_token),
        max_ratio=float("inf") if scaling.role_ratio.max is None else scaling.role_ratio.max,
        behavior=Behavior(scale_down_seconds=patience),
    )


def _find_gpus(blueprint: Blueprint, planned: Mapping[Role, Role], live: Children) -> tuple[str, dict[Role, int]]:
    """What pods really ask for: of the StatefulSets' templates, which have `resources` and podTemplates in them."""
    found: dict[Role, int] = {}
    kinds: set[str] = set()
    for role, own in planned.items():
        stateful_set = live.get(workload_key(blueprint, own))
        asked = count_gpus(dig(stateful_set, "spec", "template") or {})
        kinds |= asked.keys() or {""}
        found[role] = sum(asked.values()) * blueprint.worker_spec(own).nodes_per_replica
    kind = kinds.pop() if len(kinds) == 1 else ""
    return (kind, found) if kind else ("", {})


def _groups(blueprint: Blueprint, role: Role, live: Children) -> list[PodGroup]:
    return group_pods(pods_of(workload_key(blueprint, role), live), blueprint.worker_spec(role).nodes_per_replica)


def _count(blueprint: Blueprint, role: Role, groups: list[PodGroup]) -> RoleCount:
    ready = [group.pods[0] for group in groups if group.is_ready]
    newest = sorted(ready, key=lambda pod: str(dig(pod, "metadata", "creationTimestamp")))[-_STARTS:]
    return RoleCount(
        replicas=blueprint.replicas(blueprint.worker_spec(role).replicas),
        present=len(groups),
        leaders=frozenset(pod["metadata"]["name"] for pod in ready),
        starts={
            pod["metadata"]["name"]: PodStart(before=_seconds_before(pod), whole=_start_seconds(pod)) for pod in newest
        },
    )


def _seconds_before(pod: Manifest) -> float:
    """From creation until the container ran that runs now; 0 where one ended in between: it began when that did."""
    statuses = dig_list(pod, "status", "containerStatuses")
    if any(status.get("restartCount") for status in statuses):
        return 0.0
    made = parse_time(dig(pod, "metadata", "creationTimestamp"))
    began = [time for status in statuses if (time := parse_time(dig(status, "state", "running", "startedAt")))]
    return 0.0 if made is None or not began else max(0.0, (max(began) - made).total_seconds())


def _start_seconds(pod: Manifest) -> float | None:
    """From creation to Ready; None where a container ended in between, or it was ready before."""
    if any(status.get("restartCount") for status in dig_list(pod, "status", "containerStatuses")):
        return None
    made = parse_time(dig(pod, "metadata", "creationTimestamp"))
    ready = next((c for c in dig_list(pod, "status", "conditions") if c.get("type") == "Ready"), Manifest())
    since = parse_time(ready.get("lastTransitionTime"))
    if made is None or since is None:
        return None
    seconds = (since - made).total_seconds()
    # One that became ready later was ready before.
    return seconds if 0 < seconds <= LONGEST_START else None


def _steady(groups: list[PodGroup]) -> int:
    """How many replicas, from the first on, are ready without a gap."""
    count = 0
    for group in groups:
        if group.index != count or not group.is_ready:
            break
        count += 1
    return count


def count_model_gpus(observed: ObservedModel, replicas: Mapping[Role, int]) -> int:
    if observed.spec is None:
        return 0
    return sum(count * observed.gpus[role] for role, count in replicas.items() if role in observed.gpus)


def claim_gpus(key: ModelKey, observed: ObservedModel, decision: Decision | None) -> Claim | None:
    """What a model has and wants of its namespace's quota. Without a decision, and in a dry run, what it has."""
    if observed.spec is None or not observed.gpu_resource:
        return None
    counts = observed.counts
    held = count_model_gpus(observed, {role: count.replicas for role, count in counts.items()})
    least = count_model_gpus(observed, {role: own.min for role, own in observed.spec.roles.items()})
    wanted = held
    if decision is None or observed.dry_run:
        least = held
    else:
        wanted = max(least, count_model_gpus(observed, decision.replicas))
    return Claim(
        name=key.name,
        priority=observed.priority,
        least=least,
        held=held,
        present=count_model_gpus(observed, {role: count.present for role, count in counts.items()}),
        wanted=wanted,
        step=min(observed.gpus.values()),
    )
