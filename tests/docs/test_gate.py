"""The gate watches itself: what it leaves to the full run, how long its parts take, and what it leaves behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.full import FULL
from tests.shares import SHARES, Part, judge, read_factor, render, run_parts

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", FULL)
def test_what_is_left_to_the_full_run_exists(name: str) -> None:
    path, _, test = name.partition("::")
    function = test.partition("[")[0]
    assert f"def {function}(" in (ROOT / path).read_text(), f"tests/full.py names {name}: no such test"


def test_every_line_has_its_figure_and_reason() -> None:
    for name, reason in FULL.items():
        assert reason.partition(" ")[0].isdigit() or reason.startswith("as the"), name
        assert len(reason) > 15 or "as the one above" in reason, name


def part(name: str, seconds: float, status: int = 0) -> Part:
    return Part(name=name, seconds=seconds, cpu_seconds=2 * seconds, status=status)


def test_parts_have_shares() -> None:
    assert sum(SHARES.values()) <= 1800
    assert SHARES["unit"] <= 240
    assert judge([part("unit", 479), part("check", 1)], 2.0) == []
    (problem,) = judge([part("unit", 481), part("check", 1)], 2.0)
    assert "unit took 481 s, and its share is 240 s: at most 480 s" in problem
    assert judge([part("unit", 481)], 3.0) == judge([part("unit", 10**6)], 0.0) == []
    assert judge([part("e2e", 1, status=2)], 0.0) == ["e2e failed"]
    assert render([part("check", 100), part("unit", 200)]).splitlines()[-1].split() == [
        "together",
        "300",
        "600",
        "1800",
    ]


@pytest.mark.parametrize("text", ["", "x", "-1", "nan", "inf"])
def test_a_factor_is_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="write a number"):
        read_factor(text)
    assert (read_factor(None), read_factor("3.5"), read_factor("0")) == (3.0, 3.5, 0.0)


def test_nothing_runs_after_a_part_that_fails() -> None:
    commands: list[list[str]] = []

    def run(command: object) -> int:
        commands.append(list(command))  # type: ignore[call-overload]
        return 2 * (len(commands) == 2)

    parts = run_parts(["make", "-s"], run)
    assert commands == [["make", "-s", "check"], ["make", "-s", "unit"]]
    assert [each.status for each in parts] == [0, 2]


def test_what_is_left_behind_is_found(tmp_path: Path) -> None:
    """In a process of its own: a child that runs on, and a folder."""
    script = (
        "import subprocess, tempfile\nfrom tests import leftovers\nleftovers._ENDING_SECONDS = 0.2\n"
        "leftovers.watch_temporary_files()\n"
        "with tempfile.TemporaryDirectory(), tempfile.NamedTemporaryFile(): pass\n"
        "assert leftovers.find_leftovers() == []\n"
        f"kept = tempfile.mkdtemp(dir={str(tmp_path)!r})\nchild = subprocess.Popen(['sleep', '60'])\n"
        "while b'sleep' not in open(f'/proc/{child.pid}/cmdline', 'rb').read(): pass\n"
        "running, folder = leftovers.find_leftovers()\nchild.kill()\n"
        "assert 'still runs: sleep 60' in running and str(child.pid) in running\n"
        "assert folder == f'{kept} was made and not removed'\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)
