"""The processes that a pod's first one starts for its other ranks.

A child reads its order as one line from standard input and dies with its parent: the pipe stays open as long as the
parent lives. A child that cannot go on leaves `{"reason", "message"}` on standard output, which nothing else writes to.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from tandem_worker.group.control.link import Loss
from tandem_worker.group.topology import RankOrder
from tandem_worker.host.vitals import Vitals


class Children:
    def __init__(self, on_exit: Callable[[Loss], None], vitals: Vitals) -> None:
        """`on_exit` is told of a child that ended before `stop`; called on a thread of its own."""
        self._on_exit = on_exit
        self._vitals = vitals
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopping = False

    def start(self, order: RankOrder) -> None:
        """Start a process for the rank that follows and give it `order`. Raises OSError, ThreadStartError."""
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem_worker", "--follow"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TERMINATION_MESSAGE_PATH": "/dev/stdout"},
        )
        assert process.stdin is not None
        process.stdin.write(order.to_json().encode() + b"\n")
        process.stdin.flush()
        self._processes.append(process)
        self._vitals.start_thread("child", self._watch, order.rank, process)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks started here, in the order of their starts; ended ones are included."""
        return [process.pid for process in self._processes]

    def stop(self, timeout: float) -> None:
        """Wait for all of them to end; whoever has not by then is killed."""
        self._stopping = True
        deadline = time.monotonic() + timeout
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            left = process.stdout.read()
        status = process.wait()
        if not self._stopping:
            self._on_exit(explain_exit(rank, status, left))


def explain_exit(rank: int, status: int, left: bytes) -> Loss:
    """How a child with this `Popen.returncode` ended, where it did not leave its own words on standard output."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        words = json.loads(left)
        return Loss(f"rank {rank} ended: {words['message']}", words["reason"])
    if status == -signal.SIGKILL:
        return Loss(f"rank {rank} was killed by SIGKILL, as the kernel does when memory runs out")
    if status < 0:
        return Loss(f"rank {rank} was killed by {signal.Signals(-status).name}")
    return Loss(f"rank {rank} ended with status {status}; its log says why")


def read_order(source: IO[str]) -> RankOrder:
    """The order on standard input; from then on this process ends with its parent."""
    order = RankOrder.model_validate_json(source.readline())

    def watch_parent() -> None:
        try:
            source.read()
        finally:
            os._exit(1)

    threading.Thread(target=watch_parent, name="parent", daemon=True).start()
    return order
