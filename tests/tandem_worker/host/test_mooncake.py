"""Mooncake's package is found, loaded, and what is missing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tandem_worker.host import mooncake
from tandem_worker.host.mooncake import find_mooncake_obstacle, find_mooncake_program

from tests.mooncake.library import load_verbs, plan_environment


def test_says_nothing_where_everything_is_there() -> None:
    load_verbs()
    assert find_mooncake_obstacle() is None


@pytest.mark.parametrize("module", ["mooncake.store", "mooncake.engine"])
def test_its_modules_load_in_a_process_with_the_environment_of_tests(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {module}"], env=plan_environment(), timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("program", ["mooncake_master", "mooncake_client"])
def test_its_programs_start(program: str) -> None:
    done = subprocess.run(
        [find_mooncake_program(program), "--version"],
        env=plan_environment(),
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert program in done.stdout


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake.importlib.util, "find_spec", lambda name: None)
    assert "tandem-worker[mooncake]" in (find_mooncake_obstacle() or "")
    with pytest.raises(FileNotFoundError, match=r"mooncake_master is not here: .*tandem-worker\[mooncake\]"):
        find_mooncake_program("mooncake_master")


def test_another_machine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(mooncake.platform, "machine", lambda: "aarch64")
    assert "this is linux on aarch64" in (find_mooncake_obstacle() or "")


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_LIBRARIES", {"libtandem-missing.so.9": "libtandem9"})
    monkeypatch.setattr(mooncake, "find_mooncake_folder", lambda: Path("/nowhere"))
    obstacle = find_mooncake_obstacle()
    assert obstacle == ("Mooncake needs libtandem-missing.so.9, which this machine lacks: apt-get install libtandem9")
