"""Worker processes that begin where the imports have ended: forked from one that has imported torch and the worker.

Importing takes more computing than all else in a start. What a worker does then is the same: a process of its own, with
its own environment, arguments and log, that runs `tandem_worker` as a program from its first line and ends by itself.

`python forking.py FD` is the process that is forked from. It takes orders from the socket at that descriptor, and ends
with whoever holds the other end; its workers end with it. With a second descriptor it takes orders of others, too, who
connect to the socket there: theirs end when they hang up.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


class Forked:
    """One process, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while the process runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """As `poll`, when it has ended. Raises subprocess.TimeoutExpired."""
        status = self._look(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("tandem_worker", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens where the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._status.settimeout(timeout)
            with contextlib.suppress(TimeoutError, BlockingIOError):
                told = self._status.recv(16)
                self._status.close()
                if not told:
                    raise RuntimeError("the process that workers are forked from has ended")
                self.returncode = int(told)
        return self.returncode


def launch(*more: socket.socket) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The process to fork from, and the socket to order at; `more` it has, too."""
    from tandem_worker.host.environment import prepare_environment

    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    prepare_environment(environment, num_threads=1, cache_dir="/absent")  # which torch reads when it is imported
    orders, theirs = socket.socketpair()
    with theirs:
        held = [theirs.fileno(), *(each.fileno() for each in more)]
        command = [sys.executable, __file__, *map(str, held)]
        return subprocess.Popen(command, pass_fds=held, env=environment, stdin=subprocess.DEVNULL), orders


class SharedForker:
    """A process to fork from for all that connect to `address`, so that it imports once for all processes of a run."""

    def __init__(self) -> None:
        self.address = f"\0tandem-tests-{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            self._process, self._orders = launch(listener)

    def close(self) -> None:
        """Also ends what was forked."""
        self._orders.close()
        self._process.wait(30)


class Forker:
    """The process to fork from: started with the first worker, ended with this process or by `close`."""

    def __init__(self, address: str | None = None) -> None:
        """At `address` one is there for several processes already."""
        self._address = address
        self._orders: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], log: Path, *, program: Path | None = None
    ) -> Forked:
        """`python -m tandem_worker`, or the program in that file, with these arguments; both outputs go to `log`."""
        with self._lock, log.open("wb") as sink:
            orders = self._orders or self._launch()
            status, theirs = socket.socketpair()
            with theirs:
                what = {"arguments": list(arguments), "program": str(program) if program is not None else None}
                order = json.dumps(what | {"env": dict(env), "cwd": os.getcwd()}).encode()
                orders.sendall(f"{len(order):8}".encode())
                orders.sendall(order)
                socket.send_fds(orders, [b"."], [sink.fileno(), theirs.fileno()])
            answer = orders.recv(16)
        assert answer, "the process that workers are forked from has ended"
        return Forked(int(answer), status)

    def close(self) -> None:
        """Also ends what was forked."""
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.wait(30)

    def _launch(self) -> socket.socket:
        if self._address is None:
            self._process, self._orders = launch()
        else:
            self._orders = socket.socket(socket.AF_UNIX)
            self._orders.connect(self._address)
        return self._orders


def main() -> str | None:
    """In the process to fork from; returns in the forked ones, which then are the program: that of a file, where it
    is one."""
    orders, *listeners = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    from tandem_worker.host.postponed import postpone_imports

    postpone_imports(os.environ)
    import torch  # noqa: F401
    from tandem_worker.engine import build  # noqa: F401
    from tandem_worker.model import load  # noqa: F401
    from tandem_worker.process import build as _
    from tandem_worker.server import app  # noqa: F401

    assert "huggingface_hub" not in sys.modules, "it reads HF_HOME when it is imported"
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "a fork would lose threads"
    gc.collect()
    gc.freeze()
    wakeup, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    ends: dict[int, socket.socket] = {}
    senders: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        for each in (orders, wakeup, *listeners):
            selector.register(each, selectors.EVENT_READ)
        while True:
            for key, _mask in selector.select():
                asker = key.fileobj
                assert isinstance(asker, socket.socket)
                if asker is wakeup:
                    wakeup.recv(4096)
                    _tell_ends(ends)
                elif asker in listeners:
                    selector.register(asker.accept()[0], selectors.EVENT_READ)
                elif not (size := asker.recv(8, socket.MSG_WAITALL)):
                    if asker is orders:
                        os._exit(0)
                    selector.unregister(asker)
                    asker.close()
                    for pid in [pid for pid in ends if senders[pid] is asker]:
                        os.kill(pid, signal.SIGKILL)
                else:
                    order = json.loads(asker.recv(int(size), socket.MSG_WAITALL))
                    _, descriptors, _, _ = socket.recv_fds(asker, 1, 2)
                    parent = os.getpid()
                    if pid := os.fork():
                        os.close(descriptors[0])
                        ends[pid], senders[pid] = socket.socket(fileno=descriptors[1]), asker
                        asker.sendall(str(pid).encode())
                        continue
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for held in (wake, *(each.fileobj for each in selector.get_map().values()), *ends.values()):
                        held.close()
                    os.close(descriptors[1])
                    _become(order, descriptors[0], parent)
                    return order["program"]


def _tell_ends(ends: dict[int, socket.socket]) -> None:
    while ends:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with ends.pop(pid) as told, contextlib.suppress(OSError):  # nobody asks any more
            told.sendall(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict, log: int, parent: int) -> None:
    """What a new process finds: its environment, outputs, folder and arguments, and chance of its own."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    random.seed()
    time.tzset()
    sys.argv = [order["program"] or "tandem_worker", *order["arguments"]]


if __name__ == "__main__":
    if (path := main()) is None:
        runpy.run_module("tandem_worker", run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(path, run_name="__main__")
