"""Rollouts on StatefulSets: from live objects to the planner's view, and from its plan to manifests and pods to delete.

The partition is above all pods, also above those that may be added, but while replicas are replaced: whoever writes
another template into a StatefulSet replaces nothing by it. It comes down together with a record of the revision that it
is meant for (`templates`); one that is low without is not the operator's, and is raised before anything else. Pods are
deleted only once their StatefulSet's controller has seen the partition that lets them come back from that template.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tandem_api.names import Role

from tandem_operator.children.plan import is_rolled_out
from tandem_operator.children.templates import (
    ANSWER,
    RELEASED,
    REVISIONS,
    WITHHELD,
    Revisions,
    is_answer,
    is_new_template,
    is_released,
    read_revisions,
    record_first,
    record_revisions,
)
from tandem_operator.objects.manifests import (
    DEPLOYMENT,
    ChildKey,
    Children,
    Manifest,
    annotations_of,
    child_key,
    dig,
    parse_time,
)
from tandem_operator.objects.pods import is_leaving, is_up
from tandem_operator.observe.causes import role_problem
from tandem_operator.observe.groups import group_pods
from tandem_operator.observe.replica import ObservedReplica, ReplicaState
from tandem_operator.observe.roles import observe_replicas, pods_of, workload_key
from tandem_operator.rollout.replacement import RolePlan, RoleView, plan_replacement
from tandem_operator.rollout.trial import RoleFleet, TrialFleet
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.pods import ROOM_TO_DRAIN_SECONDS, grace_seconds

ABOVE_ALL = 1_000_000
"""The partition of a StatefulSet that replaces nothing: above every pod that anybody may add."""
TROUBLE_AGE = timedelta(seconds=30)
"""A pod that is younger may be in a trouble that passes: a registry that does not answer at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatefulSetPlan:
    """What the workers' StatefulSets should say, and which of their pods to delete."""

    desired: list[Manifest]
    scale: dict[ChildKey, int]
    """Pods of StatefulSets that are not desired, because their template cannot be made."""
    replace: tuple[ChildKey, ...] = ()


def plan_stateful_sets(
    blueprint: Blueprint,
    desired: Sequence[Manifest],
    live: Children,
    *,
    now: datetime,
    limits: Mapping[Role, int] | None = None,
    waiting: bool = False,
    resting: bool = False,
) -> StatefulSetPlan:
    """`desired` with strategies and counts for this moment of a rollout. During a canary there may be as many replicas
    of the newest template as `limits` says. What waits for its turn replaces nothing that serves. A rollout that is
    `resting`, for it waits, is paused or stuck, stays so where all replicas go now: they come back as they were.

    A StatefulSet that is not desired, because its template cannot be made, is looked at as it is and not changed.
    """
    by_key = {child_key(child): child for child in desired}
    views: dict[Role, RoleView] = {}
    held: dict[Role, RolePlan] = {}
    for role in blueprint.worker_roles:
        key = workload_key(blueprint, role)
        if key in live:
            view = _view(blueprint, role, key, live, now=now, limit=(limits or {}).get(role))
            view = _withheld(blueprint, view, resting=resting)
            held_plan = _hold_unseen(blueprint, role, view, by_key.get(key), live)
            views |= {role: view} if held_plan is None else {}
            held |= {role: held_plan} if held_plan is not None else {}
        elif key in by_key:
            # A new one is at rest from the start: whoever writes another template into it replaces nothing by that.
            by_key[key] = record_first(_with_partition(by_key[key], ABOVE_ALL))
    gateways = [child for key, child in live.items() if key == ChildKey(DEPLOYMENT.name, blueprint.name)]
    # Gateways know how to ask the workers of the release before theirs, and not what those of the next one want.
    only_down = waiting or not all(map(is_rolled_out, gateways))
    # What one role is about to become is not known while it is held: the other one waits for it.
    plans = held | (
        plan_replacement(views, paused=blueprint.model.spec.rollout.paused, only_down=only_down)
        if not held
        else {role: _hold(view, is_new=False) for role, view in views.items()}
    )
    replace: list[ChildKey] = []
    scale: dict[ChildKey, int] = {}
    for role, plan in plans.items():
        key, size = workload_key(blueprint, role), blueprint.worker_spec(role).nodes_per_replica
        if key in by_key:
            by_key[key] = _with_plan(by_key[key], live[key], plan, size=size, view=views.get(role))
        else:
            scale[key] = plan.total * size
        if role in views:
            replace += _pods_to_delete(blueprint, role, views[role], plan, live)
            replace += _pods_to_rest(blueprint, role, live)
    return StatefulSetPlan(desired=list(by_key.values()), scale=scale, replace=tuple(sorted(set(replace))))


def _withheld(blueprint: Blueprint, view: RoleView, *, resting: bool) -> RoleView:
    """`view` where a rollout is paused or rests: replicas of which all go now come back as they were."""
    serves = any(replica.state is ReplicaState.READY for replica in view.replicas) if view.standby else view.total > 0
    if not blueprint.model.spec.rollout.paused and not (resting and serves):
        return view
    return dataclasses.replace(view, is_withheld=view.is_withheld or view.wanted == 0)


def _hold_unseen(
    blueprint: Blueprint, role: Role, view: RoleView, wanted: Manifest | None, live: Children
) -> RolePlan | None:
    """A plan that replaces nothing, where a role cannot be planned yet; None where it can."""
    key = workload_key(blueprint, role)
    is_new = wanted is not None and is_new_template(wanted, live[key])
    # Status speaks of the template before this one until its controller has seen it: who is outdated is not known.
    if is_new or not _is_seen(live[key]):
        return _hold(view, is_new=is_new)
    # A controller that replaces by itself is stopped first; what is left then is planned in the next look.
    return _hold(view, is_new=True) if _is_loose(blueprint, role, key, live) else None


def _view(
    blueprint: Blueprint, role: Role, key: ChildKey, live: Children, *, now: datetime, limit: int | None = None
) -> RoleView:
    spec, workload = blueprint.worker_spec(role), live[key]
    size = spec.nodes_per_replica
    groups = group_pods(pods_of(key, live), size)
    revisions = read_revisions(workload)
    total, partition = _groups(dig(workload, "spec", "replicas") or 0, size), _partition(workload)
    if partition is not None:
        partition = min(total, _groups(partition, size)) if is_released(workload) else total
    # What something else scales has no surge: it would be taken for a wish.
    surge = 0 if spec.scaling.mode == "External" else blueprint.model.spec.rollout.surge_of(spec.replicas)
    view = RoleView(
        wanted=blueprint.replicas(spec.replicas),
        total=total,
        partition=partition,
        replicas=observe_replicas(groups, alike=revisions.alike, now=now, rests=blueprint.model.spec.standby > 0),
        surge=surge,
        unavailable=blueprint.unavailable_of(role, spec.replicas),
        is_even=revisions.is_even,
        standby=blueprint.standby,
        limit=limit,
    )
    return dataclasses.replace(view, is_withheld=_is_withheld(view, workload, revisions))


def _is_withheld(view: RoleView, workload: Manifest, revisions: Revisions) -> bool:
    if revisions.is_even or annotations_of(workload).get(WITHHELD) != revisions.newest:
        return False
    ready = sum(replica.state is ReplicaState.READY and not replica.is_leaving for replica in view.replicas)
    return view.wanted == 0 or ready < view.wanted - view.unavailable


def _partition(workload: Manifest) -> int | None:
    """In pods; None where its controller replaces none."""
    strategy = dig(workload, "spec", "updateStrategy")
    return None if dig(strategy, "type") == "OnDelete" else dig(strategy, "rollingUpdate", "partition") or 0


def _is_loose(blueprint: Blueprint, role: Role, key: ChildKey, live: Children) -> bool:
    """Whether the controller may be replacing pods that the operator has not released: somebody else has written, or an
    earlier release, whose partition came down to 0 for good."""
    partition = _partition(live[key])
    if partition is None or is_released(live[key]):
        return False
    newest, size = {read_revisions(live[key]).newest}, blueprint.worker_spec(role).nodes_per_replica
    groups = group_pods(pods_of(key, live), size)
    return any(group.outdated(newest) for group in groups if (group.index + 1) * size > partition)


def observe_fleet(
    blueprint: Blueprint, desired: Sequence[Manifest], live: Children, *, tried: Collection[Role], now: datetime
) -> TrialFleet:
    """The workers as a canary is decided by them. `desired` has the StatefulSets as they should be, and `tried` are the
    roles that the revision on trial changes."""
    by_key = {child_key(child): child for child in desired}
    roles: dict[Role, RoleFleet] = {}
    for role in blueprint.worker_roles:
        key = workload_key(blueprint, role)
        present, wanted = live.get(key), by_key.get(key)
        if present is None:
            spec = blueprint.worker_spec(role)
            roles[role] = RoleFleet(wanted=blueprint.replicas(spec.replicas), is_current=False, is_tried=role in tried)
            continue
        is_current = _is_seen(present) and wanted is not None and not is_new_template(wanted, present)
        roles[role] = _role_fleet(blueprint, role, live, is_current=is_current, is_tried=role in tried, now=now)
    return TrialFleet(roles=roles)


def _role_fleet(
    blueprint: Blueprint, role: Role, live: Children, *, is_current: bool, is_tried: bool, now: datetime
) -> RoleFleet:
    key = workload_key(blueprint, role)
    view = _view(blueprint, role, key, live, now=now)
    if blueprint.standby:
        view = dataclasses.replace(view, replicas=())  # they serve nobody
    revisions = read_revisions(live[key])
    groups = {g.index: g for g in group_pods(pods_of(key, live), blueprint.worker_spec(role).nodes_per_replica)}
    new = [r for r in view.replicas if not r.is_outdated and not r.is_leaving]
    old = [r for r in view.replicas if r.is_outdated]
    settled = [pod for r in new for pod in groups[r.index].pods if _is_older(pod, TROUBLE_AGE, now=now)]
    trouble = role_problem(settled)

    def leaders(replicas: Sequence[ObservedReplica]) -> tuple[str, ...]:
        return tuple(str(groups[replica.index].pods[0]["metadata"]["name"]) for replica in replicas)

    return RoleFleet(
        wanted=view.wanted,
        surge=view.surge,
        new=len(new),
        new_ready=sum(r.state is ReplicaState.READY for r in new),
        new_up=sum(r.state is not ReplicaState.DOWN for r in new),
        old=len(old),
        old_up=sum(r.state is not ReplicaState.DOWN for r in old),
        is_current=is_current,
        keeps_old=revisions.current is not None and not revisions.is_even,
        is_tried=is_tried,
        trouble=trouble if trouble is not None and trouble.stalled else None,
        new_workers=leaders(new),
        old_workers=leaders(old),
    )


def _is_older(pod: Manifest, age: timedelta, *, now: datetime) -> bool:
    made = parse_time(dig(pod, "metadata", "creationTimestamp"))
    return made is not None and now - made >= age


def _groups(pods: int, size: int) -> int:
    return -(-pods // size)


def _is_seen(workload: Manifest) -> bool:
    return dig(workload, "status", "observedGeneration") == dig(workload, "metadata", "generation")


def _hold(view: RoleView, *, is_new: bool) -> RolePlan:
    """Replace nothing. What is added is made as the others were: nobody has seen what the newest template is worth."""
    if view.wanted == 0:
        if view.standby:
            return RolePlan(total=view.standby, partition=view.standby)
        keeps = view.is_withheld and (is_new or view.total > 0 or view.partition is None)
        return RolePlan(total=0, partition=None if keeps else 0)
    total = max(view.total, view.wanted)
    if is_new and not view.replicas and view.limit is None:
        return RolePlan(total=total, partition=0)  # nothing serves that would be worth another one
    return RolePlan(total=total, partition=total if is_new or total > view.total or view.is_even else view.partition)


def _with_plan(workload: Manifest, present: Manifest, plan: RolePlan, *, size: int, view: RoleView | None) -> Manifest:
    """`workload` with a plan's count and partition, and the records of its template. There is a `view` where its
    controller has seen the template, so that the revision is known whose partition comes down."""
    annotations, records = annotations_of(workload), annotations_of(present)
    records = {name: records[name] for name in (ANSWER, REVISIONS, RELEASED, WITHHELD) if name in records}
    if not is_answer(present):
        records.pop(ANSWER, None)
    revisions = read_revisions(present)
    if view is not None:
        records[REVISIONS] = record_revisions(present, revisions)
        records.pop(WITHHELD, None)
        records |= {WITHHELD: revisions.newest} if view.is_withheld and not view.is_even else {}
    partition = None if plan.partition is None else plan.partition * size
    if plan.partition is None or plan.partition >= plan.total:
        partition = None if plan.partition is None else ABOVE_ALL
        records.pop(RELEASED, None)
    elif view is not None:
        records[RELEASED] = revisions.newest
    workload = _with_partition(workload, partition)
    if "replicas" in workload["spec"]:  # else something else sets it
        workload["spec"]["replicas"] = plan.total * size
    return workload | {"metadata": workload["metadata"] | {"annotations": annotations | records}}


def _with_partition(workload: Manifest, partition: int | None) -> Manifest:
    strategy: Manifest = {"type": "OnDelete"}
    if partition is not None:
        strategy = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    return workload | {"spec": workload["spec"] | {"updateStrategy": strategy}}


def _pods_to_delete(blueprint: Blueprint, role: Role, view: RoleView, plan: RolePlan, live: Children) -> list[ChildKey]:
    """Outdated pods of replicas that come back from the newest template: a controller alone replaces pod by pod and
    waits for each, but pods of two templates never form a replica, and pods of a mistake are never ready."""
    key = workload_key(blueprint, role)
    free = view.is_even or view.partition is None
    allowed = [index for index in plan.replace if free or index >= (view.partition or 0)]
    alike = read_revisions(live[key]).alike
    if not allowed:
        return []
    return [
        child_key(pod)
        for group in group_pods(pods_of(key, live), blueprint.worker_spec(role).nodes_per_replica)
        if group.index in allowed
        for pod in group.outdated(alike)
    ]


def _pods_to_rest(blueprint: Blueprint, role: Role, live: Children) -> list[ChildKey]:
    """Pods of a model that fell asleep that serve and are to be on standby: they come back so. Times are of two clocks,
    so what does not serve is left alone: it may be what has come back."""
    since = parse_time(blueprint.asleep_since)
    if since is None or not blueprint.standby:
        return []
    return [
        child_key(pod)
        for group in group_pods(pods_of(workload_key(blueprint, role), live), 1)
        for pod in group.pods
        if group.index < blueprint.standby
        and is_up(pod)
        and not is_leaving(pod)
        and (made := parse_time(dig(pod, "metadata", "creationTimestamp"))) is not None
        and made <= since
    ]


def plan_drain_limits(blueprint: Blueprint, live: Children) -> list[tuple[ChildKey, int]]:
    """Workers on their way out that would be given longer than `spec.drain` says, and the seconds they should get: pod
    templates leave room, so that another time to drain needs no new pods."""
    seconds = grace_seconds(blueprint)
    return [
        (child_key(pod), seconds)
        for role in blueprint.worker_roles
        for pod in pods_of(workload_key(blueprint, role), live)
        if is_leaving(pod)
        and dig(pod, "metadata", "deletionGracePeriodSeconds") == ROOM_TO_DRAIN_SECONDS
        and seconds < ROOM_TO_DRAIN_SECONDS
    ]
