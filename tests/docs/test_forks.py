"""`pytest --forks`: what the processes that share the tests report is what one process would have."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.forks import pytest_runtestloop

ROOT = Path(__file__).parents[2]
FIRST = """
import os, warnings, pytest
NUMBER = os.getpid()
def test_passes(tmp_path):
    assert tmp_path.is_dir() and os.getppid() == NUMBER
def test_fails():
    print("printed"); os.write(1, b"written"); assert 2 == 3
def test_dies(): os.kill(os.getpid(), 9)
def test_comes_after(): warnings.warn("look here")
"""
SECOND = """
import pytest, tempfile
@pytest.fixture(scope="module")
def once(): once.count += 1; yield once.count; assert once.count == 1
once.count = 0
def test_leaves_a_folder(once): tempfile.mkdtemp(dir="WHERE")
@pytest.mark.skip(reason="as asked")
def test_skips(): ...
def test_shares(once): assert once == 1
"""
THIRD = "import pytest\ndef test_exits(): pytest.exit('enough')\ndef test_goes_on(): ...\n"


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, str]:
    """The exit status of pytest with the hooks of this suite, and what it prints."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.conftest -p no:cacheprovider\n")
    command = [sys.executable, "-m", "pytest", str(folder), "-c", str(folder / "pytest.ini"), *arguments]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command, cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    return ran.returncode, ran.stdout + ran.stderr


def test_several_processes_report_as_one_would(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    report = tmp_path / "report.xml"
    files = {"first": FIRST, "second": SECOND.replace("WHERE", str(left)), "third": THIRD}
    status, output = run(tmp_path, "--forks", "3", "-rA", f"--junitxml={report}", **files)
    assert status == 1
    assert "collected 9 items" in output
    assert "3 failed, 5 passed, 1 skipped, 1 warning" in output
    for name in ("passes", "comes_after", "goes_on", "leaves_a_folder", "shares"):
        assert re.search(f"PASSED .*::test_{name}$", output, re.MULTILINE), name
    assert re.search("FAILED .*::test_fails - assert 2 == 3$", output, re.MULTILINE)
    assert re.search("FAILED .*::test_dies - process . ended with status -9 in this test$", output, re.MULTILINE)
    assert re.search("FAILED .*::test_exits - process . ended with status 0 in this test$", output, re.MULTILINE)
    assert re.search("SKIPPED .*: as asked$", output, re.MULTILINE)
    assert output.count("UserWarning: UserWarning: look here") == 1
    assert output.count("printed\nwritten") == 1
    assert f"LEFT BEHIND: {next(left.iterdir())} was made and not removed" in output
    counted = ElementTree.parse(report).getroot().find("testsuite")
    assert counted is not None
    assert (counted.get("tests"), counted.get("failures"), counted.get("skipped")) == ("9", "3", "1")


def test_the_first_failure_ends_a_run_that_is_to_end_then(tmp_path: Path) -> None:
    more = "def test_more(): assert 0\n"
    status, output = run(tmp_path, "--forks", "1", "-x", a=f"def test_a(): assert 0\n{more}", b=more)
    assert status == 1
    assert "1 failed in" in output


def test_threads_are_not_lost_in_silence() -> None:
    options = SimpleNamespace(getoption=lambda _: 2, option=SimpleNamespace(collectonly=False))
    session: Any = SimpleNamespace(config=options, testsfailed=0)
    done = threading.Event()
    waiter = threading.Thread(target=done.wait, name="a waiter")
    waiter.start()
    try:
        with pytest.raises(pytest.UsageError, match=r"a fork would lose threads .*, a waiter"):
            pytest_runtestloop(session)
    finally:
        done.set()
        waiter.join()
