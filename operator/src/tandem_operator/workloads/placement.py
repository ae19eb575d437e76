"""Placement: where pods run and what they run with: the fields of a workload that say so, and the spread that is the
default.

The order of precedence is generated, then these fields, then the podTemplate: `pods.pod_template` merges it over all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from tandem_api.crd.pods import TopologySpreadConstraint, Workload
from tandem_api.names import Role

from tandem_operator.objects.manifests import Manifest, dig
from tandem_operator.workloads.blueprint import Blueprint, component_of
from tandem_operator.workloads.child import build_selector

_HOST, _ZONE = "kubernetes.io/hostname", "topology.kubernetes.io/zone"
_DEFAULT_SPREAD = {Role.GATEWAY: (_HOST, _ZONE)}
"""Gateways survive the loss of a zone. Workers spread over nodes alone: key-value blocks cross zones slowly."""


def placement(blueprint: Blueprint, role: Role, workload: Workload) -> Manifest:
    """Fields of the PodSpec; only those that are set."""
    fields: Manifest = {
        "nodeSelector": workload.node_selector,
        "tolerations": _plain(workload.tolerations),
        "affinity": None if workload.affinity is None else _plain([workload.affinity])[0],
        "topologySpreadConstraints": _spread(blueprint, role, workload),
        "priorityClassName": workload.priority_class_name,
        "runtimeClassName": workload.runtime_class_name,
        "imagePullSecrets": _plain(workload.image_pull_secrets),
        "resourceClaims": _plain(workload.resource_claims),
    }
    return {key: value for key, value in fields.items() if value}


def _spread(blueprint: Blueprint, role: Role, workload: Workload) -> list[Manifest]:
    """Who writes constraints, in the field or in the podTemplate, decides about all of them."""
    wanted = workload.topology_spread_constraints
    if wanted is None:
        template = workload.pod_template
        is_overlaid = template is not None and dig(template.spec, "topologySpreadConstraints") is not None
        keys = () if is_overlaid or not blueprint.pod_defaults else _DEFAULT_SPREAD.get(role, (_HOST,))
        wanted = [TopologySpreadConstraint(topology_key=key) for key in keys]
    own = {"labelSelector": {"matchLabels": build_selector(blueprint, component_of(role))}}
    return [own | constraint for constraint in _plain(wanted)]


def _plain(values: Sequence[BaseModel]) -> list[dict[str, Any]]:
    return [value.model_dump(by_alias=True, exclude_none=True) for value in values]
