"""Builds images with a Docker engine."""

from __future__ import annotations

import re

from ..commands import run
from ..errors import ClusterError
from ..progress import say, step
from ..settings import ClusterSettings
from .catalog import Image, accelerator_arguments, build_arguments, content_tag


class Docker:
    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        base = {"BASE_IMAGE": settings.base_image} if settings.base_image else {}
        self._arguments = base | accelerator_arguments(gpu=settings.has_gpu)

    def tag(self, image: Image) -> str:
        return content_tag(self.settings.root, image, self._arguments)

    def build(self, image: Image, tag: str) -> None:
        log = self.settings.cache / "logs" / f"build-{image.part}.log"
        say(f"building {image.name} ({log})")
        with step(f"built {image.name}"):
            run(
                "docker", "build", "--file", image.dockerfile, "--tag", f"{image.name}:{tag}",
                *build_arguments(self._arguments), ".",
                cwd=self.settings.root, env={"DOCKER_BUILDKIT": "1"}, log=log,
            )  # fmt: skip

    def push(self, image: Image, tag: str, registry: str, *, verify_tls: bool = True) -> None:
        """`verify_tls` is the engine's own setting (`insecure-registries`); it cannot be given here."""
        reference = f"{registry}/{image.name}:{tag}"
        run("docker", "tag", f"{image.name}:{tag}", reference)
        run("docker", "push", reference)

    def publish(self, image: Image, tag: str, reference: str, *, verify_tls: bool = True) -> str:
        run("docker", "tag", f"{image.name}:{tag}", reference)
        told = run("docker", "push", reference)
        found = re.search(r"digest: (sha256:[0-9a-f]{64})", told)
        if found is None:
            raise ClusterError(f"docker pushed {reference} and named no digest: {told[-200:]}")
        return found[1]
