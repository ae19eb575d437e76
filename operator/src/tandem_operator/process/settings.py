"""What the operator is told when it starts. Everything comes from arguments; the chart writes them."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from tandem_api.collectors import check_collector
from tandem_api.launch import TracingConfig
from tandem_api.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT
from tandem_api.quantities import parse_duration

from tandem_operator.keys.rotation import KeyPolicy
from tandem_operator.kube.leader import LeaseSettings
from tandem_operator.objects.errors import SettingsError
from tandem_operator.weights.hub import HubPolicy
from tandem_operator.workloads.release import NetworkSettings, Release


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    release: Release
    lease: LeaseSettings
    keys: KeyPolicy = field(default_factory=KeyPolicy)
    hub: HubPolicy = field(default_factory=HubPolicy)
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all."""
    managed_by: str | None = None
    """Serve models that say the same alone; None: those that say nothing."""
    log_level: str = "info"
    health_port: int = OPERATOR_HEALTH_PORT
    metrics_port: int = OPERATOR_METRICS_PORT
    workers: int = 8
    """Models reconciled at a time."""
    max_concurrent_rollouts: int = 1
    """Models whose workers are replaced at a time; 0: any number."""
    resync_seconds: float = 600.0
    """Every model is looked at this often even when nothing happens."""


def parse_settings(arguments: Sequence[str] | None = None) -> OperatorSettings:
    """Settings from command-line arguments.

    Raises:
        SettingsError: a combination makes no sense.
        SystemExit: argparse refuses an argument, with its own message.
    """
    given = _build_parser().parse_args(arguments)
    if not given.lease_namespace:
        raise SettingsError("the namespace of the lease is not known: set --lease-namespace or POD_NAMESPACE")
    identity = f"{given.identity or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    return OperatorSettings(
        release=Release(
            worker_image=given.worker_image,
            gateway_image=given.gateway_image,
            image_pull_policy=given.image_pull_policy,
            follow_images=given.follow_images == "true",
            hub_endpoint=given.hub_endpoint,
            gateway_cluster_role=given.gateway_cluster_role,
            tracing=given.tracing_endpoint
            and TracingConfig(endpoint=given.tracing_endpoint, sampling_percent=given.tracing_sampling_percent),
            network=NetworkSettings(
                enabled=given.network_policies != "none",
                egress=given.network_policies == "all",
                api_server_ports=tuple(dict.fromkeys(given.api_server_port)) or NetworkSettings().api_server_ports,
                operator_namespace=given.lease_namespace,
            ),
        ),
        lease=LeaseSettings(name=given.lease_name, namespace=given.lease_namespace, identity=identity),
        keys=KeyPolicy(settle_seconds=given.keys_settle_seconds, rotate_after_seconds=given.keys_rotate_after),
        hub=HubPolicy(resolve=given.hub_resolve == "true", poll_seconds=given.hub_poll_seconds),
        namespaces=tuple(dict.fromkeys(given.namespace)),
        managed_by=given.managed_by or None,
        log_level=given.log_level,
        health_port=given.health_port,
        metrics_port=given.metrics_port,
        max_concurrent_rollouts=given.max_concurrent_rollouts,
    )


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tandem-operator", description="The Tandem operator.")
    parser.add_argument("--worker-image", required=True, help="image of workers that do not name one")
    parser.add_argument("--gateway-image", required=True, help="image of gateways that do not name one")
    parser.add_argument(
        "--follow-images", choices=["true", "false"], default="false",
        help="give models that name no image, and do not say, those of this release in place of an earlier one's",
    )  # fmt: skip
    parser.add_argument("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    parser.add_argument(
        "--hub-endpoint", type=_base_url, default=None, help="base URL of the model hub that hf:// names"
    )
    parser.add_argument(
        "--gateway-cluster-role", required=True, help="ClusterRole that gateways are bound to in their namespaces"
    )
    parser.add_argument(
        "--hub-resolve", choices=["true", "false"], default="true",
        help="ask the hub which commit a branch or tag is; false where the operator cannot reach it",
    )  # fmt: skip
    parser.add_argument(
        "--hub-poll-seconds", type=_positive, default=HubPolicy().poll_seconds,
        help="time between two questions whether a branch has moved",
    )  # fmt: skip
    parser.add_argument(
        "--tracing-endpoint", type=_collector_url, default=None,
        help="collector (OTLP over HTTP) of the spans of models that name none; default: they are not traced",
    )  # fmt: skip
    parser.add_argument(
        "--tracing-sampling-percent", type=_percent, default=100.0,
        help="how many of their requests are traced whose clients do not say it themselves",
    )  # fmt: skip
    parser.add_argument("--namespace", action="append", default=[], help="serve this namespace only; may be repeated")
    parser.add_argument(
        "--managed-by", default="", metavar="NAME",
        help="serve models alone whose spec.managedBy is this; default: those that have none",
    )  # fmt: skip
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--lease-name", default="tandem-operator")
    parser.add_argument(
        "--lease-namespace", default=os.environ.get("POD_NAMESPACE", ""), help="default: $POD_NAMESPACE"
    )
    parser.add_argument("--identity", default=os.environ.get("POD_NAME", ""), help="lease holder; default: $POD_NAME")
    parser.add_argument("--health-port", type=int, default=OPERATOR_HEALTH_PORT)
    parser.add_argument("--metrics-port", type=int, default=OPERATOR_METRICS_PORT)
    parser.add_argument(
        "--max-concurrent-rollouts", type=_count, default=1, metavar="MODELS",
        help="models whose workers are replaced at a time; 0, the default: any number",
    )  # fmt: skip
    keys = parser.add_argument_group("keys of the models' pods")
    keys.add_argument(
        "--keys-settle-seconds", type=_positive, default=KeyPolicy().settle_seconds,
        help="time between two steps of a rotation: what kubelets take to refresh Secrets, and more",
    )  # fmt: skip
    keys.add_argument(
        "--keys-rotate-after", type=_age, default=None, metavar="DURATION", help="also by age, for example 2160h"
    )
    network = parser.add_argument_group("network policies of the models' pods")
    network.add_argument("--network-policies", default="all", choices=["all", "ingress", "none"])
    network.add_argument(
        "--api-server-port", type=int, action="append", default=[],
        help="where gateways may reach the API server; may be repeated; default: 443 and 6443",
    )  # fmt: skip
    return parser


def _collector_url(text: str) -> str | None:
    """None for nothing, as the chart writes it."""
    try:
        return check_collector(text) if text else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _base_url(text: str) -> str | None:
    """None for nothing, as the chart writes it."""
    if not text:
        return None
    try:
        url = urlsplit(text)
        valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise argparse.ArgumentTypeError(f"{text!r} is not a base URL; write for example https://hub.example.com")
    return text


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number, 0 or above")
    return int(text)


def _positive(text: str) -> float:
    if not (seconds := float(text)) > 0 or seconds == float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def _percent(text: str) -> float:
    if not 0 <= (percent := float(text)) <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 100")
    return percent


def _age(text: str) -> float | None:
    """None for nothing, as the chart writes it."""
    try:
        return parse_duration(text) if text else None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
