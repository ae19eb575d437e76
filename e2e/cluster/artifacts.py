"""Collects what explains a failure: objects, events, and the logs of every container, of earlier runs too."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import ClusterError
from .storage import Kubectl

KINDS = (
    "pods", "statefulsets", "deployments", "services", "endpointslices", "configmaps", "poddisruptionbudgets",
    "networkpolicies", "persistentvolumeclaims", "leases", "inferencemodels.tandem.dev",
)  # fmt: skip
LINES = 5000


def dump(kubectl: Kubectl, control_plane: Mapping[str, Path], folder: Path) -> None:
    """Never raises for a single piece that cannot be had: the reason stands in its file instead."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "overview.txt", kubectl, "get", "all", "-A", "-o", "wide")
    _write(folder / "events.txt", kubectl, "get", "events", "-A", "--sort-by=.lastTimestamp")
    _write(folder / "nodes.txt", kubectl, "describe", "nodes")
    for kind in KINDS:
        _write(folder / f"{kind.partition('.')[0]}.yaml", kubectl, "get", kind, "-A", "-o", "yaml")
    for namespace, pod, container, previous in _observe_containers(kubectl):
        name = f"{namespace}_{pod}_{container}{'_previous' if previous else ''}.log"
        flags = ["--previous"] if previous else []
        _write(
            folder / "logs" / name,
            kubectl, "-n", namespace, "logs", pod, "-c", container, f"--tail={LINES}", "--timestamps", *flags,
        )  # fmt: skip
    for name, log in control_plane.items():
        target = folder / "control-plane" / f"{name}.log"
        target.parent.mkdir(exist_ok=True)
        if log.exists():
            shutil.copyfile(log, target)


def _observe_containers(kubectl: Kubectl) -> Iterator[tuple[str, str, str, bool]]:
    try:
        pods = json.loads(kubectl("get", "pods", "-A", "-o", "json"))["items"]
    except ClusterError:
        return
    for pod in pods:
        yield from list_containers(pod)


def list_containers(pod: dict[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """(namespace, pod, container, of the previous run) of every container that has started."""
    meta, status = pod["metadata"], pod.get("status", {})
    for state in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        started = "waiting" not in state.get("state", {}) or state.get("restartCount", 0) > 0
        if started:
            yield meta["namespace"], meta["name"], state["name"], False
        if state.get("restartCount", 0) > 0:
            yield meta["namespace"], meta["name"], state["name"], True


def _write(file: Path, kubectl: Kubectl, *arguments: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        file.write_text(kubectl(*arguments))
    except ClusterError as error:
        file.write_text(f"(not to be had: {error})\n")
