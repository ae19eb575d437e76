"""`python -m e2e.release --registry REGISTRY [--version VERSION] [--cpu-only]`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from e2e.cluster.commands import run
from e2e.cluster.errors import ClusterError
from e2e.cluster.gobuild import Builder, find_tool
from e2e.cluster.images.builder import choose_builder
from e2e.cluster.images.catalog import IMAGES
from e2e.cluster.progress import say, step
from e2e.cluster.settings import ROOT, ClusterSettings, read_settings
from e2e.release.changelog import add_section, last_commit
from e2e.release.chart import push_chart, write_chart
from e2e.release.version import read_version, write_version

PARTS = ("operator", "gateway", "worker")
_FIRST = "api: the first release; README.md says what it does"


def push_images(settings: ClusterSettings, registry: str, version: str, *, plain: bool) -> dict[str, str]:
    """References by part: name, version and digest."""
    builder = choose_builder(settings)
    pushed: dict[str, str] = {}
    for image in IMAGES:
        if image.part in PARTS:
            tag = builder.tag(image)
            builder.build(image, tag)
            reference = f"{registry}/{image.name}:{version}"
            with step(f"pushed {reference}"):
                pushed[image.part] = f"{reference}@{builder.publish(image, tag, reference, verify_tls=not plain)}"
    return pushed


def write_sboms(root: Path, folder: Path, version: str) -> list[Path]:
    """What each image has of Python packages, from the lock file, in CycloneDX."""
    files: list[Path] = []
    for part in PARTS:
        text = run(
            _uv(), "export", "--frozen", "--quiet", "--no-default-groups", "--format", "cyclonedx1.5",
            "--package", f"tandem-{part}", cwd=root,
        )  # fmt: skip
        files.append(folder / f"tandem-{part}-{version}.cdx.json")
        files[-1].write_text(text)
    return files


def _uv() -> Path:
    own = ROOT / ".cache" / "tools" / "bin" / "uv"
    return own if own.exists() else Path("uv")


def write_changelog(root: Path, version: str) -> None:
    """A tree without a history, such as an unpacked archive, keeps what it has."""
    git = ("git", "-C", root)
    if subprocess.run([*git, "rev-parse", "--git-dir"], capture_output=True, check=False).returncode:
        say("CHANGELOG.md stays: there is no history here")
        return
    file = root / "CHANGELOG.md"
    text = file.read_text() if file.exists() else ""
    before = last_commit(text)
    commit = run(*git, "rev-parse", "--short=12", "HEAD").strip()
    subjects = run(*git, "log", "--no-merges", "--reverse", "--format=%s", f"{before}..HEAD") if before else _FIRST
    date = datetime.now(UTC).date().isoformat()
    file.write_text(add_section(text, version, date, commit, subjects.splitlines()))


def release(settings: ClusterSettings, registry: str, version: str) -> None:
    plain, name = registry.startswith("http://"), registry.removeprefix("http://").removeprefix("https://").rstrip("/")
    root = settings.root
    if changed := write_version(root, version):
        say(f"version {version} in {', '.join(changed)}: commit them")
    out = root / "dist"
    out.mkdir(exist_ok=True)
    images = push_images(settings, name, version, plain=plain)
    with tempfile.TemporaryDirectory() as folder:
        chart = write_chart(root / "charts" / "tandem", Path(folder) / "tandem", version, images)
        address = push_chart(find_tool("helm", _builder()), chart, name, out, plain=plain)
    write_changelog(root, version)
    sboms = write_sboms(root, out, version)
    (out / f"release-{version}.json").write_text(json.dumps({"chart": address, "images": images}, indent=1))
    for each in (address, *images.values(), *sboms, root / "CHANGELOG.md"):
        say(str(each))
    option = " --plain-http" if plain else ""
    say(
        f"helm install tandem oci://{name}/charts/tandem --version {version}{option}"
        " -n tandem-system --create-namespace"
    )


def _builder() -> Builder:
    """Of this checkout's programs, whichever tree is released."""
    settings = read_settings()
    return Builder(settings.go_modules, settings.cache)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.release", description=__doc__)
    parser.add_argument("--registry", required=True, help="where to push; http:// in front: it has no TLS")
    parser.add_argument("--version", help="written into the tree first; default: what the tree says")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree that is released")
    parser.add_argument(
        "--cpu-only", action="store_true", help="a worker image without what only GPUs need, a third the size"
    )
    given = parser.parse_args()
    try:
        os.environ.setdefault("UV", str(_uv()))  # image builds share its cache
        settings = replace(read_settings(), root=given.root.resolve(), gpu=not given.cpu_only)
        release(settings, given.registry, given.version or read_version(settings.root))
    except ClusterError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
