"""Who the pods are and what they may ask of the API server: workers nothing, gateways to see pods and models.

What gateways may do is a ClusterRole of the chart, bound in each namespace: so the operator writes no Roles.
"""

from __future__ import annotations

from tandem_operator.objects.manifests import ROLE_BINDING, SERVICE_ACCOUNT, Manifest
from tandem_operator.workloads.blueprint import Blueprint, digest
from tandem_operator.workloads.child import build_child


def build_access(blueprint: Blueprint) -> list[Manifest]:
    """ServiceAccounts, and the binding of the gateway's to its ClusterRole."""
    account = blueprint.account("gateway")
    binding = {
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": blueprint.release.gateway_cluster_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": blueprint.model.metadata.namespace}],
    }
    return [
        build_child(
            blueprint,
            SERVICE_ACCOUNT,
            blueprint.account("worker"),
            {"automountServiceAccountToken": False},
            component="worker",
        ),
        build_child(blueprint, SERVICE_ACCOUNT, account, {}, component="gateway"),
        build_child(blueprint, ROLE_BINDING, _binding_name(blueprint), binding, component="gateway"),
    ]


def _binding_name(blueprint: Blueprint) -> str:
    """A binding cannot be changed to another role, so each role has a binding of its own name."""
    return f"{blueprint.account('gateway')}-{digest(blueprint.release.gateway_cluster_role)[:8]}"
