"""The children of the gateway: Service, PodDisruptionBudget, Deployment."""

from __future__ import annotations

from tandem_api import names
from tandem_api.names import Role

from tandem_operator.manifests import DEPLOYMENT, SERVICE, Manifest
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.keys import keys_mount, keys_volume
from tandem_operator.workloads.pods import http_probe, pod_template, template_grace_seconds, thread_env
from tandem_operator.workloads.workers import build_disruption_budget

_COMPONENT = Role.GATEWAY.value
_ENDPOINT_LAG_SECONDS = 3
"""After a pod is marked for removal, nodes send it connections for about this long: it must still take them."""


def build_gateway(blueprint: Blueprint) -> list[Manifest]:
    """What stands around the gateway's Deployment."""
    children = [_build_service(blueprint)]
    if blueprint.model.spec.gateway.replicas > 1:
        children.append(build_disruption_budget(blueprint, Role.GATEWAY))
    return children


def _build_service(blueprint: Blueprint) -> Manifest:
    spec = {
        "type": "ClusterIP",
        "selector": blueprint.selector(_COMPONENT),
        "ports": [{"name": "http", "port": names.SERVICE_PORT, "targetPort": "http", "protocol": "TCP"}],
    }
    return blueprint.child(SERVICE, blueprint.name, {"spec": spec}, component=_COMPONENT, role=Role.GATEWAY)


def build_deployment(blueprint: Blueprint, config: Manifest) -> Manifest:
    """The Deployment.

    Raises:
        InvalidOverlayError: the podTemplate does not fit.
    """
    workload = blueprint.model.spec.gateway
    template = pod_template(
        blueprint,
        Role.GATEWAY,
        container=_container(blueprint),
        # Gateways face clients: they get what they show workers, and never what workers prove to each other.
        volumes=[keys_volume(blueprint, [names.API_KEY_FILE])],
        config=config,
        spec={
            "serviceAccountName": blueprint.gateway_account,
            "automountServiceAccountToken": True,
            "terminationGracePeriodSeconds": template_grace_seconds(blueprint) + _ENDPOINT_LAG_SECONDS,
        },
        workload=workload,
        path="spec.gateway",
    )
    spec = {
        "replicas": blueprint.replicas(workload.replicas),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": blueprint.selector(_COMPONENT)},
        "template": template,
    }
    return blueprint.child(DEPLOYMENT, blueprint.name, {"spec": spec}, component=_COMPONENT, role=Role.GATEWAY)


def _container(blueprint: Blueprint) -> Manifest:
    return {
        "name": "gateway",
        "image": blueprint.gateway_image,
        "env": thread_env(blueprint.model.spec.gateway.resources),
        "ports": [
            {"name": "http", "containerPort": names.GATEWAY_HTTP_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.GATEWAY_METRICS_PORT, "protocol": "TCP"},
        ],
        "startupProbe": http_probe("/readyz", "metrics", period=1, failures=120),
        "readinessProbe": http_probe("/readyz", "metrics", period=2, failures=2),
        "livenessProbe": http_probe("/healthz", "metrics", period=10, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": _ENDPOINT_LAG_SECONDS}}},
        "volumeMounts": [keys_mount()],
    }
