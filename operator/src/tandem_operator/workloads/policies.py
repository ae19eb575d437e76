"""NetworkPolicies: workers talk to their own model's pods, the pods of a group to each other, gateways to everyone."""

from __future__ import annotations

from tandem_api import names
from tandem_api.names import Role

from tandem_operator.manifests import NETWORK_POLICY, Manifest
from tandem_operator.workloads.blueprint import COMPONENT_LABEL, Blueprint, component_of

METRICS_NAMESPACE_LABEL = f"{names.GROUP}/metrics"
"""A namespace labelled so (value `allowed`) may reach the workers' HTTP port to scrape them."""
_EPHEMERAL_PORTS = (32768, 60999)
"""Where gloo and NCCL listen: they let the kernel choose, and this is what a new network namespace chooses from."""


def build_network_policies(blueprint: Blueprint) -> list[Manifest]:
    """One policy for the workers, one for the gateway, and one for each role whose replicas have several pods."""
    spread = [role for role in blueprint.worker_roles if blueprint.worker_spec(role).nodes_per_replica > 1]
    return [
        _build_worker_policy(blueprint),
        _build_gateway_policy(blueprint),
        *(_build_group_policy(blueprint, role) for role in spread),
    ]


def _build_worker_policy(blueprint: Blueprint) -> Manifest:
    same_model = {"podSelector": {"matchLabels": {names.LABEL_MODEL: blueprint.name}}}
    ranks = max(blueprint.worker_spec(role).ranks_per_pod for role in blueprint.worker_roles)
    scrapers = {"namespaceSelector": {"matchLabels": {METRICS_NAMESPACE_LABEL: "allowed"}}}
    workers = {
        "matchLabels": {names.LABEL_MODEL: blueprint.name},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": ["decode", "prefill"]}],
    }
    spec = {
        "podSelector": workers,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [same_model], "ports": [_port(names.WORKER_HTTP_PORT)]},
            {
                "from": [{"podSelector": workers}],
                "ports": [_port(names.WORKER_KV_PORT, names.WORKER_KV_PORT + ranks - 1)],
            },
            {"from": [scrapers], "ports": [_port(names.WORKER_HTTP_PORT)]},
        ],
    }
    return blueprint.child(NETWORK_POLICY, f"{blueprint.name}-worker", {"spec": spec}, component="worker")


def _build_group_policy(blueprint: Blueprint, role: Role) -> Manifest:
    """Ranks meet at the leader's group port and then connect to each other at ports that the kernel chooses."""
    component = component_of(role)
    pods = {"matchLabels": blueprint.selector(component)}
    ports = [_port(names.WORKER_GROUP_PORT), _port(*_EPHEMERAL_PORTS)]
    spec = {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}], "ports": ports}],
    }
    name = names.workload_name(blueprint.name, role)
    return blueprint.child(NETWORK_POLICY, name, {"spec": spec}, component=component, role=role)


def _build_gateway_policy(blueprint: Blueprint) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": blueprint.selector("gateway")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [_port(names.GATEWAY_HTTP_PORT), _port(names.GATEWAY_METRICS_PORT)]}],
    }
    return blueprint.child(NETWORK_POLICY, f"{blueprint.name}-gateway", {"spec": spec}, component="gateway")


def _port(first: int, last: int | None = None) -> Manifest:
    """One port, or all from `first` to `last`."""
    return {"port": first, "protocol": "TCP"} | ({"endPort": last} if last is not None and last > first else {})
