"""What images there are, what each is made of, and the name that follows from it.

An image's tag is a hash over everything that its Dockerfile copies and its build arguments, so that an unchanged image
is neither built nor moved again, and a changed one never passes for the old.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

WORKSPACE = ("pyproject.toml", "uv.lock", ".dockerignore")
MEMBERS = ("api", "operator", "gateway", "worker", "sim")
IGNORED = {"__pycache__", ".pytest_cache", ".ruff_cache"}
MADE = {".pyc", ".o", ".so"}
"""Suffixes of what builds leave beside the sources: each image makes its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of this repository. Paths are relative to its root, which is also the build's context."""

    part: str
    dockerfile: str
    sources: tuple[str, ...]
    """Files and folders that the Dockerfile copies."""

    @property
    def name(self) -> str:
        return f"tandem-{self.part}"


def _member(part: str, *extra: str) -> Image:
    manifests = tuple(f"{member}/pyproject.toml" for member in MEMBERS)
    return Image(
        part=part,
        dockerfile=f"{part}/Dockerfile",
        sources=(*WORKSPACE, *manifests, "api/src", f"{part}/src", *extra),
    )


IMAGES = [
    _member("operator"),
    _member("gateway"),
    _member("worker", "worker/image"),
    Image(part="mirror", dockerfile="e2e/mirror/Dockerfile", sources=(".dockerignore", "e2e/mirror")),
]


def source_files(root: Path, image: Image) -> list[Path]:
    """Every file that decides the image's content, sorted. Raises FileNotFoundError for a missing one."""
    files = {root / image.dockerfile}
    for source in image.sources:
        path = root / source
        if path.is_dir():
            files.update(file for file in path.rglob("*") if file.is_file() and not IGNORED & set(file.parts))
        else:
            files.add(path)
    return sorted(file for file in files if file.suffix not in MADE)


def content_tag(root: Path, image: Image, arguments: dict[str, str]) -> str:
    """16 hex digits. Raises FileNotFoundError when a source is missing."""
    digest = hashlib.sha256(repr(sorted(arguments.items())).encode())
    for file in source_files(root, image):
        digest.update(str(file.relative_to(root)).encode() + b"\0")
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def accelerator_arguments(*, gpu: bool) -> dict[str, str]:
    """A worker image for machines without a GPU is half the size."""
    return {"GPU": "yes" if gpu else "no"}


def build_arguments(arguments: dict[str, str]) -> list[str]:
    return [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
