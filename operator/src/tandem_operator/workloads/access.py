"""Who the pods are and what they may ask of the API server: workers nothing, gateways to see pods and their model."""

from __future__ import annotations

from tandem_api import names

from tandem_operator.manifests import ROLE, ROLE_BINDING, SERVICE_ACCOUNT, Manifest
from tandem_operator.workloads.blueprint import Blueprint


def build_access(blueprint: Blueprint) -> list[Manifest]:
    """ServiceAccounts, and the gateway's Role with its binding."""
    account = blueprint.gateway_account
    read = {"verbs": ["get", "list", "watch"]}
    rules = [
        {"apiGroups": [""], "resources": ["pods"], **read},
        {"apiGroups": [names.GROUP], "resources": [names.PLURAL], "resourceNames": [blueprint.name], **read},
    ]
    binding = {
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": blueprint.model.metadata.namespace}],
    }
    return [
        blueprint.child(
            SERVICE_ACCOUNT, blueprint.worker_account, {"automountServiceAccountToken": False}, component="worker"
        ),
        blueprint.child(SERVICE_ACCOUNT, account, {}, component="gateway"),
        blueprint.child(ROLE, account, {"rules": rules}, component="gateway"),
        blueprint.child(ROLE_BINDING, account, binding, component="gateway"),
    ]
