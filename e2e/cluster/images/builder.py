"""The contract of an image builder, and which one this machine has."""

from __future__ import annotations

import shutil
from typing import Protocol

from ..commands import succeeds
from ..errors import ClusterError
from ..settings import ClusterSettings
from .catalog import Image


class ImageBuilder(Protocol):
    def tag(self, image: Image) -> str:
        """The tag that follows from the image's content, its base included."""
        ...

    def build(self, image: Image, tag: str) -> None:
        """Build `tandem-<part>:<tag>` in the builder's own storage, where layers of earlier builds are reused."""
        ...

    def push(self, image: Image, tag: str, registry: str, *, verify_tls: bool = True) -> None:
        """Push to `<registry>/tandem-<part>:<tag>`; layers that the registry has do not travel."""
        ...

    def publish(self, image: Image, tag: str, reference: str, *, verify_tls: bool = True) -> str:
        """Push what was built under the tag to `reference`. The digest of its manifest there."""
        ...


def docker_answers() -> bool:
    """A `docker` on the PATH may be a client without an engine."""
    return shutil.which("docker") is not None and succeeds("docker", "info")


def choose_builder(settings: ClusterSettings) -> ImageBuilder:
    """Docker where its engine answers, else buildah. Raises ClusterError when neither is there."""
    from .buildah import Buildah
    from .docker import Docker

    if docker_answers():
        return Docker(settings)
    if shutil.which("buildah"):
        return Buildah(settings)
    raise ClusterError(
        "building images needs a Docker engine or buildah; start Docker or install the package `buildah`"
    )
