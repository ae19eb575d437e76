"""Whether a model's claim is filled, and what to do until it is. Pure.

One Job for each thing that workers would find in the claim. While it has not succeeded, no worker is made that would
need it: a new model waits, and what serves goes on as it is. A Job that succeeded stays: it is what is known. One that
failed stays too, until somebody deletes it, and a new one is made; or until something else is wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tandem_api.crd.status import Condition

from tandem_operator.children.plan import ChildStep, plan_step
from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import (
    JOB,
    NETWORK_POLICY,
    POD,
    ChildKey,
    Manifest,
    child_key,
    controller_of,
    dig,
    dig_list,
    labels_of,
)
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.causes import pod_problem
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.child import COMPONENT_LABEL
from tandem_operator.workloads.policies import build_prewarm_policy
from tandem_operator.workloads.prewarm import COMPONENT, FETCH, PREPARE, RETRIES, build_prewarm_job, wants_prewarm

CONDITION = "CachePrewarmed"
PREWARMING = "Prewarming"
"""Reason while the Job is at work."""
_FAILED = "PrewarmFailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrewarmPlan:
    """What to do."""

    make: tuple[Manifest, ...] = ()
    """In this order."""
    delete: tuple[ChildKey, ...] = ()
    """What nobody waits for any more."""
    own: frozenset[ChildKey] = frozenset()
    """What is there of all this. None of it is among the children that follow from the spec: only this plan decides."""
    hold: bool = False
    """Nothing new is to start yet."""
    problem: Problem | None = None
    """What is waited for, or why that is in vain."""
    condition: list[Condition] = field(default_factory=list[Condition])


def plan_prewarm(blueprint: Blueprint, live: Mapping[ChildKey, Manifest], *, known: bool = True) -> PrewarmPlan:
    """`blueprint` is what the spec asks for. `known`: so is the commit that it means."""
    spec, uid = blueprint.model.spec, blueprint.model.metadata.uid
    own = {key for key, child in live.items() if _is_part(key, child) and _is_of(child, uid)}
    if not wants_prewarm(blueprint):
        return PrewarmPlan(delete=tuple(sorted(own)), own=frozenset(own))
    if spec.suspend or not known:  # nobody waits for it; what it has done stays known
        return PrewarmPlan(own=frozenset(own))
    try:
        job, policy = build_prewarm_job(blueprint), build_prewarm_policy(blueprint)
    except InvalidOverlayError:
        return PrewarmPlan(own=frozenset(own))  # told with the StatefulSet, which cannot be made either
    wanted = [job] if policy is None else [policy, job]
    steps = {child_key(each): plan_step(each, live.get(child_key(each)), owner_uid=uid) for each in wanted}
    # A Job is never changed.
    make = [each for each in wanted if child_key(each) not in live]
    make += [
        each for each in wanted if each is policy and each not in make and steps[child_key(each)] is ChildStep.APPLY
    ]
    state = _obstacle(steps) or _judge(blueprint, job, live)
    # A revision that somebody goes back to has been served from this claim.
    hold = state is not None and spec.rollout.revision is None
    return PrewarmPlan(
        make=tuple(make),
        delete=tuple(sorted(own - steps.keys())),
        own=frozenset(own),
        hold=hold,
        problem=state if hold else None,
        condition=[_describe(blueprint, state)],
    )


def _is_part(key: ChildKey, child: Manifest) -> bool:
    return key.kind == JOB.name or (
        key.kind == NETWORK_POLICY.name and labels_of(child).get(COMPONENT_LABEL) == COMPONENT
    )


def _obstacle(steps: Mapping[ChildKey, ChildStep]) -> Problem | None:
    """An object that is in the way."""
    for key, step in steps.items():
        if step is ChildStep.TAKEN:
            text = f"{key} exists and belongs to somebody else: rename this model, or delete that object"
            return Problem(reason="ChildNameTaken", message=text, stalled=True)
        if step is ChildStep.WAIT:
            return Problem(reason=PREWARMING, message=f"waiting for the removal of an earlier object: {key}")
    return None


def _is_of(job: Manifest, uid: str) -> bool:
    return (controller_of(job) or {}).get("uid") == uid


def _claim(blueprint: Blueprint) -> str:
    cache = blueprint.model.spec.model.cache
    assert cache is not None
    return str(cache.persistent_volume_claim)


def _describe(blueprint: Blueprint, state: Problem | None) -> Condition:
    if state is None:
        text = f"the claim {_claim(blueprint)} holds the model, verified and prepared"
        return Condition(type=CONDITION, status="True", reason="Prewarmed", message=text)
    return Condition(type=CONDITION, status="False", reason=state.reason, message=state.message)


def _judge(blueprint: Blueprint, desired: Manifest, live: Mapping[ChildKey, Manifest]) -> Problem | None:
    """None once the Job has succeeded."""
    name, job = str(dig(desired, "metadata", "name")), live.get(child_key(desired))
    if job is None:
        return Problem(reason=PREWARMING, message=f"Job {name} is about to fill the claim {_claim(blueprint)}")
    ended = {c.get("type"): c for c in dig_list(job, "status", "conditions") if c.get("status") == "True"}
    if "Complete" in ended:
        return None
    pods = sorted(
        (pod for key, pod in live.items() if key.kind == POD.name and _is_of(pod, str(dig(job, "metadata", "uid")))),
        key=lambda pod: str(dig(pod, "metadata", "creationTimestamp")),
    )
    if "Failed" in ended:
        return _failed(name, pods, ended["Failed"])
    number = (dig(job, "status", "failed") or 0) + 1
    text = f"Job {name} fills the claim {_claim(blueprint)}, attempt {number} of {RETRIES + 1}"
    # What a pod ended with is tried again first; what keeps one from running may need a person at once.
    present = [pod for pod in pods if dig(pod, "status", "phase") != "Failed"]
    before = _last_trouble(pod for pod in pods if pod not in present)
    ending = "" if before is None else f"; the attempt before: {before.message}"
    if present and (trouble := pod_problem(present[-1])) is not None:
        return Problem(reason=trouble.reason, message=f"{text}: {trouble.message}{ending}", stalled=trouble.stalled)
    waits = f"its pod is being made (kubectl describe job {name} says what may keep it from that)"
    doing = _progress(present[-1]) if present else waits
    return Problem(reason=PREWARMING, message=f"{text}: {doing}{ending}")


def _last_trouble(pods: Iterable[Manifest]) -> Problem | None:
    """What the last of them says that says anything."""
    return next((found for pod in reversed(list(pods)) if (found := pod_problem(pod)) is not None), None)


def _failed(name: str, pods: list[Manifest], condition: Manifest) -> Problem:
    """The last pod's own words say more than the Job's."""
    trouble = _last_trouble(pods)
    why = str(condition.get("message") or condition.get("reason")) if trouble is None else trouble.message
    text = (
        f"Job {name} could not fill the cache: {why}. Workers wait for it, and those that serve go on: mend that and"
        f" kubectl delete job {name}, which has it made anew; or remove spec.model.cache.prewarm"
    )
    from_worker = trouble is not None and trouble.from_worker
    reason = trouble.reason if trouble is not None and from_worker else _FAILED
    return Problem(reason=reason, message=text, stalled=True, from_worker=from_worker)


def _progress(pod: Manifest) -> str:
    """Which of its containers is at work, and since when."""
    doing = {FETCH: "downloading and verifying", PREPARE: "preparing"}
    statuses = [*dig_list(pod, "status", "initContainerStatuses"), *dig_list(pod, "status", "containerStatuses")]
    for status in statuses:
        if (since := dig(status, "state", "running", "startedAt")) is not None:
            what = doing.get(str(status.get("name")), f"its container {status.get('name')} runs")
            return f"{what} since {since}"
    return "its pod is starting"
