"""Starts the cluster's processes and stops exactly those.

A record names a process by its id, its start time and its program. A process id alone may belong to somebody else by
the time it is looked at (a reboot, a wrap-around), so all three must agree before a signal is sent.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ..commands import wait_until
from ..errors import ClusterError

STOP_LIMIT = 3.0
"""Seconds for a polite end; nothing here has state worth a longer wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    name: str
    pid: int
    started: int
    """Clock ticks since boot, from /proc/<pid>/stat."""
    program: str


def parse_start_time(stat: str) -> int:
    """Field 22 of /proc/<pid>/stat. The command name, field 2, may contain spaces and parentheses."""
    return int(stat.rpartition(")")[2].split()[19])


def observe_start_time(pid: int) -> int | None:
    """None when there is no such process, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state = stat.rpartition(")")[2].split()[0]
    return None if state in {"Z", "X"} else parse_start_time(stat)


def observe_arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def is_alive(record: Record) -> bool:
    same_start = observe_start_time(record.pid) == record.started
    return same_start and observe_arguments(record.pid)[:1] == [record.program]


class Processes:
    """The processes of one cluster, recorded in one file that outlives this program."""

    def __init__(self, file: Path, logs: Path) -> None:
        self.file, self.log_folder = file, logs

    def read(self) -> list[Record]:
        if not self.file.exists():
            return []
        return [Record(**entry) for entry in json.loads(self.file.read_text())]

    def _write(self, records: list[Record]) -> None:
        unfinished = self.file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps([asdict(record) for record in records], indent=1))
        unfinished.rename(self.file)

    def log(self, name: str) -> Path:
        return self.log_folder / f"{name}.log"

    def start(self, name: str, command: list[str], program: str, env: dict[str, str] | None = None) -> None:
        """Start `command`, which ends up executing `program` in the same process, detached from this one."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        pid = _spawn(command, self.log(name), {**os.environ, **(env or {})})
        wait_until(lambda: _has_ended(pid) or observe_arguments(pid)[:1] == [program], name, 10)
        started = observe_start_time(pid)
        if started is None:
            raise ClusterError(f"{name} ended at once:\n{self.tail(name)}")
        others = [record for record in self.read() if record.name != name]
        self._write([*others, Record(name=name, pid=pid, started=started, program=program)])

    def dead(self) -> list[str]:
        """Names of recorded processes that no longer run."""
        return [record.name for record in self.read() if not is_alive(record)]

    def tail(self, name: str, lines: int = 12) -> str:
        if not self.log(name).exists():
            return ""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-lines:])

    def stop(self, *names: str) -> None:
        """Stop the named processes, or all in reverse order of start: politely, then for good."""
        records = [record for record in self.read() if not names or record.name in names]
        if not records:
            return
        for record in reversed(records):
            stop_process(record)
        self._write([record for record in self.read() if record not in records])

    @contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """It is there and does nothing meanwhile. Raises ClusterError when it does not run."""
        record = next((record for record in self.read() if record.name == name and is_alive(record)), None)
        if record is None:
            raise ClusterError(f"{name} does not run: there is nothing to freeze")
        os.kill(record.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(record.pid, signal.SIGCONT)


def _spawn(command: list[str], log: Path, env: dict[str, str]) -> int:
    """The id of a process in a session of its own, which lives on after this program. Output is appended to `log`."""
    with log.open("a") as out:
        return os.posix_spawnp(
            command[0],
            command,
            env,
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, out.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, out.fileno(), 2),
            ],
        )


def _has_ended(pid: int) -> bool:
    return observe_start_time(pid) is None


def stop_process(record: Record) -> None:
    """Return once the process is gone."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        if not is_alive(record):
            return
        os.kill(record.pid, sig)
        try:
            wait_until(lambda: not is_alive(record), f"the end of {record.name}", STOP_LIMIT)
        except ClusterError:
            continue
    if is_alive(record):
        raise ClusterError(f"{record.name} (process {record.pid}) does not end, not even by SIGKILL")
