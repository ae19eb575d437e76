"""From an InferenceModel to the manifests of its children. Pure: no Kubernetes client, no clock, no environment."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_api.names import Role, workload_name

from tandem_operator.objects.errors import InvalidOverlayError
from tandem_operator.objects.manifests import DEPLOYMENT, STATEFUL_SET, ChildKey, Manifest
from tandem_operator.workloads.access import build_access
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.child import creation_order
from tandem_operator.workloads.configs import build_config_map, gateway_config, worker_config
from tandem_operator.workloads.gateway import build_deployment, build_gateway
from tandem_operator.workloads.policies import build_network_policies
from tandem_operator.workloads.store import build_store
from tandem_operator.workloads.workers import build_stateful_set, build_workers

__all__ = ["Blueprint", "Built", "build_children", "build_possible"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What can be made of a model."""

    children: list[Manifest]
    refused: dict[ChildKey, InvalidOverlayError]
    """Workloads whose podTemplate does not fit."""

    @property
    def kinds(self) -> set[str]:
        return {child["kind"] for child in self.children}


def build_children(blueprint: Blueprint) -> list[Manifest]:
    """Every child that the model should have, in the order of creation.

    Raises:
        InvalidOverlayError: a podTemplate does not fit.
    """
    built = build_possible(blueprint)
    for error in built.refused.values():
        raise error
    return built.children


def build_possible(blueprint: Blueprint) -> Built:
    """Every child but the workloads that cannot be made, in the order of creation."""
    children = [*build_access(blueprint), *build_network_policies(blueprint), *build_store(blueprint)]
    refused: dict[ChildKey, InvalidOverlayError] = {}
    for role in (Role.GATEWAY, *blueprint.worker_roles):
        is_gateway = role is Role.GATEWAY
        config = build_config_map(
            blueprint, role, gateway_config(blueprint) if is_gateway else worker_config(blueprint, role)
        )
        children += [config, *(build_gateway(blueprint) if is_gateway else build_workers(blueprint, role))]
        try:
            children.append(
                build_deployment(blueprint, config) if is_gateway else build_stateful_set(blueprint, role, config)
            )
        except InvalidOverlayError as error:
            kind = DEPLOYMENT if is_gateway else STATEFUL_SET
            refused[ChildKey(kind.name, workload_name(blueprint.name, role))] = error
    return Built(children=sorted(children, key=creation_order), refused=refused)
