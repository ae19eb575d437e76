"""What a cluster or a run of the gate has left on this machine. It should be nothing: `down` and `.ci/run` end with it.

Only what carries marks of this checkout counts: its paths in a process's program, arguments or working folder, its
network namespace, link and control group, mounts below its state. `/proc` is read afresh; records are not believed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from .binaries.machine import ControlGroups, processes_in_group
from .binaries.network import Namespace
from .binaries.teardown import parse_mounts_below
from .errors import ClusterError

PATIENCE = 5.0
"""Seconds that what was just told to end may take: the kernel removes links and groups in its own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    parent: int
    arguments: tuple[str, ...]
    folder: str
    """Its working folder."""

    def mentions(self, place: Path) -> bool:
        """Whether its program, its working folder or one of its arguments lies below a folder."""
        words = [self.folder, *self.arguments, *(word.partition("=")[2] for word in self.arguments)]
        words += [word.removeprefix("unix://") for word in words]
        return any(word.startswith("/") and Path(word).is_relative_to(place) for word in words)

    def __str__(self) -> str:
        return f"process {self.pid}: {' '.join(self.arguments)[:120]}"


def observe_processes() -> list[Process]:
    """All but kernel threads and what ended meanwhile."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            folder = os.readlink(entry / "cwd")
            os.readlink(entry / "exe")  # a kernel thread has none; one that just begins has it before its arguments
        except OSError:  # it has ended, or it is somebody else's
            continue
        found.append(Process(pid=int(entry.name), parent=parent, arguments=tuple(arguments), folder=folder))
    return found


def select_processes(processes: Iterable[Process], place: Path, asking: int) -> list[Process]:
    """Those that belong to a folder, without the one that asks and those above it."""
    by_pid = {process.pid: process for process in processes}
    excused, pid = set(), asking
    while pid in by_pid and pid not in excused:
        excused.add(pid)
        pid = by_pid[pid].parent
    return [each for each in by_pid.values() if each.pid not in excused and each.mentions(place)]


def list_leftovers(state: Path, namespace: Namespace, groups: ControlGroups | None, whole: Path | None) -> list[str]:
    """A line each. With `whole`, a folder, everything that runs out of it counts, not the cluster alone."""
    found = [str(process) for process in select_processes(observe_processes(), whole or state, os.getpid())]
    found += [f"mount: {point}" for point in parse_mounts_below(Path("/proc/mounts").read_text(), whole or state)]
    if namespace.exists():
        found.append(f"network namespace: {namespace.name}")
    if Path("/sys/class/net", namespace.link).exists():
        found.append(f"network link: {namespace.link}")
    for root in groups.roots if groups is not None else ():
        if (root / namespace.name).exists():
            inside = processes_in_group(groups, namespace.name) if groups is not None else set()
            found.append(f"control group: {root / namespace.name}, with {len(inside)} processes")
    return found


def check_leftovers(observe: Callable[[], list[str]], patience: float = PATIENCE) -> None:
    """Raises ClusterError that names what is still there once `patience` is over."""
    deadline = time.monotonic() + patience
    while found := observe():
        if time.monotonic() > deadline:
            raise ClusterError("this is left on the machine:\n    " + "\n    ".join(found))
        time.sleep(0.2)
