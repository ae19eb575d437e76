"""What a release of Tandem brings to the children of every model."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem_api.launch import TracingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How NetworkPolicies are written."""

    enabled: bool = True
    egress: bool = True
    """Also for what pods may connect to."""
    api_server_ports: tuple[int, ...] = (443, 6443)
    """Ports where the API server listens: of its Service, and behind it, where most networks look."""
    operator_namespace: str | None = None
    """The namespace where the operator runs, which reads the reports of gateways; None: not in this cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a release of Tandem brings for models that do not say otherwise."""

    worker_image: str
    gateway_image: str
    image_pull_policy: str = "IfNotPresent"
    hub_endpoint: str | None = None
    """Base URL of the model hub; None is the public one."""
    network: NetworkSettings = field(default_factory=NetworkSettings)
    follow_images: bool = False
    """Whether models that name no image, and do not say, get those of this release in place of an earlier one's."""
    gateway_cluster_role: str = "tandem-gateway"
    """What gateways may ask of the API server; the chart makes it."""
    tracing: TracingConfig | None = None
    """The collector that spans go to of models that name no collector; None: nowhere."""
