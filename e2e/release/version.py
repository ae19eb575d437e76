"""Writes another version into every file that has the release's.

Not into `pyproject.toml` and `uv.lock`: nobody installs the packages by themselves, and images are built from these
files, so that each release would bring its gigabytes of dependencies anew although they are the same.
"""

from __future__ import annotations

import re
from pathlib import Path

from e2e.cluster.errors import ClusterError

VERSION_FILE = "api/src/tandem_api/version.py"
_PLACES = (
    (VERSION_FILE, r'(?m)^(VERSION = ")[^"]+'),
    ("charts/tandem/Chart.yaml", r"(?m)^(version: )\S+"),
    ("charts/tandem/Chart.yaml", r"(?m)^(appVersion: )\S+"),
    ("crds/tandem.dev_inferencemodels.yaml", r"(?m)^(    tandem\.dev/version: )\S+"),
    ("charts/tandem/templates/crd-inferencemodels.yaml", r"(?m)^(    tandem\.dev/version: )\S+"),
)
SEMVER = r"\d+\.\d+\.\d+(-[0-9A-Za-z-]+(\.[0-9A-Za-z-]+)*)?"


def read_version(root: Path) -> str:
    """Of a tree. Raises ClusterError where it has none."""
    found = re.search(_PLACES[0][1] + '"', (root / VERSION_FILE).read_text())
    if found is None:
        raise ClusterError(f'{VERSION_FILE} has no line VERSION = "…"')
    return found[0].partition('"')[2].rstrip('"')


def write_version(root: Path, version: str) -> list[str]:
    """The files that were changed. Raises ClusterError for what is no version, or where a place has none."""
    if not re.fullmatch(SEMVER, version):
        raise ClusterError(f"VERSION is {version!r}: write three numbers, as in 0.2.0 or 0.2.0-rc.1")
    changed: list[str] = []
    for name, pattern in _PLACES:
        file = root / name
        text = file.read_text()
        written, count = re.subn(pattern, rf"\g<1>{version}", text)
        if not count:
            raise ClusterError(f"{name} has no version where one is looked for: {pattern}")
        if written != text:
            file.write_text(written)
            changed.append(name)
    return sorted(set(changed))
