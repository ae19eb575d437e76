"""`pytest --forks`: what the processes that share the tests report is what one process would have."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.forks import Sharing, pytest_runtestloop

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
HANGING = """
import os, signal, threading, time, pytest
@pytest.mark.timeout(1)
def test_hangs():
    first = f"/proc/{os.getppid()}"
    if not os.fork():  # holds what its parent has opened
        while os.path.exists(first): time.sleep(0.1)
        os._exit(0)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM]); threading.Event().wait()
def test_is_heard_of(): ...
"""
WAITING = """
import os, pathlib, subprocess, time, pytest
HERE = pathlib.Path(__file__).parent
@pytest.fixture
def child():
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    yield child.pid
    (HERE / f"{os.getpid()}.ending").touch()
    time.sleep(0.3); child.kill(); child.wait()
def test_waits(child):
    (HERE / f"{os.getpid()}.begun").write_text(f"{child}"); time.sleep(300)
def test_more(): ...
"""
THIRD = "import pytest\ndef test_exits(): pytest.exit('enough')\ndef test_goes_on(): ...\n"


def run(folder: Path, *arguments: str, **files: str) -> tuple[int, str]:
    """The exit status of pytest with the hooks of this suite, and what it prints."""
    ran = start(folder, *arguments, **files)
    status = ran.wait(120)
    return status, (folder / "output").read_text()


def start(folder: Path, *arguments: str, **files: str) -> subprocess.Popen[bytes]:
    """In a process group of its own; what it prints comes to a file."""
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p tests.conftest -p no:cacheprovider\n")
    command = [sys.executable, "-m", "pytest", str(folder), "-c", str(folder / "pytest.ini"), *arguments]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    with (folder / "output").open("wb") as sink:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=sink, start_new_session=True)


def asked_for(count: int, **more: object) -> Any:
    """A session with these options."""
    options = {"forks": count} | more
    config = SimpleNamespace(
        getoption=lambda name, default=None: options.get(name, default), option=SimpleNamespace(collectonly=False)
    )
    return SimpleNamespace(config=config, testsfailed=0)


def test_several_processes_report_as_one_would(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.mkdir()
    report = tmp_path / "report.xml"
    files = {"first": FIRST, "second": SECOND.replace("WHERE", str(left)), "third": THIRD, "hanging": HANGING}
    status, output = run(tmp_path, "--forks", "4", "-rA", f"--junitxml={report}", **files)
    assert status == 1
    assert "collected 11 items" in output
    assert "4 failed, 6 passed, 1 skipped, 1 warning" in output
    for name in ("passes", "comes_after", "goes_on", "leaves_a_folder", "shares", "is_heard_of"):
        assert re.search(f"PASSED .*::test_{name}$", output, re.MULTILINE), name
    assert re.search("FAILED .*::test_fails - assert 2 == 3$", output, re.MULTILINE)
    assert re.search("FAILED .*::test_dies - process . ended with status -9 in this test$", output, re.MULTILINE)
    assert re.search("FAILED .*::test_exits - process . ended with status 0 in this test$", output, re.MULTILINE)
    assert re.search(r"::test_hangs - .* status -6 in this test after 2 silent seconds$", output, re.MULTILINE)
    assert re.search(r"test_hanging.py.* in test_hangs$", output, re.MULTILINE), "where it hung"
    assert re.search("SKIPPED .*: as asked$", output, re.MULTILINE)
    assert output.count("UserWarning: UserWarning: look here") == 1
    assert output.count("printed\nwritten") == 1
    assert f"LEFT BEHIND: {next(left.iterdir())} was made and not removed" in output
    counted = ElementTree.parse(report).getroot().find("testsuite")
    assert counted is not None
    assert (counted.get("tests"), counted.get("failures"), counted.get("skipped")) == ("11", "4", "1")


@pytest.mark.parametrize(("number", "whole"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_who_is_told_to_end_leaves_nothing(tmp_path: Path, number: signal.Signals, whole: bool) -> None:
    """Ctrl-C, here twice, reaches the whole group; the signals of `timeout` and make the first process alone."""
    ran = start(tmp_path, "--forks", "2", a=WAITING, b=WAITING)
    try:
        deadline = time.monotonic() + 60
        while len(begun := [path for path in tmp_path.glob("*.begun") if path.read_text()]) < 2:
            assert time.monotonic() < deadline, (tmp_path / "output").read_text()
            assert ran.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        (os.killpg if whole else os.kill)(ran.pid, number)
        while whole and len(list(tmp_path.glob("*.ending"))) < 2:
            assert time.monotonic() < deadline
        if whole:
            os.killpg(ran.pid, number)
        assert ran.wait(60) in ((2, 130) if whole else (-number,))
        pids = [pid for path in begun for pid in (path.stem, path.read_text())]
        while running := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
            assert time.monotonic() < deadline, running
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)
        ran.wait()
    assert "BrokenPipe" not in (tmp_path / "output").read_text()


@pytest.mark.parametrize(
    ("count", "more", "what"),
    [(-1, {}, "write how many"), (2, {"usepdb": True}, "--pdb"), (2, {"numprocesses": 2}, "-n exclude")],
)
def test_what_would_run_nothing_or_hang_is_refused(count: int, more: dict[str, object], what: str) -> None:
    session = asked_for(count, **more)
    with pytest.raises(pytest.UsageError, match=what):
        pytest_runtestloop(session)


def test_tests_that_nobody_ran_are_no_success() -> None:
    items = [SimpleNamespace(nodeid=f"a.py::{name}") for name in "xyz"]
    session: Any = SimpleNamespace(items=items, config=SimpleNamespace(hook=None), shouldfail=False)
    with pytest.raises(RuntimeError, match=r"3 of 3 tests did not end: a\.py::x, "):
        Sharing(session).share(0)


def test_processes_that_cannot_begin_are_not_forked_for_ever(tmp_path: Path) -> None:
    full = "import os, tests.forks\ntests.forks._keep_outputs_apart = lambda _: os._exit(3)\ndef test_a(): ...\n"
    status, output = run(tmp_path, "--forks", "1", a=full)
    assert status == 3
    assert "process 0 ended with status 3 before its first test" in output


def test_the_first_failure_ends_a_run_that_is_to_end_then(tmp_path: Path) -> None:
    more = "def test_more(): assert 0\n"
    status, output = run(tmp_path, "--forks", "1", "-x", a=f"def test_a(): assert 0\n{more}", b=more)
    assert status == 1
    assert "1 failed in" in output


def test_threads_are_not_lost_in_silence() -> None:
    session = asked_for(2)
    done = threading.Event()
    waiter = threading.Thread(target=done.wait, name="a waiter")
    waiter.start()
    try:
        with pytest.raises(pytest.UsageError, match=r"a fork would lose threads .*, a waiter"):
            pytest_runtestloop(session)
    finally:
        done.set()
        waiter.join()
