"""Keeps one spawner alive: starts it, starts it again whenever it ends, and says why there is none."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time

from tandem_worker.host.isolation.contract import (
    AnswerStatus,
    IsolationError,
    PeerGoneError,
    UnavailableError,
    read_frame,
    write_frame,
)

logger = logging.getLogger(__name__)

START_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 30.0
MOST_SETUPS = 5
"""Setups in a row that may fail by themselves: what they are given is to blame, and it stays the same."""
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ")
"""The process gets these variables alone: it must not see tokens and keys."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Jobs are forked, and a fork takes one thread along. Libraries read this when they are imported, which may be long
before a setup runs."""


class LostError(Exception):
    """The spawner is gone, and with it the job: the input need not be to blame."""


class _SetupError(IsolationError):
    """The setup raised, or ended its process; nothing else did."""


class Keeper:
    """`order` and `payload` are what the spawner is told at its start. All methods may be called from any thread."""

    def __init__(self, name: str, order: bytes, payload: bytes) -> None:
        self.name = name
        self.num_restarts = 0
        self._order = order
        self._payload = payload
        self._changed = threading.Condition(threading.RLock())
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        """Why there is no process, since the last try to start one."""
        self._closed = False
        self._thread = threading.Thread(target=self._keep, name=f"{name}-keeper", daemon=True)

    def start(self) -> None:
        """Start the thread that starts the process, and starts it again whenever it has ended."""
        self._thread.start()

    def close(self) -> None:
        """End the process and start none again. Waits up to 2 seconds for the thread that keeps it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.end_process()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    @property
    def closed(self) -> bool:
        """Whether `close` was called: no process will be started any more."""
        return self._closed

    @property
    def process_id(self) -> int | None:
        """None while there is none that takes orders."""
        with self._changed:
            return self._process.pid if self._process is not None and self._control is not None else None

    def send(self, descriptors: list[int]) -> None:
        """Raises LostError when nobody has taken it; `wait_until_ready` then waits for the next process."""
        with self._changed:
            if self._control is None:
                raise LostError
            try:
                socket.send_fds(self._control, [b"\0"], descriptors, socket.MSG_DONTWAIT)
            except OSError as error:
                self._control = None
                self.end_process()  # one that lives but has stopped reading is of no use either
                raise LostError from error

    def wait_until_ready(self, deadline: float) -> None:
        """Raises UnavailableError: at once when the last try to start it failed, else at the deadline."""
        with self._changed:
            while self._control is None:
                if self._failure is not None:
                    raise UnavailableError(f"the process for {self.name} cannot be started: {self._failure}")
                if self._closed:
                    raise UnavailableError(f"the process for {self.name} has been closed")
                if not self._changed.wait(deadline - time.monotonic()):
                    raise UnavailableError(f"the process for {self.name} is still starting")

    def end_process(self) -> None:
        """The keeper's thread waits for its end and closes what belongs to it."""
        with self._changed:
            if self._process is not None and self._process.returncode is None:
                self._process.kill()

    # -- on the keeper's thread ----------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Pauses between tries that fail grow."""
        pause, num_setups = _FIRST_PAUSE_SECONDS, 0
        while not self._closed:
            try:
                control, process = self._launch()
            except (OSError, IsolationError) as error:
                num_setups = num_setups + 1 if isinstance(error, _SetupError) else 0
                if num_setups == MOST_SETUPS:
                    self._note_failure(f"{error} (given up after {num_setups} tries)", 0.0)
                    return
                self._note_failure(str(error), pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            pause, num_setups = _FIRST_PAUSE_SECONDS, 0
            with self._changed:
                self._control, self._failure = control, None
                self._changed.notify_all()
            if self._closed:
                process.kill()
            code = process.wait()
            with self._changed:
                self._control = None
                control.close()
            if not self._closed:
                self.num_restarts += 1
                logger.warning("the process for %s ended with %d and is started again", self.name, code)

    def _note_failure(self, failure: str, pause: float) -> None:
        if self._closed:
            return
        logger.error("the process for %s cannot be started: %s", self.name, failure)
        with self._changed:
            self._failure = failure
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed, pause)

    def _launch(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Raises OSError, IsolationError."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start, their_start = socket.socketpair()
        try:
            with theirs, their_start:
                process = _spawn(theirs.fileno(), their_start.fileno())
        except BaseException:
            control.close()
            start.close()
            raise
        with self._changed:
            self._process = process
        try:
            with start:
                self._prepare(start)
        except BaseException as error:
            control.close()
            process.kill()
            code = process.wait()
            if isinstance(error, PeerGoneError | ConnectionError):
                # Others kill, as the system does that runs out of memory; the next try may find it otherwise.
                kind = UnavailableError if code == -signal.SIGKILL else _SetupError
                raise kind(f"it ended with {code} while it was prepared") from error
            raise
        return control, process

    def _prepare(self, start: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        write_frame(start, AnswerStatus.DONE, self._order, deadline)
        write_frame(start, AnswerStatus.DONE, self._payload, deadline)
        try:
            status, answer = read_frame(start, 1 << 16, deadline)
        except TimeoutError as error:
            raise UnavailableError(f"it was not ready after {START_SECONDS:g} s") from error
        if status is not AnswerStatus.DONE:
            raise _SetupError(answer.decode(errors="replace"))


def _spawn(*descriptors: int) -> subprocess.Popen[bytes]:
    """From nothing, and not as a copy of this process: it has threads, torch, open connections."""
    return subprocess.Popen(
        [sys.executable, "-m", "tandem_worker.host.isolation.spawner", *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
        env={key: os.environ[key] for key in _ENVIRONMENT if key in os.environ} | _ONE_THREAD,
    )
