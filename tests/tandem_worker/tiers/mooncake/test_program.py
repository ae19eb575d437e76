"""A program that ends is started again; what keeps it from running is said; SIGTERM ends both."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.tiers.errors import STORE_DISK_FULL, STORE_HOLDER_FAILED
from tandem_worker.tiers.mooncake import program
from tandem_worker.tiers.mooncake.notes import Note, Notes
from tandem_worker.tiers.mooncake.program import Supervisor, count_allocated, is_answered, parse

from tests.mooncake.library import plan_environment
from tests.ports import free_port
from tests.tandem_worker.tiers.rig import wait_until

COMMAND = [sys.executable, "-m", "tandem_worker.tiers.mooncake.program"]
IMPATIENT = [
    sys.executable,
    "-c",
    "from tandem_worker.tiers.mooncake import program\n"
    "program.HUNG_SECONDS, program._END_SECONDS, program._LOOK_SECONDS, program._SHORTEST = 1.0, 0.5, 0.2, 0.05\n"
    "program.main()",
]
"""Takes a program to hang after a second."""


def read_until(process: subprocess.Popen[str], words: str) -> str:
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


def test_a_holder_without_a_master_is_tried_again_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    port, master = free_port(), free_port()
    arguments = ["mooncake_client", "--host=127.0.0.1", f"--port={port}", "--metadata_server=P2PHANDSHAKE"]
    arguments += [f"--master_server_address=127.0.0.1:{master}", "--global_segment_size=16 MB", "--logtostderr"]
    environment = plan_environment() | {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_CONNECT_TIMEOUT_MS": "1000"}
    command = [*COMMAND, f"--notes={tmp_path}", *arguments]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "mooncake_client has ended with status")
        assert process.poll() is None
        note = Notes(tmp_path).read()
        assert note is not None
        assert note.reason == STORE_HOLDER_FAILED
        assert note.message.endswith(f": no master answers at 127.0.0.1:{master}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_machine_without_its_libraries_says_so_and_stays() -> None:
    code = (
        "from tandem_worker.tiers.mooncake import program\n"
        "program.find_mooncake_obstacle = lambda: 'it lacks libtandem'\n"
        "import sys; sys.argv = ['program', 'mooncake_master']\n"
        "program.main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        said = read_until(process, "cannot run here")
        assert said == "mooncake_master cannot run here: it lacks libtandem\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_program_that_runs_ends_with_this_one() -> None:
    port = free_port()
    arguments = ["mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={port}", "--metrics_host=127.0.0.1"]
    arguments += [f"--metrics_port={free_port()}", "--logtostderr"]
    with subprocess.Popen([*COMMAND, *arguments], env=plan_environment(), stderr=subprocess.PIPE, text=True) as process:
        read_until(process, "Master service started")
        (child,) = find_children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process above a master that answers at a port, and takes it to hang after a second."""
    port = free_port()
    options = [f"--alive={port}", f"--notes={tmp_path}"]
    arguments = ["mooncake_master", "--rpc_address=127.0.0.1", f"--rpc_port={free_port()}"]
    arguments += ["--metrics_host=127.0.0.1", f"--metrics_port={port}", "--logtostderr"]
    command = [*IMPATIENT, *options, *arguments]
    with subprocess.Popen(command, env=plan_environment(), stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: is_answered(port))
        yield process, port
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("asked", [False, True], ids=["frozen", "asked"])
def test_one_that_does_not_answer_is_ended_and_started_again(
    watched: tuple[subprocess.Popen[bytes], int], tmp_path: Path, asked: bool
) -> None:
    process, port = watched
    notes, (first,) = Notes(tmp_path), find_children(process.pid)
    wait_until(notes.alive_path.exists)
    time.sleep(0.5)  # it has been heard
    if asked:
        assert notes.ask_restart()
    else:
        os.kill(first, signal.SIGSTOP)
    wait_until(lambda: first not in find_children(process.pid))
    wait_until(lambda: is_answered(port))
    wait_until(lambda: notes.read() is None)  # nothing is known against the one that runs now
    assert not notes.take_restart()


def test_a_frozen_one_does_not_keep_a_pod_from_ending(
    watched: tuple[subprocess.Popen[bytes], int],
) -> None:
    process, _ = watched
    (child,) = find_children(process.pid)
    os.kill(child, signal.SIGSTOP)
    process.terminate()
    assert process.wait(60) == 0
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def build_supervisor(folder: Path, size: int) -> Supervisor:
    return Supervisor(parse([f"--disk={folder}", f"--disk-bytes={size}", "mooncake_client"]))


def test_a_disk_that_is_too_small_is_said_and_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_mooncake_obstacle", lambda: None)
    note = build_supervisor(tmp_path, 1 << 60)._find_obstacle()
    assert note is not None
    assert note.reason == STORE_DISK_FULL
    assert "spec.kv.store.disk" in note.message


def test_a_disk_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "find_mooncake_obstacle", lambda: None)
    note = build_supervisor(tmp_path / "none", 1 << 20)._find_obstacle()
    assert note is not None
    assert note.reason == STORE_HOLDER_FAILED
    assert "No such file" in note.message


def test_what_is_there_already_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kv_cache.data").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(program, "find_mooncake_obstacle", lambda: None)
    monkeypatch.setattr(program, "count_free", lambda folder: 4096)
    assert build_supervisor(tmp_path, 1 << 20)._find_obstacle() is None
    assert build_supervisor(tmp_path, 2 << 20)._find_obstacle() is not None


@pytest.mark.parametrize(("allocated", "free", "full"), [(1 << 20, 0, False), (0, 0, True), (0, 1 << 30, False)])
def test_a_file_that_has_all_of_its_blocks_cannot_run_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocated: int, free: int, full: bool
) -> None:
    (tmp_path / "kv_cache.data").write_bytes(bytes(allocated))
    monkeypatch.setattr(program, "count_free", lambda folder: free)
    note = build_supervisor(tmp_path, 1 << 20)._find_fault()
    assert (note is not None) is full
    assert note is None or note.reason == STORE_DISK_FULL


def build_above(script: Path, text: str, monkeypatch: pytest.MonkeyPatch, *options: str) -> Supervisor:
    """A process above a shell script."""
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o755)
    monkeypatch.setattr(program, "find_mooncake_program", lambda name: script)
    monkeypatch.setattr(program, "_WORDS_SECONDS", 0.1)
    return Supervisor(parse([*options, "mooncake_client"]))


def test_one_that_has_ended_is_missed_though_another_process_holds_its_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = build_above(tmp_path / "run", f"sleep 60 & echo $! > {tmp_path / 'pid'}; exit 3", monkeypatch)
    assert supervisor._run_once() == "has ended with status 3"
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_one_that_cannot_be_started_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = build_above(tmp_path / "run", "", monkeypatch)
    (tmp_path / "run").chmod(0o600)
    assert "Permission denied" in supervisor._run_once()


def test_what_was_asked_before_a_start_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, notes = build_above(tmp_path / "run", "exit 0", monkeypatch, f"--notes={tmp_path}"), Notes(tmp_path)
    notes.touch()
    assert notes.ask_restart()
    supervisor._run_once()
    assert not notes.take_restart()


def test_what_is_written_without_end_is_handed_on_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    stream = SimpleNamespace(write=written.append, flush=lambda: None)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(buffer=stream))
    said = b"x" * (1 << 20) + b"\nE1126 05:00:00.000000 1 a.cpp:1] it is over\n"
    supervisor: Any = build_supervisor(tmp_path, 0)
    supervisor._read_words(SimpleNamespace(stderr=io.BytesIO(said)))
    assert b"".join(written) == said
    assert max(map(len, written)) <= 64 << 10
    assert supervisor._words == "it is over"


def test_notes_that_cannot_be_left_are_told_once_and_end_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").touch()
    supervisor = Supervisor(parse([f"--notes={tmp_path / 'full' / 'notes'}", "mooncake_client"]))
    for _ in range(3):
        supervisor._touch()
        supervisor._note(Note(STORE_DISK_FULL, "there is no room"))
        assert not supervisor._is_restart_asked()
    assert capsys.readouterr().err.splitlines() == [
        f"no word can be left for the worker: [Errno 20] Not a directory: '{tmp_path / 'full' / 'notes'}'",
        "there is no room",
    ]


def test_a_full_disk_is_said_once_however_much_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    supervisor = Supervisor(parse(["mooncake_client"]))
    for left in range(5):
        supervisor._note(Note(STORE_DISK_FULL, f"{left} MiB left"))
    supervisor._note(None)
    supervisor._note(Note(STORE_DISK_FULL, "9 MiB left"))
    assert capsys.readouterr().err == "0 MiB left\n9 MiB left\n"


def test_files_that_go_while_they_are_counted_end_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "names").symlink_to(tmp_path / "gone")
    (tmp_path / "kv_cache.data").write_bytes(bytes(1 << 20))
    monkeypatch.setattr(Path, "is_file", lambda path: True)
    assert count_allocated(tmp_path) == 1 << 20
    monkeypatch.setattr(program, "count_free", lambda folder: 0)
    note = build_supervisor(tmp_path / "none", 1 << 20)._find_fault()
    assert note is not None
    assert note.reason == STORE_HOLDER_FAILED


def test_what_is_said_is_read_and_taken_back(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes")
    assert notes.read() is None
    assert not notes.ask_restart()  # there is nobody
    notes.say(Note("StoreDiskFull", "x" * 10_000))
    read = notes.read()
    assert read is not None
    assert (read.reason, set(read.message)) == ("StoreDiskFull", {"x"})
    notes.say(None)
    assert notes.read() is None


@pytest.mark.parametrize("said", [b"", b"1", b"[1]", b"{", b"[[], {}, 3]"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "said").write_bytes(said)
    assert Notes(tmp_path).read() is None


def find_children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(each) for each in file.read().split()]
