"""Other releases of Tandem for the tests of upgrades: earlier ones from the history, and one with an added default."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster import ClusterError
from e2e.cluster.images.catalog import MEMBERS, WORKSPACE, Image
from e2e.install import HUB_ENDPOINT, NAMESPACE, RELEASE, ROOT, chart_values, helm

WITHOUT_KEYS = "76fce215920f2528c90457d735d936f5a6e962d0"
"""The last release whose pods have no keys: all of them are replaced by an upgrade, once."""
WITH_KEYS = "2f0ca93627dd1582211325ac84caae19fe6fe6b1"
"""The first one whose pods are left alone: it wrote every default out, and digested all of it."""
ADDED_FIELD = "lookahead"
ADDED_DEFAULT = 4
_ADDITIONS = (
    (
        "api/src/tandem_api/crd/engine.py",
        "class Engine(Authored):\n",
        f'    {ADDED_FIELD}: Annotated[int, Field(ge=1, le=64)] = {ADDED_DEFAULT}\n    """Of a later release."""\n',
    ),
    (
        "api/src/tandem_api/launch.py",
        'class SchedulerConfig(Wire):\n    """Limits of the engine\'s steps and of the queue before them."""\n\n',
        f"    {ADDED_FIELD}: int = {ADDED_DEFAULT}\n",
    ),
    (
        "operator/src/tandem_operator/workloads/configs.py",
        "        scheduler=SchedulerConfig(\n",
        f"            {ADDED_FIELD}=spec.engine.{ADDED_FIELD},\n",
    ),
)
"""Of a release that adds a field with a default: file, what stands before it, and the lines."""


def export(commit: str, folder: Path) -> Path:
    """The tree of a commit of this repository, in `folder/COMMIT`. Raises ClusterError where the history lacks it."""
    target = folder / commit[:12]
    if target.exists():
        return target
    result = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if result.returncode:
        raise ClusterError(
            f"git cannot export {commit[:12]}, which the tests of upgrades begin with; in a shallow clone, run "
            f"`git fetch --unshallow` ({result.stderr.decode().strip()})"
        )
    unfinished = target.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        archive.extractall(unfinished, filter="data")
    unfinished.rename(target)
    return target


def add_default(folder: Path) -> Path:
    """This checkout in `folder/later`, with a field of the engine that has a default in types, CRD, chart and operator.

    Raises ValueError where the code that it is added to is not there any more.
    """
    target = folder / "later"
    shutil.rmtree(target, ignore_errors=True)
    for name in (*WORKSPACE, *MEMBERS, "charts", "crds", "docs"):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "*.o", ".venv"))
        else:
            shutil.copy2(source, copy)
    for name, after, lines in _ADDITIONS:
        file = target / name
        text = file.read_text()
        if text.count(after) != 1:
            raise ValueError(f"{name} does not have {after!r} once: change what `add_default` looks for")
        file.write_text(text.replace(after, after + lines))
    run_python(target, "-m", "tandem_api.generate")
    return target


def run_python(tree: Path, *arguments: str, paths: Sequence[Path] = ()) -> str:
    """What a program prints that takes Tandem's packages from `tree`."""
    places = [*(tree / part / "src" for part in ("api", "operator")), *paths]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places)), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=tree, capture_output=True, text=True, check=True
    ).stdout


def image_of(part: str, tree: Path, label: str) -> Image:
    """The image that the Dockerfile of another tree makes: apart from this checkout's by its name."""
    manifests = (f"{member}/pyproject.toml" for member in MEMBERS)
    sources = (*WORKSPACE, *manifests, "api/src", f"{part}/src", f"{part}/image")
    return Image(
        part=f"{part}-{label}",
        dockerfile=f"{part}/Dockerfile",
        sources=tuple(source for source in sources if (tree / source).exists()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A chart, and its images by part."""

    chart: Path
    images: Mapping[str, str]
    values: Mapping[str, str]

    def install(self, cluster: Any) -> None:
        """Install or upgrade to it, and wait until its operator is up."""
        chosen = {f"images.{part}": reference for part, reference in self.images.items()} | dict(self.values)
        arguments = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        helm(
            cluster, "upgrade", "--install", RELEASE, str(self.chart), "--namespace", NAMESPACE, "--create-namespace",
            *arguments, "--wait", "--timeout", "180s",
        )  # fmt: skip


def build(cluster: Any, tree: Path, label: str, parts: Sequence[str]) -> dict[str, str]:
    """References of images by part. Takes minutes the first time."""
    return {part: cluster.backend.add(image_of(part, tree, label), tree) for part in parts}


def earlier_release(cluster: Any, commit: str, folder: Path) -> Release:
    tree = export(commit, folder)
    images = build(cluster, tree, commit[:7], ("operator", "gateway", "worker"))
    return Release(chart=tree / "charts" / "tandem", images=images, values={"hub.endpoint": HUB_ENDPOINT})


def present_release(cluster: Any) -> Release:
    """What this checkout is."""
    words = chart_values(cluster)[1::2]
    values = dict(word.split("=", 1) for word in words)
    images = {key.removeprefix("images."): value for key, value in values.items() if key.startswith("images.")}
    rest = {key: value for key, value in values.items() if not key.startswith("images.")}
    return Release(chart=ROOT / "charts" / "tandem", images=images, values=rest)


def later_release(cluster: Any, folder: Path) -> Release:
    """This checkout with an operator and a CRD that have a field more; gateways and workers stay as they are."""
    tree, present = add_default(folder), present_release(cluster)
    images = dict(present.images) | build(cluster, tree, "later", ("operator",))
    return Release(chart=tree / "charts" / "tandem", images=images, values=present.values)
