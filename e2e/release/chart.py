"""The chart as it is released: with a version, and with the images by digest."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from e2e.cluster.commands import run


def write_chart(source: Path, target: Path, version: str, images: Mapping[str, str]) -> Path:
    """A copy of the chart with references of the images, by part, as annotations; templates read them there.

    Values would not do: `helm upgrade --reuse-values` brings those of the release before.
    """
    shutil.copytree(source, target)
    file = target / "Chart.yaml"
    chart = yaml.safe_load(file.read_text())
    chart["version"] = chart["appVersion"] = version
    listed = [{"name": f"tandem-{part}", "image": reference} for part, reference in images.items()]
    chart["annotations"] |= {f"tandem.dev/{part}-image": reference for part, reference in images.items()}
    chart["annotations"]["artifacthub.io/images"] = yaml.safe_dump(listed, sort_keys=False)
    file.write_text(yaml.safe_dump(chart, sort_keys=False, width=1000))
    return target


def push_chart(helm: Path, chart: Path, registry: str, folder: Path, *, plain: bool) -> str:
    """Its address in the registry, by digest."""
    packaged = run(helm, "package", chart, "--destination", folder).strip().rpartition(" ")[2]
    options = ["--plain-http"] if plain else []
    # Helm says where it went, and the digest, on its other output.
    told = run("bash", "-c", '"$@" 2>&1', "push", helm, "push", packaged, f"oci://{registry}/charts", *options)
    digest = next(line.split()[-1] for line in told.splitlines() if line.startswith("Digest:"))
    return f"oci://{registry}/charts/tandem@{digest}"
