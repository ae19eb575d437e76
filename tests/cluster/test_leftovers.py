"""What counts as left behind, and how it is told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.binaries.network import Namespace
from e2e.cluster.errors import ClusterError
from e2e.cluster.leftovers import Process, check_leftovers, list_leftovers, observe_processes, select_processes

PLACE = Path("/checkout/.cache/cluster")


def process(pid: int, *arguments: str, parent: int = 1, folder: str = "/") -> Process:
    return Process(pid=pid, parent=parent, arguments=arguments, folder=folder)


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (process(7, "/checkout/.cache/cluster/x"), True),
        (process(7, "etcd", "--data-dir=/checkout/.cache/cluster/etcd"), True),
        (process(7, "shim", "-address", "unix:///checkout/.cache/cluster/containerd.sock"), True),
        (process(7, "sh", folder="/checkout/.cache/cluster/etcd"), True),
        (process(7, "/checkout/.cache/cluster-other/x"), False),
        (process(7, "grep", "checkout/.cache/cluster"), False),
        (process(7, "python", "-m", "e2e.cluster", folder="/checkout"), False),
    ],
)
def test_a_process_is_known_by_its_paths(found: Process, counts: bool) -> None:
    assert bool(select_processes([found], PLACE, asking=99)) is counts


def test_who_asks_and_those_above_are_excused() -> None:
    inside = "/checkout/.cache/cluster"
    tree = [
        process(10, "bash", folder=inside), process(11, "make", parent=10, folder=inside),
        process(12, "python", parent=11, folder=inside), process(13, "etcd", parent=10, folder=inside),
    ]  # fmt: skip
    assert [each.pid for each in select_processes(tree, PLACE, asking=12)] == [13]


def test_a_real_process_is_found_while_it_lives(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=tmp_path) as child:
        try:
            found = list_leftovers(tmp_path, Namespace("none00"), None, None)
            assert [f"process {child.pid}: " in line for line in found] == [True]
        finally:
            child.kill()
    assert list_leftovers(tmp_path, Namespace("none00"), None, None) == []
    assert os.getpid() in {each.pid for each in observe_processes()}


def test_what_ends_in_time_is_no_error_and_the_rest_is_named() -> None:
    seen = iter([["a", "b"], ["b"], []])
    check_leftovers(lambda: next(seen), patience=5)
    with pytest.raises(ClusterError, match="left on the machine:\n    network namespace: tandem-x"):
        check_leftovers(lambda: ["network namespace: tandem-x"], patience=0)
