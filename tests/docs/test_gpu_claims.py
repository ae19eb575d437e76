"""What has run on a GPU, and what has not, stands where somebody reads who has one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.docs.test_claims import ROOT

RESULTS = ROOT / "bench" / "results"
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "kernels.md"]
SAYS = r"(?i)\b(has|have) (not )?run( yet)?\b"


def beginning(page: Path) -> str:
    return " ".join(page.read_text().splitlines()[:20])


def test_examples_with_gpus_say_whether_they_have_run_on_one() -> None:
    with_gpus = [file for file in EXAMPLES if "nvidia.com/gpu" in file.read_text()]
    assert len(with_gpus) >= 9
    for file in with_gpus:
        header = [line for line in file.read_text().splitlines() if line.startswith("#")]
        assert len([line for line in header if re.search(SAYS, line) and "GPU" in line]) == 1, file.name


def test_pages_say_it_near_their_beginning() -> None:
    for page in PAGES:
        assert re.search(SAYS, beginning(page)), page.name
        assert "on a gpu" in beginning(page).lower(), page.name


def test_what_is_said_is_taken_back_when_there_are_results() -> None:
    """What a run on a GPU leaves, where it is kept, makes the sentences wrong."""
    kept = [*RESULTS.glob("gpu-*"), *RESULTS.glob("kernels-*.json")]
    said = any("not run" in beginning(page) for page in PAGES)
    assert said == (kept == [])
