"""Making a release: the version everywhere, the chart with its own images, the changelog."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tandem_api.version import VERSION

from e2e.cluster.errors import ClusterError
from e2e.release import changelog
from e2e.release.chart import write_chart
from e2e.release.version import read_version, write_version
from tests.charts.test_chart import CHART, ROOT, needs_helm, of_kind, render

DIGEST = "sha256:" + "0" * 64
PARTS = ("operator", "gateway", "worker")
DEPENDENCIES = ["uv.lock", *(str(file.relative_to(ROOT)) for file in sorted(ROOT.glob("*/pyproject.toml")))]
"""What images' layers of dependencies are made of."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What has a version, of this checkout."""
    for name in ("api/src/tandem_api/version.py", "crds/tandem.dev_inferencemodels.yaml", *DEPENDENCIES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(CHART, tmp_path / "charts" / "tandem")
    return tmp_path


def test_a_version_is_written_wherever_it_stands(tree: Path) -> None:
    assert read_version(tree) == VERSION
    changed = write_version(tree, "7.8.9-rc.1")
    assert read_version(tree) == "7.8.9-rc.1"
    assert {"charts/tandem/Chart.yaml", "api/src/tandem_api/version.py"} <= set(changed)
    for name in DEPENDENCIES:  # else each release would have a layer of gigabytes of its own
        assert (tree / name).read_bytes() == (ROOT / name).read_bytes(), name
    for crd in ("crds/tandem.dev_inferencemodels.yaml", "charts/tandem/templates/crd-inferencemodels.yaml"):
        assert "    tandem.dev/version: 7.8.9-rc.1\n" in (tree / crd).read_text()
    assert write_version(tree, "7.8.9-rc.1") == []


@pytest.mark.parametrize("version", ["1.2", "v1.2.3", "1.2.3+local", "latest", ""])
def test_what_is_no_version_changes_nothing(tree: Path, version: str) -> None:
    with pytest.raises(ClusterError, match=r"write three numbers, as in 0\.2\.0"):
        write_version(tree, version)
    assert read_version(tree) == VERSION


@needs_helm
def test_a_released_chart_has_its_own_images(tree: Path) -> None:
    images = {part: f"10.0.0.1:5000/team/tandem-{part}:7.8.9@{DIGEST}" for part in PARTS}
    chart = write_chart(CHART, tree / "released", "7.8.9", images)

    def shown(*arguments: str) -> list[str]:
        (deployment,) = of_kind(render(*arguments, chart=chart), "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        return [container["image"], *(each.partition("=")[2] for each in container["args"] if "-image=" in each)]

    assert shown() == [images["operator"], images["worker"], images["gateway"]]
    mirrored = f"mirror.example.com/team/tandem-operator:7.8.9@{DIGEST}"
    assert shown("--set", "global.imageRegistry=mirror.example.com")[0] == mirrored
    # `helm upgrade --reuse-values`: the values are those of the release before, which names no images.
    (tree / "old.yaml").write_text(
        yaml.safe_dump({"images": {"operator": "", "gateway": "", "worker": ""}, "hub": None})
    )
    assert shown("--values", str(tree / "old.yaml"))[0] == images["operator"]
    listed = yaml.safe_load(yaml.safe_load((chart / "Chart.yaml").read_text())["annotations"]["artifacthub.io/images"])
    assert [each["image"] for each in listed] == list(images.values())


SUBJECTS = [
    "operator: what was released is recorded by revision",
    "worker, tests: a start is a graph of steps",
    "tests, docs: a table is complete",
    "Merge branch 'main' into peers",
    "operator: what was released is recorded by revision",
    "examples: models that workers serve",
]


def test_the_changelog_has_what_users_have() -> None:
    first = changelog.add_section("", "0.1.0", "2026-01-02", "a" * 12, SUBJECTS)
    assert first.startswith(changelog.HEADER)
    assert "### Operator\n\n- what was released is recorded by revision\n\n### Worker\n\n- a start is a graph" in first
    assert "a table is complete" not in first
    assert changelog.last_commit(first) == "a" * 12
    second = changelog.add_section(first, "0.2.0", "2026-02-03", "b" * 12, [])
    assert changelog.last_commit(second) == "b" * 12
    assert [line for line in second.splitlines() if line.startswith("## ")] == [
        "## 0.2.0 (2026-02-03)",
        "## 0.1.0 (2026-01-02)",
    ]
    again = changelog.add_section(second, "0.2.0", "2026-02-04", "c" * 12, SUBJECTS[:1])
    assert again.count("## 0.2.0") == 1
    assert again.endswith(first.removeprefix(changelog.HEADER).strip() + "\n")


def test_the_makefile_says_what_it_needs() -> None:
    text = (ROOT / "Makefile").read_text()
    assert "release: setup ##" in text
    assert json.dumps("$(REGISTRY)") in text
