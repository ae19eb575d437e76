"""What tests and the demo hold of a running cluster."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from . import artifacts
from .base import ClusterBackend
from .choose import choose_backend
from .commands import run
from .errors import ClusterError
from .settings import ClusterSettings, read_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster with Tandem's images."""

    backend: ClusterBackend
    kubeconfig: Path
    kubectl_path: Path
    helm: Path
    images: Mapping[str, str]
    """References by part: operator, gateway, worker, mirror."""

    def kubectl(self, *arguments: str | Path, stdin: str | None = None, timeout: float = 120) -> str:
        """What kubectl prints. Raises CommandFailed with what it said."""
        return run(self.kubectl_path, "--kubeconfig", self.kubeconfig, *arguments, stdin=stdin, timeout=timeout)

    def service_url(self, namespace: str, service: str, port: int) -> AbstractContextManager[str]:
        """A URL that reaches the Service from this machine for the time of the block."""
        return self.backend.service_url(namespace, service, port)

    def artifacts_dump(self, folder: Path) -> None:
        """Write what explains a failure to `folder`: objects, events, logs of every container and the control plane."""
        artifacts.dump(self.kubectl, self.backend.logs(), folder)


def write_record(settings: ClusterSettings, backend: ClusterBackend, kubectl: Path, helm: Path) -> None:
    record = {
        "backend": backend.name,
        "kubeconfig": str(backend.kubeconfig.resolve()),
        "kubectl": str(kubectl),
        "helm": str(helm),
        "registry": settings.registry,
    }
    settings.record_file.write_text(json.dumps(record, indent=1))


def recorded_settings(settings: ClusterSettings) -> ClusterSettings:
    """Settings with the backend and kubeconfig that `up` used, so that later commands need no environment variables.

    Raises ClusterError when TANDEM_CLUSTER asks for another backend than the one that is up.
    """
    if not settings.record_file.exists():
        return settings
    record = json.loads(settings.record_file.read_text())
    if settings.backend not in {None, record["backend"]}:
        raise ClusterError(
            f"TANDEM_CLUSTER asks for `{settings.backend}`, but the cluster that is up is `{record['backend']}`: "
            "unset it, or stop that cluster first (`make cluster-down`)"
        )
    return replace(
        settings,
        backend=record["backend"],
        kubeconfig=Path(record["kubeconfig"]),
        registry=settings.registry or record["registry"],
    )


def connect(settings: ClusterSettings | None = None) -> Cluster:
    """The cluster that `up` and `load` prepared. Raises ClusterError when either is missing."""
    settings = recorded_settings(settings or read_settings())
    for file, command in ((settings.record_file, "up"), (settings.images_file, "load")):
        if not file.exists():
            raise ClusterError(
                f"no cluster is ready (`python -m e2e.cluster {command}` has not run); type `make cluster`"
            )
    record = json.loads(settings.record_file.read_text())
    for program in (record["kubectl"], record["helm"]):
        if not shutil.which(program):
            raise ClusterError(f"{program} is gone; type `make cluster`")
    return Cluster(
        backend=choose_backend(settings),
        kubeconfig=Path(record["kubeconfig"]),
        kubectl_path=Path(record["kubectl"]),
        helm=Path(record["helm"]),
        images=json.loads(settings.images_file.read_text()),
    )
