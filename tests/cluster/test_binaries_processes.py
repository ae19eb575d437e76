"""A process is stopped only when it is the recorded one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster.binaries.processes import (
    Processes,
    Record,
    is_alive,
    observe_start_time,
    parse_start_time,
    stop_process,
)
from e2e.cluster.commands import wait_until
from e2e.cluster.errors import ClusterError


@pytest.fixture
def sleeper() -> Iterator[Record]:
    process = subprocess.Popen(["sleep", "60"])
    started = observe_start_time(process.pid)
    assert started is not None
    record = Record(name="sleeper", pid=process.pid, started=started, program="sleep")
    wait_until(lambda: is_alive(record), "sleep", 10)  # its arguments show a moment after its start
    yield record
    process.kill()
    process.wait()


@pytest.mark.parametrize("name", ["(sleep)", "(a b)", "(evil) S 1 2 (x)"])
def test_start_time_is_read_past_any_command_name(name: str) -> None:
    fields = " ".join(str(number) for number in range(4, 53))
    assert parse_start_time(f"17 {name} S {fields}") == 22


def test_a_recorded_process_is_stopped(sleeper: Record) -> None:
    stop_process(sleeper)
    assert not is_alive(sleeper)


@pytest.mark.parametrize("change", [{"started": 1}, {"program": "etcd"}])
def test_a_stranger_with_the_same_id_is_left_alone(sleeper: Record, change: dict[str, object]) -> None:
    stop_process(replace(sleeper, **change))
    assert is_alive(sleeper)


def test_started_processes_are_recorded_logged_and_stopped(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "processes.json", tmp_path / "logs")
    code = "import time; print('hello', flush=True); time.sleep(60)"
    processes.start("program", [sys.executable, "-c", code], sys.executable)
    (record,) = processes.read()
    assert is_alive(record)
    assert processes.dead() == []
    processes.stop()
    assert not is_alive(record)
    assert processes.read() == []


def test_a_process_that_ends_at_once_shows_its_last_words(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "processes.json", tmp_path / "logs")
    with pytest.raises(ClusterError, match="no such flag"):
        processes.start("program", ["sh", "-c", "echo no such flag; exit 2"], "never")


def test_a_dead_process_is_named(tmp_path: Path) -> None:
    processes = Processes(tmp_path / "processes.json", tmp_path / "logs")
    processes.start("program", ["sleep", "60"], "sleep")
    (record,) = processes.read()
    stop_process(record)
    assert processes.dead() == ["program"]
