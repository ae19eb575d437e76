"""What there is of a model's roles, counted in replicas. Pure; the time comes from the caller.

Only pods that the model's own workloads control are looked at: labels alone say nothing, anybody may write them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tandem_api import names
from tandem_api.crd.status import RoleStatus
from tandem_api.names import Role
from tandem_api.quantities import parse_duration

from tandem_operator.children.templates import read_revisions
from tandem_operator.objects.manifests import (
    DEPLOYMENT,
    POD,
    STATEFUL_SET,
    ChildKey,
    Children,
    Manifest,
    controller_of,
    dig,
    dig_list,
    labels_of,
    parse_time,
)
from tandem_operator.objects.pods import has_started, is_leaving, is_on_standby, is_ready, revision_of
from tandem_operator.objects.problem import Problem
from tandem_operator.objects.refusals import advice
from tandem_operator.observe.causes import pod_problem, role_problem
from tandem_operator.observe.groups import PodGroup, group_pods, group_size
from tandem_operator.observe.replica import WHOLE, ObservedReplica, ReplicaState
from tandem_operator.workloads.blueprint import Blueprint, component_of

STALLED_BY_REQUEST = frozenset({"Suspended", "ScaledToZero", "RolloutPaused"})
"""Reasons to be stalled that somebody asked for: nothing is wrong."""
WAITS_FOR_GATES = "ReadinessGatesNotReady"
"""The kubelet's reason for pods whose containers are ready."""
BLINK = timedelta(seconds=30)
"""A worker that has been unready for less may be back in a moment."""
_NO_ROOM = (
    "; what is missing is the replica on top that a rollout begins with: spec.rollout.maxSurge: 0 does without one, and"
    " a role with a single replica serves nothing meanwhile"
)
UNREACHABLE = timedelta(minutes=5)
"""A node that is out of reach may be serving for this long: then Kubernetes gives its pods up too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedRole:
    """One role as it is, counted in replicas."""

    role: Role
    desired: int
    promised: int
    """Replicas that `Ready` promises."""
    replicas: int
    ready: int
    updated: int
    observed: bool
    """The controller has seen the newest template and count."""
    problem: Problem | None
    builds: Mapping[str, int] = field(default_factory=dict[str, int])
    """Ready replicas by build; of worker roles."""
    partners: Mapping[str, int] = field(default_factory=dict[str, int])
    """The same, with those that need no partner under `WHOLE`, and without those that serve nobody for want of one: see
    `capacity_of`."""

    resting: int = 0
    """Replicas that are to be on standby, of a model that sleeps."""
    standby: int = 0
    """Those that are."""

    @property
    def settled(self) -> bool:
        if self.resting:
            return self.observed and self.replicas == self.standby == self.updated == self.resting
        return self.observed and self.replicas == self.ready == self.updated == self.desired

    @property
    def component(self) -> str:
        return component_of(self.role)

    @property
    def summary(self) -> str:
        return f"{self.ready}/{self.desired}"

    def to_status(self) -> RoleStatus:
        return RoleStatus(
            replicas=self.replicas,
            ready=self.ready,
            updated=self.updated,
            standby=self.standby if self.resting else None,
            promised=self.promised,
            summary=self.summary,
        )


def workload_key(blueprint: Blueprint, role: Role) -> ChildKey:
    """The StatefulSet or Deployment of a role."""
    kind = DEPLOYMENT if role is Role.GATEWAY else STATEFUL_SET
    return ChildKey(kind.name, names.workload_name(blueprint.name, role))


def observe_role(
    blueprint: Blueprint, role: Role, live: Children, failures: Mapping[ChildKey, str], *, now: datetime | None = None
) -> ObservedRole:
    """One role's state. `failures` has, by workload, why its controller could not create pods. Without `now`, what only
    time tells is left out."""
    key = workload_key(blueprint, role)
    workload = live.get(key, {})
    pods = pods_of(key, live)
    resting = 0 if role is Role.GATEWAY else blueprint.standby
    loaded = [pod for pod in pods if blueprint.model.spec.standby and is_on_standby(pod)]
    problem = role_problem([pod for pod in pods if pod not in loaded], now=now)
    failure = failures.get(key) or replica_failure(workload)
    builds: Mapping[str, int] = {}
    partners: Mapping[str, int] = {}
    if role is Role.GATEWAY:
        desired = desired_pods = blueprint.replicas(blueprint.model.spec.gateway.replicas)
        counts = tuple(dig(workload, "status", name) or 0 for name in ("replicas", "readyReplicas", "updatedReplicas"))
    else:
        spec = blueprint.worker_spec(role)
        desired, desired_pods = blueprint.replicas(spec.replicas), blueprint.num_pods(role) or resting
        alike = read_revisions(workload).alike
        groups = group_pods(pods, spec.nodes_per_replica)
        builds = Counter(build_of(group) for group in groups if group.is_ready)
        paired = role is Role.DECODE
        served = _without_lone(blueprint, [group for group in groups if group.is_ready], live)
        partners = Counter(WHOLE if paired and is_whole(g) else build_of(g) for g in served)
        counts = len(groups), builds.total(), sum(group.is_of(alike) for group in groups)
    surging = max(desired_pods, dig(workload, "spec", "replicas") or 0) if desired_pods else 0
    if failure and problem is None and len(pods) < surging:
        text = f"{key}: {failure}{advice(failure)}"
        if role is not Role.GATEWAY and len(pods) >= desired_pods:
            text = f"{text}{_NO_ROOM}"
        problem = Problem(reason="PodsNotCreated", message=text, stalled=True)
    generation = dig(workload, "metadata", "generation")
    before = None if _has_expired(blueprint, now) else _status_before(blueprint, role)
    return ObservedRole(
        role=role,
        desired=desired,
        promised=_promise(desired, counts[1], before, is_added=_is_added(blueprint, role)),
        replicas=counts[0],
        ready=counts[1],
        updated=counts[2],
        observed=generation is not None and generation == dig(workload, "status", "observedGeneration"),
        problem=problem,
        builds=builds,
        partners=partners,
        resting=resting,
        standby=len(loaded) if resting else 0,
    )


def _status_before(blueprint: Blueprint, role: Role) -> RoleStatus | None:
    status = blueprint.model.status
    return {Role.GATEWAY: status.gateway, Role.PREFILL: status.prefill}.get(role, status.decode)


def _is_added(blueprint: Blueprint, role: Role) -> bool:
    """Whether the role comes to a model that serves without it."""
    status = blueprint.model.status
    without = status.prefill is None or status.prefill.promised == 0
    return role is Role.PREFILL and without and status.decode is not None and bool(status.decode.promised)


def _has_expired(blueprint: Blueprint, now: datetime | None) -> bool:
    """Whether a role has had its time to grow: from then on what the spec asks for is promised."""
    model = blueprint.model
    stalled = next((c for c in model.status.conditions if c.type == "Stalled"), None)
    if stalled is None or stalled.reason in STALLED_BY_REQUEST:
        return False
    since = parse_time(stalled.last_transition_time)
    deadline = timedelta(seconds=parse_duration(model.spec.rollout.progress_deadline))
    is_over = now is not None and since is not None and now - since >= deadline
    return stalled.reason == "ProgressDeadlineExceeded" or is_over


def _promise(desired: int, ready: int, before: RoleStatus | None, *, is_added: bool) -> int:
    """A role that grows keeps the promise it had until all of the new replicas have been there."""
    kept = 0 if before is None else before.promised or 0
    return kept if (is_added or kept > 0) and kept < desired and ready < desired else desired


def pods_of(workload: ChildKey, live: Children) -> list[Manifest]:
    """Pods of one of the model's workloads. Between a Deployment and its pods stands a ReplicaSet, named after it."""
    if workload.kind == DEPLOYMENT.name:
        prefix = f"{workload.name}-"
        return [
            pod
            for key, pod in live.items()
            if key.kind == POD.name
            and key.name.startswith(prefix)
            and (owner := controller_of(pod) or {}).get("kind") == "ReplicaSet"
            and str(owner.get("name")).rpartition("-")[0] == workload.name
        ]
    uid = dig(live.get(workload), "metadata", "uid")
    prefix = f"{workload.name}-"  # cheaper to look at than owners, of thousands of pods
    return [
        pod
        for key, pod in live.items()
        if key.kind == POD.name
        and key.name.startswith(prefix)
        and uid is not None
        and (controller_of(pod) or {}).get("uid") == uid
    ]


def replica_failure(workload: Manifest) -> str | None:
    """Why a Deployment cannot create pods; StatefulSets say so in Events only."""
    for condition in dig_list(workload, "status", "conditions"):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            return str(condition.get("message"))
    return None


def observe_replicas(
    groups: Sequence[PodGroup], *, alike: Collection[str], now: datetime, rests: bool = False
) -> list[ObservedReplica]:
    """Replicas as the planner of rollouts sees them. `alike` are the revisions that count as the newest template;
    `rests`: some may be on standby, and wake up."""
    return [
        ObservedReplica(
            index=group.index,
            build=build_of(group),
            state=state_of(group, alike=alike, now=now),
            is_outdated=bool(group.outdated(alike)),
            is_leaving=all(is_leaving(pod) for pod in group.pods),
            is_whole=is_whole(group),
            is_starting=_is_starting(group, rests=rests),
        )
        for group in groups
    ]


def build_of(group: PodGroup) -> str:
    """The build whose blocks the replica takes: that of its leader."""
    return labels_of(group.pods[0]).get(names.LABEL_REVISION, "")


def is_whole(group: PodGroup) -> bool:
    """Whether the replica computes prompts and answers alike."""
    return labels_of(group.pods[0]).get(names.LABEL_ROLE) == Role.UNIFIED.value


def _without_lone(blueprint: Blueprint, ready: Sequence[PodGroup], live: Children) -> list[PodGroup]:
    """Without decode workers of engines whose decode workers compute no prompts, where no prefill worker of their build
    is ready: nothing is promised of a role that comes or goes, so its own count does not tell."""
    pairs = any(labels_of(group.pods[0]).get(names.LABEL_ROLE) == Role.DECODE.value for group in ready)
    if blueprint.model.spec.engine.kind == "Tandem" or not pairs:
        return list(ready)
    fed = {build_of(group) for group in prefill_groups(blueprint, live) if group.is_ready}
    return [group for group in ready if is_whole(group) or build_of(group) in fed]


def prefill_groups(blueprint: Blueprint, live: Children) -> list[PodGroup]:
    """The replicas of the prefill role that there are, whether the spec has one or not."""
    pods = pods_of(workload_key(blueprint, Role.PREFILL), live)
    return group_pods(pods, group_size(labels_of(pods[0])) if pods else 1)


def _is_starting(group: PodGroup, *, rests: bool) -> bool:
    """Whether what is not up may come up by itself: nothing has ended or been refused."""
    restarts = (s.get("restartCount") or 0 for pod in group.pods for s in dig_list(pod, "status", "containerStatuses"))
    problems = (pod_problem(pod) for pod in group.pods)
    waits = any(not has_started(pod) or (rests and is_on_standby(pod)) for pod in group.pods) and not any(restarts)
    return waits and not any(problem is not None and problem.stalled for problem in problems)


def state_of(group: PodGroup, *, alike: Collection[str], now: datetime) -> ReplicaState:
    """Whether a replica serves. Pods of two templates do not form one."""
    templates = {None if (found := revision_of(pod)) in alike else found for pod in group.pods}
    if group.is_broken or len(templates) > 1:
        return ReplicaState.DOWN
    if group.is_ready:
        return ReplicaState.READY
    unready = [pod for pod in group.pods if not is_ready(pod)]
    return ReplicaState.UNSURE if all(_may_serve(pod, now=now) for pod in unready) else ReplicaState.DOWN


def _may_serve(pod: Manifest, *, now: datetime) -> bool:
    """Whether an unready pod that was up may be serving. When a node is out of reach the control plane calls its pods
    unready, and their containers remain what the kubelet last said of them: ready."""
    condition = next((c for c in dig_list(pod, "status", "conditions") if c.get("type") == "Ready"), Manifest())
    since = parse_time(condition.get("lastTransitionTime"))
    if since is None:
        return False
    kubelet_says_ready = all(status.get("ready") for status in dig_list(pod, "status", "containerStatuses"))
    if condition.get("reason") == WAITS_FOR_GATES:
        # Gateways do not wait for the gate that waits for them: only their own word says that it serves nobody.
        gates = (c for c in dig_list(pod, "status", "conditions") if c.get("type") == names.CONDITION_ADMITTED)
        return kubelet_says_ready and all(gate.get("status") != "False" for gate in gates)
    return now - since < (UNREACHABLE if kubelet_says_ready else BLINK)


def last_progress(live: Children) -> datetime | None:
    """When a pod of the model last came or became ready, or ceased to be."""
    times = [
        parse_time(text)
        for key, pod in live.items()
        if key.kind == POD.name
        for text in (
            dig(pod, "metadata", "creationTimestamp"),
            *(c.get("lastTransitionTime") for c in dig_list(pod, "status", "conditions") if c.get("type") == "Ready"),
        )
    ]
    return max((time for time in times if time is not None), default=None)
