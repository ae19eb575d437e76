"""The images' base: the public slim Python where a registry answers, else one made by debootstrap."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..commands import run
from ..errors import ClusterError, CommandFailed
from ..progress import say, step

PUBLIC = "docker.io/library/python:3.12-slim"
SUITE = "bookworm"
PACKAGES = ("python3", "python3-venv", "ca-certificates")
USELESS = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale", "var/log")
RECIPE = 1
"""Raised when the steps below change."""

Storage = Callable[..., str]
"""Runs buildah on its storage and returns what it prints."""


def made_name() -> str:
    key = hashlib.sha256(repr((SUITE, PACKAGES, USELESS, RECIPE)).encode()).hexdigest()[:12]
    return f"localhost/tandem-base:{key}"


def find_base(buildah: Storage, log: Path) -> str:
    """A base image that is in buildah's storage afterwards."""
    names = buildah("images", "--format", "{{.Name}}:{{.Tag}}").split()
    for known in (made_name(), PUBLIC):
        if known in names:
            return known
    try:
        with step(f"pulled {PUBLIC}"):
            buildah("pull", PUBLIC, timeout=300)
    except CommandFailed:
        say("no image registry is within reach: making the base image with debootstrap")
        make_base(buildah, log)
        return made_name()
    return PUBLIC


def make_base(buildah: Storage, log: Path) -> None:
    """Debian with its own Python, without what only people read. Raises ClusterError without a Debian mirror."""
    if not shutil.which("debootstrap"):
        raise ClusterError(
            "no image registry is within reach; install the package `debootstrap` or set TANDEM_BASE_IMAGE"
        )
    with step("made the base image"):
        container = buildah("from", "scratch").strip()
        try:
            root = Path(buildah("mount", container).strip())
            run(
                "debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, root, find_mirror(),
                log=log, timeout=900,
            )  # fmt: skip
            for folder in USELESS:
                shutil.rmtree(root / folder, ignore_errors=True)
                (root / folder).mkdir(parents=True, exist_ok=True)
            buildah("umount", container)
            buildah("commit", "--quiet", container, made_name(), timeout=300)
        finally:
            buildah("rm", container)


def find_mirror(sources: Path = Path("/etc/apt")) -> str:
    """The Debian mirror that this machine installs its own packages from."""
    files = [sources / "sources.list", *sorted(sources.glob("sources.list.d/*.list"))]
    files += sorted(sources.glob("sources.list.d/*.sources"))
    for file in files:
        if file.exists() and (mirror := parse_mirror(file.read_text())):
            return mirror
    raise ClusterError(
        "no Debian mirror stands in /etc/apt; set TANDEM_BASE_IMAGE to an image with Python 3.11 or newer"
    )


def parse_mirror(text: str) -> str | None:
    """The first address of a distribution's main archive in either format of apt's source lists."""
    addresses = re.findall(r"^URIs:\s*(\S+)", text, re.M) + re.findall(r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)", text, re.M)
    return next((a for a in addresses if re.search(r"/debian/?$", a)), None)
