"""The lines that pages about clients show are those that are run, with the versions that are installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "clients").glob("*.md"))
TEXT = "\n".join(page.read_text() for page in PAGES)
SCRIPTS = sorted((ROOT / "examples" / "clients").iterdir())
REQUIREMENTS = sorted((ROOT / "tests" / "clients" / "requirements").glob("*.in"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_page_shows_the_script_that_is_run(script: Path) -> None:
    language = {".py": "python", ".mjs": "javascript"}[script.suffix]
    assert f"```{language}\n{script.read_text()}```" in TEXT
    assert script.name in (ROOT / "tests" / "clients" / "test_clients.py").read_text()


def test_pages_show_no_other_lines() -> None:
    scripts = "".join(script.read_text() for script in SCRIPTS)
    blocks = re.findall(r"^```(?:python|javascript)\n(.*?)^```", TEXT, re.M | re.S)
    assert len(blocks) == len(SCRIPTS)
    assert all(block in scripts for block in blocks)


@pytest.mark.parametrize("file", REQUIREMENTS, ids=lambda path: path.stem)
def test_a_page_names_the_version_that_is_installed(file: Path) -> None:
    wanted = file.read_text().strip()
    assert f"`{wanted}`" in TEXT
    pin = re.sub(r"\[.*\]", "", wanted)
    assert any(line.split(" ")[0] == pin for line in file.with_suffix(".txt").read_text().splitlines())


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "clients" / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"({page.name})" not in index] == []
