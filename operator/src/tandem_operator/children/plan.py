"""What to do about the children of one model: pure decisions from what is desired and what is there.

Invariants: an object that belongs to somebody else is never written; an object that already says what is desired is not
written either, so that a restart changes nothing; what is no longer desired goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from tandem_api import names
from tandem_api.names import MANAGED_BY_LABEL

from tandem_operator.children.matching import satisfies
from tandem_operator.children.templates import as_answered, is_withheld
from tandem_operator.objects.manifests import (
    CONFIG_MAP,
    POD,
    ROLE,
    ROLE_BINDING,
    WORKLOADS,
    ChildKey,
    Children,
    Manifest,
    child_key,
    controller_of,
    dig,
    dig_list,
    labels_of,
)
from tandem_operator.workloads.child import COMPONENT_LABEL, config_hash

_ACCESS = (ROLE.name, ROLE_BINDING.name)


class ChildStep(Enum):
    """What to do about one desired child."""

    KEEP = "keep"
    APPLY = "apply"
    WAIT = "wait"
    """It is being deleted, or belongs to an earlier InferenceModel of the same name: it will be gone soon."""
    TAKEN = "taken"
    """It belongs to somebody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """Everything to do for one model, in order."""

    apply: tuple[Manifest, ...] = ()
    waiting: tuple[ChildKey, ...] = ()
    taken: tuple[ChildKey, ...] = ()
    delete: tuple[ChildKey, ...] = ()


def plan_children(
    desired: Iterable[Manifest],
    live: Children,
    *,
    owner_uid: str,
    hold_workloads: bool = False,
    keep: frozenset[ChildKey] = frozenset(),
) -> ChildPlan:
    """The plan that turns `live` into `desired`, but for workloads where those have to wait. What is in `keep` stays as
    it is, though it is not desired.

    `live` may be incomplete: whoever executes the plan asks `plan_step` again for an object found only then.
    """
    steps = {
        child_key(child): (child, plan_step(child, live.get(child_key(child)), owner_uid=owner_uid))
        for child in desired
    }
    return ChildPlan(
        apply=tuple(
            child
            for key, (child, step) in steps.items()
            if step is ChildStep.APPLY and not (hold_workloads and key.kind in WORKLOADS)
        ),
        waiting=tuple(key for key, (_, step) in steps.items() if step is ChildStep.WAIT),
        taken=tuple(key for key, (_, step) in steps.items() if step is ChildStep.TAKEN),
        delete=tuple(sorted(_surplus(steps, live, owner_uid=owner_uid, keep=keep))),
    )


def plan_step(desired: Manifest, live: Manifest | None, *, owner_uid: str) -> ChildStep:
    """What to do about one desired child, given the object of that name."""
    if live is None:
        return ChildStep.APPLY
    owner = controller_of(live)
    if owner is None:
        # An orphan of ours, for example after `kubectl delete --cascade=orphan`, is adopted; anything else is not ours.
        labels, wanted = labels_of(live), labels_of(desired)
        ours = all(labels.get(key) == wanted[key] for key in (MANAGED_BY_LABEL, names.LABEL_MODEL))
        if not ours:
            return ChildStep.TAKEN
    elif owner.get("uid") != owner_uid:
        reference = dig_list(desired, "metadata", "ownerReferences")[0]
        # The same name under another uid is a model from before: the garbage collector is about to remove its children.
        earlier = owner.get("kind") == reference["kind"] and owner.get("name") == reference["name"]
        return ChildStep.WAIT if earlier else ChildStep.TAKEN
    if dig(live, "metadata", "deletionTimestamp") is not None:
        return ChildStep.WAIT  # what is applied to it now would go with it
    return ChildStep.KEEP if satisfies(live, as_answered(desired, live)) else ChildStep.APPLY


def plan_clearing(desired: Manifest, live: Manifest | None) -> Manifest | None:
    """A merge patch of what has to go before `desired` can be applied; None where nothing does.

    Server-side apply leaves alone what its manager did not set, but the API server does not admit the `rollingUpdate`
    that it had filled in itself beside another strategy.
    """
    strategy = dig(desired, "spec", "updateStrategy", "type")
    if strategy != "OnDelete" or dig(live, "spec", "updateStrategy", "rollingUpdate") is None:
        return None
    return {"spec": {"updateStrategy": {"type": strategy, "rollingUpdate": None}}}


def _surplus(
    steps: Mapping[ChildKey, tuple[Manifest, ChildStep]], live: Children, *, owner_uid: str, keep: frozenset[ChildKey]
) -> Iterable[ChildKey]:
    """Owned children that are no longer desired. A configuration stays while a pod may start from it, and what gives
    gateways their rights until what is to give them from now on has been seen to be there."""
    is_bound = all(step is ChildStep.KEEP for key, (_, step) in steps.items() if key.kind == ROLE_BINDING.name)
    in_use = {config_hash(child) for key, child in live.items() if key.kind == POD.name}
    rolling = {
        labels_of(child).get(COMPONENT_LABEL)
        for key, (child, step) in steps.items()
        if key.kind in WORKLOADS and (step is not ChildStep.KEEP or not is_rolled_out(live[key]))
    }
    rolling |= {labels_of(live[key]).get(COMPONENT_LABEL) for key in keep if key in live}
    for key, child in live.items():
        owner = controller_of(child)
        if key in steps or key in keep or key.kind == POD.name or owner is None or owner.get("uid") != owner_uid:
            continue
        if dig(child, "metadata", "deletionTimestamp") is not None:
            continue
        if key.kind in _ACCESS and not is_bound:
            continue
        if key.kind == CONFIG_MAP.name and (
            config_hash(child) in in_use or labels_of(child).get(COMPONENT_LABEL) in rolling
        ):
            continue
        yield key


def is_rolled_out(workload: Manifest) -> bool:
    """Whether every pod that its controller makes from now on is of the newest template. Where a rollout is held, they
    come back from the older one, and may all be gone meanwhile."""
    status: Manifest = workload.get("status") or {}
    if status.get("observedGeneration") != dig(workload, "metadata", "generation") or is_withheld(workload):
        return False
    return (status.get("updatedReplicas") or 0) == (status.get("replicas") or 0)
