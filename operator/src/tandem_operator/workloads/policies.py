"""NetworkPolicies: workers talk to their own model's pods, gateways take requests from the whole cluster."""

from __future__ import annotations

from tandem_api import names

from tandem_operator.manifests import NETWORK_POLICY, Manifest
from tandem_operator.workloads.blueprint import COMPONENT_LABEL, Blueprint

METRICS_NAMESPACE_LABEL = f"{names.GROUP}/metrics"
"""A namespace labelled so (value `allowed`) may reach the workers' HTTP port to scrape them."""


def build_network_policies(blueprint: Blueprint) -> list[Manifest]:
    """One policy for the workers, one for the gateway."""
    return [_build_worker_policy(blueprint), _build_gateway_policy(blueprint)]


def _build_worker_policy(blueprint: Blueprint) -> Manifest:
    same_model = {"podSelector": {"matchLabels": {names.LABEL_MODEL: blueprint.name}}}
    scrapers = {"namespaceSelector": {"matchLabels": {METRICS_NAMESPACE_LABEL: "allowed"}}}
    workers = {
        "matchLabels": {names.LABEL_MODEL: blueprint.name},
        "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": ["decode", "prefill"]}],
    }
    spec = {
        "podSelector": workers,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [same_model], "ports": [_port(names.WORKER_HTTP_PORT), _port(names.WORKER_KV_PORT)]},
            {"from": [scrapers], "ports": [_port(names.WORKER_HTTP_PORT)]},
        ],
    }
    return blueprint.child(NETWORK_POLICY, f"{blueprint.name}-worker", {"spec": spec}, component="worker")


def _build_gateway_policy(blueprint: Blueprint) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": blueprint.selector("gateway")},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": [_port(names.GATEWAY_HTTP_PORT), _port(names.GATEWAY_METRICS_PORT)]}],
    }
    return blueprint.child(NETWORK_POLICY, f"{blueprint.name}-gateway", {"spec": spec}, component="gateway")


def _port(number: int) -> Manifest:
    return {"port": number, "protocol": "TCP"}
