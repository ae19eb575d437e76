"""The children of the gateway: Service, HTTPRoute, PodDisruptionBudget, Deployment."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_api import names
from tandem_api.crd.gateway import GatewayService, HTTPRoute
from tandem_api.crd.pods import Resources
from tandem_api.names import Role

from tandem_operator.objects.manifests import DEPLOYMENT, HTTP_ROUTE, SERVICE, Manifest, dig, dig_list
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.child import build_child, build_selector, sign
from tandem_operator.workloads.keys import keys_mount, keys_volume
from tandem_operator.workloads.pods import http_probe, pod_template, resources_of, template_grace_seconds, thread_env
from tandem_operator.workloads.workers import build_disruption_budget

_COMPONENT = Role.GATEWAY.value
_ENDPOINT_LAG_SECONDS = 3
"""After a pod is marked for removal, nodes send it connections for about this long: it must still take them."""
DEFAULT_RESOURCES = Resources(requests={"cpu": "100m", "memory": "256Mi"}, limits={"memory": "1Gi"})
"""What gateways get that say nothing. Half of the memory is for requests that are held, which is as many as there may
be without a limit. No limit on CPU: it would make streams stutter."""
_NO_TIMEOUT = "0s"


_CERTIFICATE_FILES = ("tls.crt", "tls.key")
_CERTIFICATE_VOLUME = "client-tls"
_CERTIFICATE_MODE = 0o440
"""The pod's fsGroup reads them, nobody writes."""


@dataclass(frozen=True, slots=True)
class ClientPort:
    """The port where clients are served."""

    name: str
    port: int
    """The Service's."""
    target: int
    """The container's."""


_HTTP = ClientPort("http", names.SERVICE_PORT, names.GATEWAY_HTTP_PORT)
_HTTPS = ClientPort("https", names.SERVICE_HTTPS_PORT, names.GATEWAY_HTTPS_PORT)


def client_ports(blueprint: Blueprint) -> list[ClientPort]:
    """The first is the one that outsiders are meant to use."""
    tls = blueprint.model.spec.gateway.tls
    if tls is None:
        return [_HTTP]
    return [_HTTPS, _HTTP] if tls.plain_http else [_HTTPS]


def build_gateway(blueprint: Blueprint) -> list[Manifest]:
    """What stands around the gateway's Deployment."""
    children = [_build_service(blueprint)]
    if (route := blueprint.model.spec.gateway.http_route) is not None:
        children.append(_build_route(blueprint, route))
    if blueprint.model.spec.gateway.replicas > 1:
        children.append(build_disruption_budget(blueprint, Role.GATEWAY))
    return children


def _build_service(blueprint: Blueprint) -> Manifest:
    wanted = blueprint.model.spec.gateway.service
    ports = [_service_port(port) for port in client_ports(blueprint)]
    if wanted.node_port is not None:
        ports[0]["nodePort"] = wanted.node_port
    optional = {
        "externalTrafficPolicy": wanted.external_traffic_policy,
        "loadBalancerClass": wanted.load_balancer_class,
    }
    spec: Manifest = {
        "type": wanted.type,
        "selector": build_selector(blueprint, _COMPONENT),
        "ports": ports,
        **{key: value for key, value in optional.items() if value is not None},
    }
    service = build_child(blueprint, SERVICE, blueprint.name, {"spec": spec}, component=_COMPONENT, role=Role.GATEWAY)
    return _decorated(service, wanted)


def _service_port(port: ClientPort) -> Manifest:
    described = {"name": port.name, "port": port.port, "targetPort": port.name, "protocol": "TCP"}
    return described | ({"appProtocol": "https"} if port is _HTTPS else {})


def _build_route(blueprint: Blueprint, wanted: HTTPRoute) -> Manifest:
    """Everything under the hosts goes to the Service, without TLS where that is served. Without timeouts: what is stuck
    the gateway itself ends."""
    rule: Manifest = {"backendRefs": [{"name": blueprint.name, "port": client_ports(blueprint)[-1].port}]}
    if wanted.timeouts == "Disabled":
        rule["timeouts"] = {"request": _NO_TIMEOUT, "backendRequest": _NO_TIMEOUT}
    spec: Manifest = {
        "parentRefs": [parent.model_dump(by_alias=True, exclude_none=True) for parent in wanted.parent_refs],
        **({"hostnames": wanted.hostnames} if wanted.hostnames else {}),
        "rules": [rule],
    }
    route = build_child(blueprint, HTTP_ROUTE, blueprint.name, {"spec": spec}, component=_COMPONENT, role=Role.GATEWAY)
    return _decorated(route, wanted)


def _decorated(child: Manifest, wanted: GatewayService | HTTPRoute) -> Manifest:
    """`child` with the labels and annotations that the model asks for; the operator's own stay."""
    metadata = child["metadata"]
    if not wanted.labels and not wanted.annotations:
        return child
    more = {
        "labels": wanted.labels | metadata["labels"],
        "annotations": wanted.annotations | metadata["annotations"],
    }
    return sign(child | {"metadata": metadata | more})


def gateway_resources(blueprint: Blueprint) -> Resources:
    """What the model says, or else the default. A podTemplate that says any stands alone: a limit of its own may be
    less than the default requests."""
    gateway = blueprint.model.spec.gateway
    containers = dig_list(None if gateway.pod_template is None else gateway.pod_template.spec, "containers")
    is_overlaid = any(dig(c, "name") == _COMPONENT and dig(c, "resources") is not None for c in containers)
    is_silent = gateway.resources == Resources() and not is_overlaid
    return DEFAULT_RESOURCES if blueprint.pod_defaults and is_silent else gateway.resources


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
        volumes=[keys_volume(blueprint, [names.API_KEY_FILE]), *_certificate_volume(blueprint)],
        config=config,
        spec={
            "serviceAccountName": blueprint.account("gateway"),
            "automountServiceAccountToken": True,
            "terminationGracePeriodSeconds": template_grace_seconds(blueprint) + _ENDPOINT_LAG_SECONDS,
        },
        workload=workload,
        path="spec.gateway",
    )
    spec = {
        **({} if _COMPONENT in blueprint.left else {"replicas": blueprint.replicas(workload.replicas)}),
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": build_selector(blueprint, _COMPONENT)},
        "template": template,
    }
    return build_child(blueprint, DEPLOYMENT, blueprint.name, {"spec": spec}, component=_COMPONENT, role=Role.GATEWAY)


def _certificate_volume(blueprint: Blueprint) -> list[Manifest]:
    """Mounted as a folder, because the kubelet never refreshes single files."""
    tls = blueprint.model.spec.gateway.tls
    if tls is None:
        return []
    items = [{"key": file, "path": file} for file in _CERTIFICATE_FILES]
    secret = {"secretName": tls.secret_name, "defaultMode": _CERTIFICATE_MODE, "items": items}
    return [{"name": _CERTIFICATE_VOLUME, "secret": secret}]


def _container(blueprint: Blueprint) -> Manifest:
    mounts = [keys_mount()]
    if blueprint.model.spec.gateway.tls is not None:
        mounts.append({"name": _CERTIFICATE_VOLUME, "mountPath": names.TLS_PATH, "readOnly": True})
    return {
        "name": "gateway",
        "image": blueprint.model.spec.gateway.image or blueprint.release.gateway_image,
        "env": thread_env(blueprint.model.spec.gateway.resources),
        "resources": resources_of(gateway_resources(blueprint)),
        "ports": [
            *(
                {"name": port.name, "containerPort": port.target, "protocol": "TCP"}
                for port in reversed(client_ports(blueprint))
            ),
            {"name": "metrics", "containerPort": names.GATEWAY_METRICS_PORT, "protocol": "TCP"},
        ],
        "startupProbe": http_probe("/readyz", "metrics", period=1, failures=120),
        "readinessProbe": http_probe("/readyz", "metrics", period=2, failures=2),
        "livenessProbe": http_probe("/healthz", "metrics", period=10, failures=3),
        "lifecycle": {"preStop": {"sleep": {"seconds": _ENDPOINT_LAG_SECONDS}}},
        "volumeMounts": mounts,
    }
