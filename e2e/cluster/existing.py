"""The backend `existing`: a cluster of somebody else, named by KUBECONFIG. Nothing of it is started or stopped."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from .base import ClusterStatus
from .commands import succeeds
from .errors import ClusterError
from .gobuild import Builder, find_tool
from .images.builder import choose_builder
from .images.catalog import Image
from .portforward import reach
from .progress import step
from .settings import ClusterSettings


class ExistingBackend:
    name = "existing"

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.builder = Builder(settings.go_modules, settings.cache)

    @property
    def kubeconfig(self) -> Path:
        if self.settings.kubeconfig is None:
            raise ClusterError("TANDEM_CLUSTER=existing needs KUBECONFIG: the cluster to use")
        return self.settings.kubeconfig

    def check(self) -> None:
        """Before anything is built: what the user has to say stands at the beginning, not after minutes."""
        if not self.kubeconfig.is_file():
            raise ClusterError(f"KUBECONFIG names {self.kubeconfig}, which is not a file")
        self._registry()

    def _registry(self) -> str:
        if self.settings.registry is None:
            raise ClusterError(
                f"KUBECONFIG chooses the cluster of {self.kubeconfig}, whose nodes need Tandem's images: set "
                "TANDEM_REGISTRY to a registry that you push to and they pull from, e.g. registry.example.com/team. "
                "For a cluster on this machine instead, unset KUBECONFIG, or set TANDEM_CLUSTER to kind or binaries"
            )
        return self.settings.registry

    def _answers(self) -> bool:
        kubectl = find_tool("kubectl", self.builder)
        return succeeds(kubectl, "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz", "--request-timeout=10s")

    def up(self) -> None:
        if not self._answers():
            raise ClusterError(f"the cluster of {self.kubeconfig} does not answer")

    def down(self) -> None:
        """Nothing was started."""

    def status(self) -> ClusterStatus:
        return ClusterStatus(running=self._answers(), detail=f"the cluster of {self.kubeconfig}")

    def load(self, wanted: list[Image]) -> dict[str, str]:
        return {image.part: self.add(image, self.settings.root) for image in wanted}

    def add(self, image: Image, root: Path) -> str:
        registry = self._registry()
        plain, name = registry.startswith("http://"), registry.removeprefix("http://").rstrip("/")
        builder = choose_builder(replace(self.settings, root=root))
        tag = builder.tag(image)
        builder.build(image, tag)
        with step(f"pushed {image.name}"):
            builder.push(image, tag, name, verify_tls=not plain)
        return f"{name}/{image.name}:{tag}"

    def service_url(self, namespace: str, service: str, port: int) -> AbstractContextManager[str]:
        return reach(find_tool("kubectl", self.builder), self.kubeconfig, namespace, service, port)

    def logs(self) -> dict[str, Path]:
        return {}
