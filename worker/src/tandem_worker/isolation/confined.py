"""Calls functions in processes of their own, each call in a fresh one, so that none outlives its limits.

    confined = Confined("package.module:setup", payload, limits=Limits(...), name="grammars")
    confined.start()                                   # returns at once; a thread starts the process and keeps it alive
    answer = await confined.call("compile", request, seconds=1.0)

`setup(payload)` runs once in a process that is started from nothing (no descriptors, no threads, no torch, no secrets
of this one) and returns functions from bytes to bytes by name. Every call forks a job from it. A job that outlives its
limits is ended by the kernel; what it took is free again at once, and neither this process nor the next job notices.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import select
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import orjson

from tandem_worker.isolation.contract import (
    FunctionError,
    IsolationError,
    LimitError,
    Limits,
    PeerGoneError,
    QueueFullError,
    Status,
    UnavailableError,
    read_frame,
    write_frame,
)
from tandem_worker.isolation.keeper import Keeper, LostError
from tandem_worker.isolation.spawner import SECONDS

logger = logging.getLogger(__name__)

_NOTICE_SECONDS = 0.5
"""The spawner says within this time how a job ended."""
_MOST_SILENT = 3
"""Calls in a row that may pass their deadline before a job begins with them."""


@dataclass(slots=True)
class Counts:
    """Since the start."""

    calls: int = 0
    limited: int = 0
    unavailable: int = 0
    seconds: float = 0.0
    """Spent in calls, waiting included."""


class Confined:
    """`start` before the first call; `close` ends the processes. All methods may be called from any thread."""

    def __init__(
        self,
        setup: str,
        payload: bytes,
        *,
        limits: Limits,
        name: str,
        parallel: int = 2,
        queue: int = 32,
        niceness: int = 5,
    ) -> None:
        """`parallel` jobs run at a time, `queue` more may wait; `name` is for logs and messages."""
        self.name = name
        self.limits = limits
        self.counts = Counts()
        order = orjson.dumps({"setup": setup, "limits": dataclasses.asdict(limits), "niceness": niceness})
        self._keeper = Keeper(name, order, payload)
        self._most_pending = parallel + queue
        self._num_pending = 0
        self._num_silent = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(parallel, thread_name_prefix=name)

    def start(self) -> None:
        self._keeper.start()

    def close(self) -> None:
        self._keeper.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def process_id(self) -> int | None:
        """Of the process that jobs are forked from; None while there is none that takes calls."""
        return self._keeper.process_id

    @property
    def num_restarts(self) -> int:
        return self._keeper.num_restarts

    async def call(self, function: str, request: bytes, *, seconds: float) -> bytes:
        """The answer within `seconds`, waiting included. Raises IsolationError."""
        began = self._enter()
        try:
            future = self._threads.submit(self._call, function, request, began + seconds)
        except RuntimeError as error:  # closed in the meantime
            self._leave(began)
            raise UnavailableError(f"the process for {self.name} has been closed") from error
        future.add_done_callback(lambda _: self._leave(began))
        return await asyncio.wrap_future(future)

    def call_here(self, function: str, request: bytes, *, seconds: float) -> bytes:
        """As `call`, on the calling thread."""
        began = self._enter()
        try:
            return self._call(function, request, began + seconds)
        finally:
            self._leave(began)

    def _enter(self) -> float:
        if self._keeper.closed:
            raise UnavailableError(f"the process for {self.name} has been closed")
        with self._lock:
            if self._num_pending >= self._most_pending:
                raise QueueFullError(f"{self._most_pending} calls for {self.name} are waiting already")
            self._num_pending += 1
            self.counts.calls += 1
        return time.monotonic()

    def _leave(self, began: float) -> None:
        with self._lock:
            self._num_pending -= 1
            self.counts.seconds += time.monotonic() - began

    def _call(self, function: str, request: bytes, deadline: float) -> bytes:
        try:
            try:
                return self._run_job(function, request, deadline)
            except LostError:
                logger.warning("the process for %s died under a call, which is tried again", self.name)
                return self._run_job(function, request, deadline)
        except LostError as error:
            self.counts.unavailable += 1
            raise UnavailableError(f"the process for {self.name} died twice under this call") from error
        except UnavailableError:
            self.counts.unavailable += 1
            raise
        except LimitError:
            self.counts.limited += 1
            raise

    def _run_job(self, function: str, request: bytes, deadline: float) -> bytes:
        try:
            sock, notice = self._begin_job(deadline)
        except OSError as error:
            raise UnavailableError(f"the process for {self.name} cannot be reached: {error}") from error
        try:
            return self._talk(sock, notice, function, request, deadline)
        finally:
            sock.close()
            os.close(notice)

    def _begin_job(self, deadline: float) -> tuple[socket.socket, int]:
        """A job's socket, and the pipe that tells how it ended. Raises OSError, UnavailableError, LimitError."""
        while True:
            self._keeper.wait_until_ready(deadline)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise LimitError("deadline", "had to wait until its deadline")
            with contextlib.ExitStack() as undo:
                sock, theirs = socket.socketpair()
                undo.callback(sock.close)
                with theirs:
                    notice, their_notice = os.pipe()
                    undo.callback(os.close, notice)
                    try:
                        self._keeper.send(SECONDS.pack(remaining), [theirs.fileno(), their_notice])
                    except LostError:
                        continue
                    finally:
                        os.close(their_notice)
                undo.pop_all()
                return sock, notice

    def _talk(self, sock: socket.socket, notice: int, function: str, request: bytes, deadline: float) -> bytes:
        """Hand a job its request and take its answer."""
        begun = False
        try:
            read_frame(sock, 0, deadline)
            begun = True
            self._num_silent = 0
            with contextlib.suppress(ConnectionError):  # it ended before it read everything: its notice says why
                write_frame(sock, Status.DONE, function.encode(), deadline)
                write_frame(sock, Status.DONE, request, deadline)
            status, answer = read_frame(sock, self.limits.answer_bytes, deadline)
        except PeerGoneError:
            raise self._read_notice(notice) from None
        except TimeoutError:
            if begun:  # the kernel ends it about now
                raise LimitError("deadline", "takes longer than its deadline") from None
            self._note_silence()
            raise UnavailableError(f"the process for {self.name} did not begin with this call in time") from None
        match status:
            case Status.DONE:
                return answer
            case Status.OUT_OF_MEMORY:
                raise LimitError("memory_bytes", f"takes more than {self.limits.memory_bytes >> 20} MiB of memory")
            case Status.RAISED:
                raise FunctionError(answer.decode(errors="replace"))

    def _read_notice(self, notice: int) -> IsolationError | LostError:
        """How the job ended. A spawner that does not say is gone itself."""
        poll = select.poll()  # `select.select` takes no descriptor above 1,023
        poll.register(notice, select.POLLIN)
        number = os.read(notice, 1) if poll.poll(_NOTICE_SECONDS * 1e3) else b""
        return self.limits.explain(number[0]) if number else LostError()

    def _note_silence(self) -> None:
        """A spawner that lets call after call pass without beginning hangs, and is replaced."""
        self._num_silent += 1
        if self._num_silent >= _MOST_SILENT:
            logger.warning("the process for %s does not take calls and is replaced", self.name)
            self._keeper.end_process()
