"""Jobs that wait for a call: forking one and touching its memory takes longer than most calls."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from concurrent.futures import Executor
from dataclasses import dataclass

from tandem_worker.host.isolation.contract import IsolationError, Limits, UnavailableError
from tandem_worker.host.isolation.keeper import START_SECONDS, Keeper, LostError

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 0.5
"""The spawner says within this time how a job ended."""


@dataclass(slots=True)
class Job:
    sock: socket.socket
    notice: int
    """Pipe on which the spawner tells how the job ended."""
    begun: bool = False
    num_calls: int = 0

    @property
    def alive(self) -> bool:
        """It has not closed its end, nor has the kernel for it."""
        self.sock.setblocking(False)
        try:
            return self.sock.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """It ends, whatever it computes: the spawner sees that nobody waits for its end any more."""
        self.sock.close()
        os.close(self.notice)


class JobStock:
    """Any thread. Jobs of a spawner that has ended have ended too."""

    def __init__(self, keeper: Keeper, most: int, threads: Executor) -> None:
        """At most `most` wait; `threads` fork them."""
        self._keeper = keeper
        self._most = most
        self._threads = threads
        self._jobs: list[Job] = []
        self._lock = threading.Lock()

    def take(self, deadline: float) -> Job:
        """One that waits already, if there is any. Raises UnavailableError."""
        with self._lock:
            while self._jobs:
                job = self._jobs.pop()
                if job.alive:
                    return job
                job.close()
        try:
            return self._begin(deadline)
        except OSError as error:
            raise UnavailableError(f"the process for {self._keeper.name} cannot be reached: {error}") from error

    def put(self, job: Job) -> None:
        """It waits for another call; where enough do, it ends."""
        with self._lock:
            if len(self._jobs) < self._most and not self._keeper.closed:
                self._jobs.append(job)
                return
        job.close()

    def drop(self) -> None:
        """All that wait end."""
        with self._lock:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.close()

    def refill(self) -> None:
        """The next call is to find a job that has begun. Returns at once."""
        with contextlib.suppress(RuntimeError):  # closed
            self._threads.submit(self._fill)

    def _fill(self) -> None:
        try:
            while len(self._jobs) < self._most and not self._keeper.closed:
                self.put(self._begin(time.monotonic() + START_SECONDS))
        except (OSError, UnavailableError) as error:
            logger.warning("the process for %s keeps no job ready: %s", self._keeper.name, error)

    def _begin(self, deadline: float) -> Job:
        """Raises OSError, UnavailableError."""
        while True:
            self._keeper.wait_until_ready(deadline)
            with contextlib.ExitStack() as undo:
                sock, theirs = socket.socketpair()
                undo.callback(sock.close)
                with theirs:
                    notice, their_notice = os.pipe()
                    undo.callback(os.close, notice)
                    try:
                        self._keeper.send([theirs.fileno(), their_notice])
                    except LostError:
                        continue
                    finally:
                        os.close(their_notice)
                undo.pop_all()
                return Job(sock, notice)


def explain_end(job: Job, limits: Limits) -> IsolationError | LostError:
    """How a job ended. A spawner that does not say is gone itself; SIGKILL comes from others than the input."""
    poll = select.poll()  # `select.select` takes no descriptor above 1,023
    poll.register(job.notice, select.POLLIN)
    number = os.read(job.notice, 1) if poll.poll(_NOTICE_SECONDS * 1e3) else b""
    return limits.explain(number[0]) if number and number[0] != signal.SIGKILL else LostError()
