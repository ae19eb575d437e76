"""Prefill workers that `spec.prefill` does not ask for any more, while decode workers that need them are left. Pure.

Decode workers that were started beside prefill workers are replaced one by one by workers that compute prompts
themselves. Until the last of them is gone, what they send prompts to stays as it is, and so do the ways to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_api.names import LABEL_ROLE, Role

from tandem_operator.objects.manifests import (
    NETWORK_POLICY,
    POD,
    STATEFUL_SET,
    ChildKey,
    Children,
    Manifest,
    child_key,
    labels_of,
)
from tandem_operator.observe.groups import PodGroup
from tandem_operator.observe.roles import pods_of, prefill_groups, workload_key
from tandem_operator.workloads.blueprint import Blueprint, component_of
from tandem_operator.workloads.child import COMPONENT_LABEL, sign

NOBODY: frozenset[ChildKey] = frozenset()


def needed_partners(blueprint: Blueprint, live: Children) -> frozenset[ChildKey]:
    """The children of the prefill role that stay though they are not desired; `live` has the model's own children."""
    spec = blueprint.model.spec
    if spec.prefill is not None or spec.suspend or spec.rollout.type == "Recreate":
        return NOBODY
    decode = pods_of(workload_key(blueprint, Role.UNIFIED), live)
    if not any(labels_of(pod).get(LABEL_ROLE) == Role.DECODE.value for pod in decode):
        return NOBODY
    component = component_of(Role.PREFILL)
    return frozenset(
        key
        for key, child in live.items()
        if key.kind != POD.name and labels_of(child).get(COMPONENT_LABEL) == component
    )


def partner_groups(blueprint: Blueprint, live: Children) -> list[PodGroup]:
    """The replicas of the prefill role that stay though they are not desired."""
    return prefill_groups(blueprint, live) if needed_partners(blueprint, live) else []


def with_ways(desired: Sequence[Manifest], partners: frozenset[ChildKey], live: Children) -> list[Manifest]:
    """`desired`, with policies that let pass also what they do now, where partners stay."""
    if not any(key.kind == STATEFUL_SET.name for key in partners):
        return list(desired)
    return [
        with_rules(child, live[child_key(child)])
        if child["kind"] == NETWORK_POLICY.name and child_key(child) in live
        else child
        for child in desired
    ]


def with_rules(policy: Manifest, other: Manifest) -> Manifest:
    """`policy` with the rules of `other`: those of a NetworkPolicy add up."""
    rules = {
        way: policy["spec"][way] + [rule for rule in other["spec"].get(way, []) if rule not in policy["spec"][way]]
        for way in ("ingress", "egress")
        if way in policy["spec"]
    }
    return sign(policy | {"spec": policy["spec"] | rules})
