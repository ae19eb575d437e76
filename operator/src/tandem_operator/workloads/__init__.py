"""From an InferenceModel to the manifests of its children. Pure: no Kubernetes client, no clock, no environment."""

from __future__ import annotations

from tandem_operator.manifests import Manifest
from tandem_operator.workloads.access import build_access
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.gateway import build_gateway
from tandem_operator.workloads.policies import build_network_policies
from tandem_operator.workloads.workers import build_workers

__all__ = ["Blueprint", "build_children"]


def build_children(blueprint: Blueprint) -> list[Manifest]:
    """Every child that the model should have, in the order of creation.

    Raises:
        InvalidOverlayError: a podTemplate does not fit.
    """
    children = [
        *build_access(blueprint),
        *build_network_policies(blueprint),
        *build_gateway(blueprint),
        *(child for role in blueprint.worker_roles for child in build_workers(blueprint, role)),
    ]
    return sorted(children, key=blueprint.creation_order)
