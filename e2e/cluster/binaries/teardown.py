"""Removes what a cluster left on the machine, whether it was stopped, crashed, or lost to a reboot.

Only what carries this cluster's own marks is touched: recorded processes, shims with this cluster's containerd address,
processes in its control group, mounts below its state folder, its network namespace.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

from ..commands import run, wait_until
from .machine import ControlGroups, processes_in_group, remove_control_group
from .network import Namespace
from .processes import Processes, observe_arguments


def remove_cluster(state: Path, processes: Processes, groups: ControlGroups, group: str, namespace: Namespace) -> None:
    """Safe to run at any time and twice."""
    # The kubelet first, or it would restart what is killed next.
    processes.stop("kubelet")
    kill_containers(groups, group)
    processes.stop()
    kill_shims(state / "containerd" / "containerd.sock")
    kill_containers(groups, group)
    unmount_below(state)
    namespace.remove()
    remove_control_group(groups, group)
    if state.exists():
        shutil.rmtree(state)


def kill_containers(groups: ControlGroups, group: str) -> None:
    def observe() -> set[int]:
        return processes_in_group(groups, group)

    for pid in observe():
        kill(pid)
    wait_until(lambda: not observe(), "the end of the pods' processes", 15)


def kill_shims(socket: Path) -> None:
    """A container's shim outlives containerd; it names containerd's socket in its arguments."""

    def observe() -> list[int]:
        return [pid for pid in process_ids() if is_shim(observe_arguments(pid), socket)]

    for pid in observe():
        kill(pid)
    wait_until(lambda: not observe(), "the end of the containers' shims", 15)


def is_shim(arguments: list[str], socket: Path) -> bool:
    return "containerd-shim" in Path(arguments[0] if arguments else "").name and str(socket) in arguments


def process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def parse_mounts_below(mounts: str, folder: Path) -> list[str]:
    """Mount points below `folder`, deepest first, from the text of /proc/mounts (which escapes spaces as \\040)."""
    points = (line.split()[1].replace("\\040", " ") for line in mounts.splitlines())
    return sorted((point for point in points if Path(point).is_relative_to(folder)), key=len, reverse=True)


def unmount_below(folder: Path) -> None:
    for point in parse_mounts_below(Path("/proc/mounts").read_text(), folder):
        run("umount", "--lazy", point)
