"""Installs Tandem's chart and the model mirror into the cluster, for the demo and the suite alike."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "tandem"
RELEASE = "tandem"
NAMESPACE = "tandem-system"
SETTLE_SECONDS = {"binaries": 20}
"""Between two steps of a key rotation, by the cluster's backend: there the kubelet looks at a pod every 4 to 6 s."""
DEFAULT_SETTLE_SECONDS = 100
POLL_SECONDS = 15
"""Between two questions whether a branch has moved."""
HUB_ENDPOINT = "http://mirror.tandem-mirror.svc"


def helm(cluster: Any, *arguments: str, timeout: float = 360) -> str:
    """Output of a helm command. Raises RuntimeError with what helm said."""
    result = subprocess.run(
        [str(cluster.helm), "--kubeconfig", str(cluster.kubeconfig), *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if result.returncode:
        raise RuntimeError(f"helm {' '.join(arguments[:3])} failed: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout


def settle_seconds(cluster: Any) -> int:
    """What the chart is told: twice the time that kubelets take here to refresh Secrets, or a little more."""
    return SETTLE_SECONDS.get(cluster.backend.name, DEFAULT_SETTLE_SECONDS)


def chart_values(cluster: Any) -> list[str]:
    """`--set` arguments that point the chart at this cluster's images and mirror."""
    images = cluster.images
    values = {
        "images.operator": images["operator"],
        "images.gateway": images["gateway"],
        "images.worker": images["worker"],
        "hub.endpoint": HUB_ENDPOINT,
        "hub.pollSeconds": POLL_SECONDS,
        "keys.settleSeconds": settle_seconds(cluster),
    }
    return [part for key, value in values.items() for part in ("--set", f"{key}={value}")]


def install_chart(cluster: Any, *extra: str) -> None:
    """Install or upgrade the release and wait until the operator is up."""
    helm(
        cluster, "upgrade", "--install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--create-namespace",
        *chart_values(cluster), "--wait", "--timeout", "300s", *extra,
    )  # fmt: skip


def uninstall_chart(cluster: Any) -> None:
    helm(cluster, "uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout", "180s")
