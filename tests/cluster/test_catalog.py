"""Image tags follow from content."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.cluster.images.catalog import IMAGES, Image, content_tag, source_files
from e2e.cluster.settings import ROOT

IMAGE = Image(part="part", dockerfile="part/Dockerfile", sources=("part/src", "uv.lock"))
ARGUMENTS = {"BASE_IMAGE": "base"}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "part/src/__pycache__").mkdir(parents=True)
    for name in ("part/Dockerfile", "part/src/a.py", "part/src/__pycache__/a.pyc", "part/other.py", "uv.lock"):
        (tmp_path / name).write_text(name)
    return tmp_path


@pytest.mark.parametrize("changed", ["part/Dockerfile", "part/src/a.py", "uv.lock", "part/src/new.py"])
def test_a_changed_source_changes_the_tag(repository: Path, changed: str) -> None:
    before = content_tag(repository, IMAGE, ARGUMENTS)
    (repository / changed).write_text("changed")
    assert content_tag(repository, IMAGE, ARGUMENTS) != before


@pytest.mark.parametrize("changed", ["part/other.py", "part/src/__pycache__/a.pyc", "part/src/a.so"])
def test_what_no_layer_holds_leaves_the_tag(repository: Path, changed: str) -> None:
    before = content_tag(repository, IMAGE, ARGUMENTS)
    (repository / changed).write_text("changed")
    assert content_tag(repository, IMAGE, ARGUMENTS) == before


def test_a_moved_file_changes_the_tag(repository: Path) -> None:
    before = content_tag(repository, IMAGE, ARGUMENTS)
    (repository / "part/src/a.py").rename(repository / "part/src/b.py")
    assert content_tag(repository, IMAGE, ARGUMENTS) != before


def test_another_base_changes_the_tag(repository: Path) -> None:
    assert content_tag(repository, IMAGE, ARGUMENTS) != content_tag(repository, IMAGE, {"BASE_IMAGE": "other"})


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.part)
def test_every_file_that_a_dockerfile_copies_is_in_the_tag(image: Image) -> None:
    files = {str(file.relative_to(ROOT)) for file in source_files(ROOT, image)}
    for line in (ROOT / image.dockerfile).read_text().splitlines():
        if line.startswith("COPY ") and "--from=" not in line:  # that copies from another stage of the build
            for source in line.split()[1:-1]:
                assert any(file == source or file.startswith(f"{source}/") for file in files), source
