"""Builds images with buildah: needs root, but no engine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from ..commands import run
from ..progress import say, step
from ..settings import ClusterSettings
from . import base_image
from .catalog import Image, accelerator_arguments, build_arguments, content_tag

CA_IN_IMAGE = "/etc/ssl/certs/ca-certificates.crt"
CA_ARGUMENTS = {"PIP_CERT": CA_IN_IMAGE, "SSL_CERT_FILE": CA_IN_IMAGE, "UV_SYSTEM_CERTS": "1"}
UV_CACHE_IN_BUILD = "var/cache/uv"
"""Where the Dockerfiles mount uv's cache."""


def remove_interrupted(cache: Path) -> None:
    """Of builds and pushes that were killed: buildah leaves gigabytes in its temporary folder. None may run."""
    for place in (cache / "buildah" / "tmp").glob("*"):
        if place.name == "buildah-cache":
            continue
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink()


class Buildah:
    """Storage lies in the cache folder, apart from any other of this machine."""

    def __init__(self, settings: ClusterSettings) -> None:
        self.settings = settings
        self.folder = settings.cache / "buildah"
        self._base = settings.base_image

    def _buildah(self, *arguments: str | Path, timeout: float | None = None, log: Path | None = None) -> str:
        storage = ("--root", self.folder / "root", "--runroot", self.folder / "run")
        temporary = self.folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        env = {"STORAGE_DRIVER": "overlay", "TMPDIR": str(temporary), "BUILDAH_ISOLATION": "chroot"}
        return run("buildah", *storage, *arguments, env=env, timeout=timeout, cwd=self.settings.root, log=log)

    @property
    def base(self) -> str:
        if self._base is None:
            self._base = base_image.find_base(self._buildah, self._log("base"))
        return self._base

    def _log(self, part: str) -> Path:
        return self.settings.cache / "logs" / f"build-{part}.log"

    def _arguments(self) -> dict[str, str]:
        return {"BASE_IMAGE": self.base, **accelerator_arguments(gpu=self.settings.has_gpu)}

    def tag(self, image: Image) -> str:
        return content_tag(self.settings.root, image, self._arguments())

    def build(self, image: Image, tag: str) -> None:
        self._share_uv_cache()
        log = self._log(image.part)
        bundle = self.settings.ca_bundle
        mounts = ["--volume", f"{bundle.resolve()}:{CA_IN_IMAGE}:ro"] if bundle else []
        arguments = build_arguments(self._arguments() | (CA_ARGUMENTS if bundle else {}))
        say(f"building {image.name} ({log})")
        with step(f"built {image.name}"):
            self._buildah(
                "build", "--layers", "--isolation", "chroot", "--network", "host", "--pull-never", *mounts, *arguments,
                "--file", image.dockerfile, "--tag", f"localhost/{image.name}:{tag}", ".", log=log,
            )  # fmt: skip
        self._remove_older(image, tag)

    def push(self, image: Image, tag: str, registry: str, *, verify_tls: bool = True) -> None:
        self.publish(image, tag, f"{registry}/{image.name}:{tag}", verify_tls=verify_tls)

    def publish(self, image: Image, tag: str, reference: str, *, verify_tls: bool = True) -> str:
        with tempfile.NamedTemporaryFile("r") as digest:
            self._buildah(
                "push", "--compression-format", "zstd", "--compression-level", "1", "--digestfile", digest.name,
                f"--tls-verify={str(verify_tls).lower()}", f"localhost/{image.name}:{tag}", f"docker://{reference}",
            )  # fmt: skip
            return Path(digest.name).read_text().strip()

    def _share_uv_cache(self) -> None:
        """Let the Dockerfiles' cache mount be this machine's uv cache: what is here already is not downloaded again.

        buildah keeps a cache mount in `$TMPDIR/buildah-cache/<target>`.
        """
        link = self.folder / "tmp" / "buildah-cache" / UV_CACHE_IN_BUILD
        cache = Path(os.environ.get("UV_CACHE_DIR") or run(os.environ.get("UV", "uv"), "cache", "dir").strip())
        cache.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.is_symlink():
            link.symlink_to(cache)

    def _remove_older(self, image: Image, tag: str) -> None:
        name = f"localhost/{image.name}"
        listed = self._buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()
        older = [ref for ref in listed if ref.startswith(f"{name}:") and ref != f"{name}:{tag}"]
        if older:
            # By force: an interrupted build leaves its working container on the image it began from.
            self._buildah("rmi", "--force", *older)
