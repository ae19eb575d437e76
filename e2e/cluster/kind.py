"""The backend `kind`: Kubernetes in a container, where a Docker engine answers."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from .base import ClusterStatus
from .commands import run, succeeds
from .errors import ClusterError
from .gobuild import Builder, find_tool
from .images.builder import docker_answers
from .images.catalog import Image
from .images.docker import Docker
from .portforward import reach
from .progress import step
from .settings import ClusterSettings

VOLUMES_ON_NODE = "/var/lib/tandem-volumes"
KUBELET = {
    "apiVersion": "kubelet.config.k8s.io/v1beta1",
    "kind": "KubeletConfiguration",
    "failCgroupV1": False,
    "syncFrequency": "10s",
    "volumeStatsAggPeriod": "10s",
}
"""As in the cluster of plain binaries: machines with control groups v1 do, and changed Secrets and full volumes show
soon."""


class KindBackend:
    name = "kind"

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.cluster = f"tandem-{settings.id}"
        self.builder = Builder(settings.go_modules, settings.cache)

    @property
    def kubeconfig(self) -> Path:
        return self.settings.state / "kind.kubeconfig"

    def check(self) -> None:
        if not docker_answers():
            raise ClusterError(
                "kind needs a Docker engine, and `docker info` reaches none; start it, or leave TANDEM_CLUSTER unset "
                "to get a cluster of plain binaries"
            )

    def _kind(self, *arguments: str | Path) -> str:
        return run(find_tool("kind", self.builder), *arguments)

    def up(self) -> None:
        if self.cluster in self._kind("get", "clusters").split():
            self._kind("export", "kubeconfig", "--name", self.cluster, "--kubeconfig", self.kubeconfig)
            if succeeds("kubectl", "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz"):
                return
            self.down()
        config = self.settings.state / "kind.json"
        config.parent.mkdir(parents=True, exist_ok=True)
        (self.settings.state / "volumes").mkdir(exist_ok=True)
        config.write_text(json.dumps(build_config(self.settings.state / "volumes", self.settings.node_image)))
        with step("kind cluster is Ready"):
            self._kind(
                "create", "cluster", "--name", self.cluster, "--config", config, "--kubeconfig", self.kubeconfig,
                "--wait", "120s",
            )  # fmt: skip
        # On two cores, kind's own pods ask for half of what there is, and the suite needs more than the rest.
        run(
            find_tool("kubectl", self.builder), "--kubeconfig", self.kubeconfig, "-n", "kube-system",
            "set", "resources", "deployment/coredns", "daemonset/kindnet", "--requests=cpu=10m",
        )  # fmt: skip

    def down(self) -> None:
        if docker_answers():
            self._kind("delete", "cluster", "--name", self.cluster)

    def status(self) -> ClusterStatus:
        running = self.cluster in self._kind("get", "clusters").split()
        return ClusterStatus(running=running, detail=f"kind cluster {self.cluster}")

    def load(self, wanted: list[Image]) -> dict[str, str]:
        return {image.part: self.add(image, self.settings.root) for image in wanted}

    def add(self, image: Image, root: Path) -> str:
        docker = Docker(replace(self.settings, root=root))
        reference = f"{image.name}:{docker.tag(image)}"
        if not succeeds("docker", "image", "inspect", reference):
            docker.build(image, docker.tag(image))
        if not succeeds("docker", "exec", f"{self.cluster}-control-plane", "crictl", "inspecti", reference):
            with step(f"loaded {image.name} into kind"):
                self._kind("load", "docker-image", reference, "--name", self.cluster)
        return reference

    def service_url(self, namespace: str, service: str, port: int) -> AbstractContextManager[str]:
        return reach(find_tool("kubectl", self.builder), self.kubeconfig, namespace, service, port)

    def logs(self) -> dict[str, Path]:
        folder = self.settings.state / "kind-logs"
        self._kind("export", "logs", folder, "--name", self.cluster)
        return {str(path.relative_to(folder)).replace("/", "_"): path for path in folder.rglob("*.log")}


def build_config(volumes: Path, node_image: str | None = None) -> dict:
    """One node that sees the volume pool's folders. Without a `node_image` it is the one that kind comes with."""
    mount = {"hostPath": str(volumes), "containerPath": VOLUMES_ON_NODE}
    node: dict = {"role": "control-plane", "extraMounts": [mount]}
    if node_image is not None:
        node["image"] = node_image
    return {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [node],
        "kubeadmConfigPatches": [json.dumps(KUBELET)],
    }
