"""Runs one of Mooncake's programs, again and again:
`python -m tandem_worker.tiers.mooncake.program [OPTION...] NAME ARGUMENT...`.

A holder that is told of no master ends at once, and beside a worker that would make the whole pod unready, though the
worker can do without. So this process stays, says what has happened, and tries again. It also ends a program that has
stopped to answer. A probe of the kubelet's would not see that: the kernel accepts connections for a frozen process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tandem_worker.host.mooncake import find_mooncake_obstacle, find_mooncake_program
from tandem_worker.tiers.errors import STORE_DISK_FULL, STORE_HOLDER_FAILED, STORE_MISSING
from tandem_worker.tiers.mooncake.notes import Note, Notes

HUNG_SECONDS = 15.0
"""A program that has answered, and then does not for so long, is ended."""
LEAST_FREE_BYTES = 16 << 20
"""A volume with less room than this is full for a file that has not got all of its blocks."""
_LOOK_SECONDS = 2.0
_END_SECONDS = 5.0
"""For so long a program that is told to end may take."""
_WORDS_SECONDS = 1.0
"""For so long its last words may take once it has ended: a process of its own may hold their pipe open."""
_MOST_LINE = 16 << 10
"""Bytes of what it writes that are read at a time, if no line ends before."""
_SHORTEST, _LONGEST = 1.0, 15.0
"""Seconds before it is tried again: more with each time that it lasted no longer than that."""
_WORDS = re.compile(rb"[EF]\d{4} [\d:.]+ +\d+ [\w.]+:\d+\] +(.*)")
"""A line of an error or of the last one, as Mooncake's log has it."""
_MASTER_FLAG = "--master_server_address="
_MEANINGS = {
    "UNABLE_OFFLOAD": "the master at {master} takes no disks: it has to be started with --enable_offload",
    "Client not available": "no master answers at {master}",
    "current master view": "no etcd answers at {master}, or no master has made itself known there",
}
"""What words of its log stand for, which say less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    command: tuple[str, ...]
    """Name of the program, and its arguments."""
    alive_port: int | None = None
    """Port at which the program answers HTTP on loopback while it lives."""
    notes: Notes | None = None
    disk: Path | None = None
    """Folder of the file that the program keeps blocks in."""
    disk_bytes: int = 0
    """Size of that file."""
    settle_seconds: float = 0.0
    """A program that finds blocks of an earlier one waits so long, until the master has forgotten that one: what it
    tells of a disk that the master still takes for the other's is lost with it."""


def main() -> None:
    """Until SIGTERM."""
    Supervisor(parse(sys.argv[1:])).run()


def parse(arguments: Sequence[str]) -> Options:
    """What the command line says. Ends the process with a sentence where that is nothing."""
    parser = argparse.ArgumentParser(prog="program", allow_abbrev=False)
    parser.add_argument("--alive", type=int, metavar="PORT")
    parser.add_argument("--notes", type=Path, metavar="FOLDER")
    parser.add_argument("--disk", type=Path, metavar="FOLDER")
    parser.add_argument("--disk-bytes", type=int, default=0)
    parser.add_argument("--settle", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="NAME ARGUMENT...")
    found = parser.parse_args(list(arguments))
    if not found.command:
        parser.error("which program?")
    return Options(
        command=tuple(found.command),
        alive_port=found.alive,
        notes=None if found.notes is None else Notes(found.notes),
        disk=found.disk,
        disk_bytes=found.disk_bytes,
        settle_seconds=found.settle,
    )


class Supervisor:
    """The life of one program after another. Raises OSError where its notes cannot be written."""

    def __init__(self, options: Options) -> None:
        self._options, self._name = options, options.command[0]
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._master = next(
            (each.removeprefix(_MASTER_FLAG) for each in options.command if each.startswith(_MASTER_FLAG)), ""
        )
        self._words, self._meaning = "", ""
        """Why it ends: what it said last, and what was understood of all that it said."""
        self._noted: Note | None = None
        self._obstacles: set[str] = set()
        """Why notes could not be left, as far as people were told."""

    def run(self) -> None:
        """Until SIGTERM or SIGINT, on the main thread."""
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, self._end)
        pause = _SHORTEST
        self._note(None)
        while not self._over.is_set():
            obstacle = self._find_obstacle()
            if obstacle is not None:
                self._note(obstacle)
                self._sleep(_LONGEST if obstacle.reason == STORE_MISSING else _LOOK_SECONDS)
                continue
            if self._options.disk is not None and has_files(self._options.disk):
                self._sleep(self._options.settle_seconds)
            began = time.monotonic()
            ended = "" if self._over.is_set() else self._run_once()
            if not self._over.is_set():
                pause = _SHORTEST if time.monotonic() - began > _LONGEST else min(2 * pause, _LONGEST)
                words = self._meaning or self._words
                words = f": {words}" if words else ""
                text = f"{self._name} {ended}, and is started again in {pause:g} s{words}"
                self._note(Note(STORE_HOLDER_FAILED, text))
                self._sleep(pause)

    def _end(self, number: int, frame: FrameType | None) -> None:
        self._over.set()
        if self._process is not None:
            self._process.terminate()

    def _find_obstacle(self) -> Note | None:
        """Why it cannot be started."""
        obstacle = find_mooncake_obstacle()
        if obstacle is not None:
            return Note(STORE_MISSING, f"{self._name} cannot run here: {obstacle}")
        disk, wanted = self._options.disk, self._options.disk_bytes
        if disk is None:
            return None
        try:
            missing, free = wanted - count_allocated(disk), count_free(disk)
        except OSError as error:
            return Note(STORE_HOLDER_FAILED, f"the volume of spec.kv.store.disk cannot be looked at: {error}")
        if free >= missing:
            return None
        text = f"the node's disk has {free >> 20} MiB left, and what spec.kv.store.disk asks for needs {missing >> 20}"
        return Note(STORE_DISK_FULL, f"{text} MiB more: make room, or ask for less")

    def _run_once(self) -> str:
        """How it ended."""
        self._words = self._meaning = ""
        self._is_restart_asked()  # what was asked of the one before is done
        try:
            program = str(find_mooncake_program(self._name))
            process = subprocess.Popen([program, *self._options.command[1:]], stderr=subprocess.PIPE)
        except OSError as error:
            return f"cannot be started ({error})"
        self._process, ended = process, threading.Event()
        if self._over.is_set():
            process.terminate()
        reader = threading.Thread(target=self._read_words, args=(process,), daemon=True)
        reader.start()
        threading.Thread(target=_wait_for, args=(process, ended), daemon=True).start()
        self._look_after(process, ended)
        reader.join(_WORDS_SECONDS)
        return f"has ended with status {process.returncode}"

    def _look_after(self, process: subprocess.Popen[bytes], ended: threading.Event) -> None:
        """Until it has ended, or was."""
        heard: float | None = None
        told: float | None = None
        while not ended.wait(_LOOK_SECONDS):
            now, port = time.monotonic(), self._options.alive_port
            self._touch()
            if self._over.is_set():
                told = told or now
                if now - told > _END_SECONDS:
                    process.kill()
            elif self._is_restart_asked():
                self._stop(process, "its worker could make no call, and has asked for it")
            elif port is None:
                continue
            elif is_answered(port):
                heard, self._meaning = time.monotonic(), ""
                self._note(self._find_fault())
            elif heard is not None and now - heard > HUNG_SECONDS:
                self._stop(process, f"it has not answered for {HUNG_SECONDS:g} s")

    def _stop(self, process: subprocess.Popen[bytes], why: str) -> None:
        self._meaning = why
        process.kill()

    def _find_fault(self) -> Note | None:
        """What is wrong though it runs."""
        disk, size = self._options.disk, self._options.disk_bytes
        if disk is None:
            return None
        try:
            free = count_free(disk)
            if free >= LEAST_FREE_BYTES or count_allocated(disk) >= size:
                return None
        except OSError as error:
            return Note(STORE_HOLDER_FAILED, f"the volume of spec.kv.store.disk cannot be looked at: {error}")
        text = f"the disk of spec.kv.store.disk is full: its node has {free >> 20} MiB left"
        return Note(STORE_DISK_FULL, text)

    def _read_words(self, process: subprocess.Popen[bytes]) -> None:
        """Hands on what it writes, and keeps what it said last of errors."""
        assert process.stderr is not None, "it was started with a pipe"
        with process.stderr:
            while line := process.stderr.readline(_MOST_LINE):
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                said = _WORDS.match(line)
                if said is not None:
                    self._words = said.group(1).decode(errors="replace")[:300]
                    meaning = next((text for key, text in _MEANINGS.items() if key in self._words), "")
                    self._meaning = meaning.format(master=self._master) or self._meaning

    def _sleep(self, seconds: float) -> None:
        self._touch()
        self._over.wait(seconds)

    def _touch(self) -> None:
        if self._options.notes is not None:
            self._leave(self._options.notes.touch)

    def _is_restart_asked(self) -> bool:
        notes = self._options.notes
        return notes is not None and bool(self._leave(notes.take_restart))

    def _note(self, note: Note | None) -> None:
        """For the worker, and where it is new for people."""
        notes, before = self._options.notes, self._noted
        if notes is not None:
            self._leave(lambda: notes.say(note))
        # How much room is left changes with every look.
        same = note == before or (
            note is not None and before is not None and note.reason == before.reason == STORE_DISK_FULL
        )
        if note is not None and not same:
            _say(note.message)
        self._noted = note

    def _leave(self, act: Callable[[], object]) -> object:
        """What this does to the notes. A volume that takes none is told to people, once: it may be the full one that
        there is word of, and a holder that runs is no worse for it."""
        try:
            return act()
        except OSError as error:
            reason = error.strerror or str(error)
            if reason not in self._obstacles:
                self._obstacles.add(reason)
                _say(f"no word can be left for the worker: {error}")
            return None


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


def _wait_for(process: subprocess.Popen[bytes], ended: threading.Event) -> None:
    process.wait()
    ended.set()


def is_answered(port: int) -> bool:
    """Whether somebody speaks HTTP at this port of loopback, whatever is said."""
    try:
        with socket.create_connection(("127.0.0.1", port), _LOOK_SECONDS) as connection:
            connection.settimeout(_LOOK_SECONDS)
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False


def has_files(folder: Path) -> bool:
    """Whether there is anything; a folder that cannot be looked at has nothing."""
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def count_allocated(folder: Path) -> int:
    """Bytes that files of a folder take of its volume. Raises OSError."""
    total = 0
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Mooncake replaces files
            status = path.stat()
            total += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return total


def count_free(folder: Path) -> int:
    """Bytes that are left for more."""
    volume = os.statvfs(folder)
    return volume.f_bavail * volume.f_frsize


if __name__ == "__main__":
    main()
