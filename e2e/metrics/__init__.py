"""Metrics of pods in the Kubernetes API: Prometheus and prometheus-adapter in the cluster, built from their sources.

HorizontalPodAutoscalers read them there. The adapter has the configuration of `examples/prometheus-adapter/`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from e2e.cluster.errors import ClusterError
from e2e.cluster.gobuild import Builder
from e2e.cluster.images.catalog import Image
from e2e.cluster.settings import read_settings

Object = dict[str, Any]
FOLDER = Path(__file__).parent
RULES = FOLDER.parents[1] / "examples" / "prometheus-adapter" / "config-map.yaml"
NAMESPACE = "tandem-metrics"
API = "v1beta1.custom.metrics.k8s.io"
IMAGES = {"PROMETHEUS_IMAGE": "prometheus", "ADAPTER_IMAGE": "prometheus-adapter"}


@contextmanager
def metrics_api(cluster: Any) -> Iterator[None]:
    """Serve `custom.metrics.k8s.io` for the time of the block. Raises ClusterError where somebody else does."""
    if (server := _server(cluster)) != f"{NAMESPACE}/adapter":
        raise ClusterError(f"{server} serves `{API}` in this cluster already, and one can: use another cluster")
    items = build_objects({name: _add_image(cluster, program) for name, program in IMAGES.items()})
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    try:
        cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
        for name in ("prometheus", "adapter"):
            cluster.kubectl("-n", NAMESPACE, "rollout", "status", f"deployment/{name}", "--timeout=90s")
        cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{API}", "--timeout=60s")
        yield
    finally:
        # First what the API server asks: while a server behind it is gone, no namespace is deleted anywhere.
        cluster.kubectl("delete", "apiservice", API, "--ignore-not-found")
        cluster.kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=90s", stdin=text)


def build_objects(images: dict[str, str]) -> list[Object]:
    """The manifest's objects with images and the adapter's rules filled in."""
    objects = [found for found in yaml.safe_load_all((FOLDER / "metrics.yaml").read_text()) if found]
    for found in objects:
        if found["kind"] == "Deployment":
            for container in found["spec"]["template"]["spec"]["containers"]:
                container["image"] = images[container["image"]]
        if (found["kind"], found["metadata"]["name"]) == ("ConfigMap", "adapter"):
            found["data"] = yaml.safe_load(RULES.read_text())["data"]
    return objects


def _server(cluster: Any) -> str:
    """Namespace and name of the Service that serves the API; what it would be, where nobody does."""
    found = cluster.kubectl("get", "apiservice", API, "--ignore-not-found", "-o", "json")
    service = json.loads(found)["spec"]["service"] if found.strip() else {"namespace": NAMESPACE, "name": "adapter"}
    return f"{service['namespace']}/{service['name']}"


def _add_image(cluster: Any, program: str) -> str:
    settings = read_settings()
    built = Builder(settings.go_modules, settings.cache).build(program)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy2(FOLDER / "Dockerfile", folder)
        shutil.copy2(built, Path(folder) / "program")
        image = Image(part=program, dockerfile="Dockerfile", sources=("program",))
        return cluster.backend.add(image, Path(folder))
