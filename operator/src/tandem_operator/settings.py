"""What the operator is told when it starts. Everything comes from arguments; the chart writes them."""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_api.names import OPERATOR_HEALTH_PORT, OPERATOR_METRICS_PORT

from tandem_operator.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What a release of Tandem brings for models that do not say otherwise."""

    worker_image: str
    gateway_image: str
    image_pull_policy: str = "IfNotPresent"
    hub_endpoint: str | None = None
    """Base URL of the model hub; None is the public one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The Lease that one operator replica holds while it works."""

    name: str = "tandem-operator"
    namespace: str
    identity: str
    duration_seconds: int = 15
    """A lease that was not renewed for this long is free."""
    renew_seconds: float = 3.0
    give_up_seconds: float = 10.0
    """A leader that could not renew for this long stops: shorter than the duration, so that two never work at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    release: Release
    lease: LeaseSettings
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all."""
    log_level: str = "info"
    health_port: int = OPERATOR_HEALTH_PORT
    metrics_port: int = OPERATOR_METRICS_PORT
    workers: int = 8
    """Models reconciled at a time."""
    resync_seconds: float = 600.0
    """Every model is looked at this often even when nothing happens."""


def parse_settings(arguments: Sequence[str] | None = None) -> OperatorSettings:
    """Settings from command-line arguments.

    Raises:
        SettingsError: a combination makes no sense.
        SystemExit: argparse refuses an argument, with its own message.
    """
    parser = argparse.ArgumentParser(prog="tandem-operator", description="The Tandem operator.")
    parser.add_argument("--worker-image", required=True, help="image of workers that do not name one")
    parser.add_argument("--gateway-image", required=True, help="image of gateways that do not name one")
    parser.add_argument("--image-pull-policy", default="IfNotPresent", choices=["Always", "IfNotPresent", "Never"])
    parser.add_argument("--hub-endpoint", default=None, help="base URL of the model hub that hf:// names")
    parser.add_argument("--namespace", action="append", default=[], help="serve this namespace only; may be repeated")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--lease-name", default="tandem-operator")
    parser.add_argument(
        "--lease-namespace", default=os.environ.get("POD_NAMESPACE", ""), help="default: $POD_NAMESPACE"
    )
    parser.add_argument("--identity", default=os.environ.get("POD_NAME", ""), help="lease holder; default: $POD_NAME")
    parser.add_argument("--health-port", type=int, default=OPERATOR_HEALTH_PORT)
    parser.add_argument("--metrics-port", type=int, default=OPERATOR_METRICS_PORT)
    given = parser.parse_args(arguments)
    if not given.lease_namespace:
        raise SettingsError("the namespace of the lease is not known: set --lease-namespace or POD_NAMESPACE")
    identity = f"{given.identity or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    return OperatorSettings(
        release=Release(
            worker_image=given.worker_image,
            gateway_image=given.gateway_image,
            image_pull_policy=given.image_pull_policy,
            hub_endpoint=given.hub_endpoint or None,
        ),
        lease=LeaseSettings(name=given.lease_name, namespace=given.lease_namespace, identity=identity),
        namespaces=tuple(dict.fromkeys(given.namespace)),
        log_level=given.log_level,
        health_port=given.health_port,
        metrics_port=given.metrics_port,
    )
