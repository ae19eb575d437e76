"""Calls functions in processes of their own, so that no call outlives its limits.

    confined = Confined("package.module:setup", payload, limits=Limits(...), name="grammars")
    confined.start()                                   # returns at once; a thread starts the process and keeps it alive
    answer = await confined.call("compile", request, seconds=1.0)

`setup(payload)` runs once in a process that is started from nothing (no descriptors, no threads, no torch, no secrets
of this one) and returns functions from bytes to bytes by name. Calls are served by jobs that are forked from it, one
call of each at a time; a function named `warm`, if there is one, runs in every job before its first call. A job that
outlives its limits is ended by the kernel, and one whose call failed is not used again; what it took is free at once,
and neither this process nor the other jobs notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import orjson

from tandem_worker.host.isolation.contract import (
    AnswerStatus,
    FunctionError,
    IsolationError,
    LimitError,
    Limits,
    PeerGoneError,
    QueueFullError,
    UnavailableError,
    read_frame,
    write_frame,
)
from tandem_worker.host.isolation.jobs import Job, JobStock, explain_end
from tandem_worker.host.isolation.keeper import Keeper, LostError
from tandem_worker.host.isolation.spawner import SECONDS

logger = logging.getLogger(__name__)

_MOST_CALLS = 100
"""A job serves at most as many: whatever it may have kept of them ends with it."""
_MOST_SILENT = 3
"""Calls in a row that may pass their deadline before a job begins with them."""


@dataclass(slots=True)
class CallCounts:
    """Since the start."""

    calls: int = 0
    limited: int = 0
    unavailable: int = 0
    seconds: float = 0.0
    """Spent in calls, waiting included."""


class _GivenUpError(IsolationError):
    """Nobody waits for the answer any more."""


class _Call:
    """One that its caller may give up while it waits for a job, or while the job computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self.given_up = False
        self.left = False
        """It is not counted as pending any more."""

    def begin(self, sock: socket.socket) -> None:
        with self._lock:
            if self.given_up:
                raise _GivenUpError
            self._sock = sock

    def end(self) -> None:
        with self._lock:
            self._sock = None
            if self.given_up:
                raise _GivenUpError

    def give_up(self) -> None:
        with self._lock:
            self.given_up = True
            if self._sock is not None:
                with contextlib.suppress(OSError):  # the job has ended by itself
                    self._sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads


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
        niceness: int = 0,
    ) -> None:
        """`parallel` jobs run at a time, `queue` more may wait; `name` is for logs and messages."""
        self.name = name
        self.limits = limits
        self.counts = CallCounts()
        order = orjson.dumps({"setup": setup, "limits": dataclasses.asdict(limits), "niceness": niceness})
        self._keeper = Keeper(name, order, payload)
        self._most_pending = parallel + queue
        self._num_pending = 0
        self._num_silent = 0
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(parallel)
        self._threads = ThreadPoolExecutor(parallel + queue, thread_name_prefix=name)
        self._stock = JobStock(self._keeper, parallel, self._threads)

    def start(self) -> None:
        """Start the process and prepare jobs for the first calls. Returns at once."""
        self._keeper.start()
        self._stock.refill()

    def close(self) -> None:
        """End the processes. Jobs under way fail, and those that wait for a turn are cancelled."""
        self._keeper.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._stock.drop()

    def wait_until_ready(self, seconds: float) -> None:
        """Raises UnavailableError: at once when the process cannot be started."""
        self._keeper.wait_until_ready(time.monotonic() + seconds)

    @property
    def process_id(self) -> int | None:
        """Process id of the process that jobs are forked from; None while there is none that takes calls."""
        return self._keeper.process_id

    @property
    def num_restarts(self) -> int:
        """How often the spawner was started again after it had ended."""
        return self._keeper.num_restarts

    async def call(self, function: str, request: bytes, *, seconds: float) -> bytes:
        """The answer within `seconds`, waiting included. Its job ends when this is cancelled. Raises IsolationError."""
        began, call = self._enter(), _Call()
        try:
            future = self._threads.submit(self._call, function, request, began + seconds, call)
        except RuntimeError as error:  # closed in the meantime
            self._leave(began, call)
            raise UnavailableError(f"the process for {self.name} has been closed") from error
        future.add_done_callback(lambda _: self._leave(began, call))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            call.give_up()
            self._leave(began, call)  # it makes room now, and not when its thread has noticed
            raise

    def call_here(self, function: str, request: bytes, *, seconds: float) -> bytes:
        """As `call`, on the calling thread."""
        began, call = self._enter(), _Call()
        try:
            return self._call(function, request, began + seconds, call)
        finally:
            self._leave(began, call)

    def _enter(self) -> float:
        if self._keeper.closed:
            raise UnavailableError(f"the process for {self.name} has been closed")
        with self._lock:
            if self._num_pending >= self._most_pending:
                raise QueueFullError(f"{self._most_pending} calls for {self.name} are waiting already")
            self._num_pending += 1
            self.counts.calls += 1
        return time.monotonic()

    def _leave(self, began: float, call: _Call) -> None:
        with self._lock:
            if call.left:
                return
            call.left = True
            self._num_pending -= 1
            self.counts.seconds += time.monotonic() - began

    def _call(self, function: str, request: bytes, deadline: float, call: _Call) -> bytes:
        if not self._free.acquire(timeout=max(0.0, deadline - time.monotonic())):
            with self._lock:
                self.counts.unavailable += 1
            raise UnavailableError(f"no process for {self.name} was free in time")
        try:
            return self._call_counted(function, request, deadline, call)
        finally:
            self._free.release()

    def _call_counted(self, function: str, request: bytes, deadline: float, call: _Call) -> bytes:
        try:
            try:
                return self._run_job(function, request, deadline, call)
            except LostError:
                logger.warning("the process for %s died under a call, which is tried again", self.name)
                self._stock.drop()
                return self._run_job(function, request, deadline, call)
        except LostError as error:
            self.counts.unavailable += 1
            raise UnavailableError(f"the process for {self.name} died twice under this call") from error
        except UnavailableError:
            self.counts.unavailable += 1
            raise
        except LimitError:
            self.counts.limited += 1
            raise

    def _run_job(self, function: str, request: bytes, deadline: float, call: _Call) -> bytes:
        if call.given_up:
            raise _GivenUpError
        job = self._stock.take(deadline)
        try:
            call.begin(job.sock)
            try:
                answer = self._talk(job, function, request, deadline, call)
            finally:
                call.end()
        except BaseException as error:
            job.close()
            self._stock.refill()
            if call.given_up:
                raise _GivenUpError from error
            raise
        job.num_calls += 1
        if job.num_calls < _MOST_CALLS:
            self._stock.put(job)
        else:
            job.close()
            self._stock.refill()
        return answer

    def _talk(self, job: Job, function: str, request: bytes, deadline: float, call: _Call) -> bytes:
        """Hand a job its request and take its answer."""
        sock = job.sock
        try:
            if not job.begun:
                read_frame(sock, 0, deadline)
                job.begun = True
                self._num_silent = 0
            with contextlib.suppress(ConnectionError):  # it ended before it read everything: its notice says why
                head = SECONDS.pack(deadline - time.monotonic()) + function.encode()
                write_frame(sock, AnswerStatus.DONE, head, deadline)
                write_frame(sock, AnswerStatus.DONE, request, deadline)
            status, answer = read_frame(sock, self.limits.answer_bytes, deadline)
        except PeerGoneError:
            if call.given_up:
                raise _GivenUpError from None
            raise explain_end(job, self.limits) from None
        except TimeoutError:
            if job.begun:  # the kernel ends it about now
                raise LimitError("deadline", "takes longer than its deadline") from None
            self._note_silence()
            raise UnavailableError(f"the process for {self.name} did not begin with this call in time") from None
        match status:
            case AnswerStatus.DONE:
                return answer
            case AnswerStatus.OUT_OF_MEMORY:
                raise LimitError("memory_bytes", f"takes more than {self.limits.memory_bytes >> 20} MiB of memory")
            case AnswerStatus.RAISED:
                raise FunctionError(answer.decode(errors="replace"))

    def _note_silence(self) -> None:
        """A spawner that lets call after call pass without beginning hangs, and is replaced."""
        self._num_silent += 1
        if self._num_silent >= _MOST_SILENT:
            logger.warning("the process for %s does not take calls and is replaced", self.name)
            self._keeper.end_process()
