"""What `/healthz` says of this process: problems that are there now, and threads that must not have ended.

Whatever runs on a thread of its own is started here, so that a thread that dies, or cannot be started, is told.
"""

from __future__ import annotations

import logging
import os
import resource
import threading
import time
from collections.abc import Callable
from typing import Any

from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.nvml import NO_GPU, GpuSample

logger = logging.getLogger(__name__)

_REMEMBER_SECONDS = 15.0
"""What failed once is told this long: long enough to be seen, too short for liveness to act on it."""


class Vitals:
    """Any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}
        self._noted: dict[str, tuple[float, str]] = {}
        """When it happened, and what, by source."""
        self.read_gpu: Callable[[], GpuSample] = lambda: NO_GPU
        """What this process's GPU tells."""

    def problems(self) -> list[str]:
        """Sentences; empty while all is well. Asks the system for a descriptor and a thread, to see if it has any."""
        found = {**_observe_descriptors(), **_observe_threads()}
        with self._lock:
            found |= self._problems
            for source, (since, problem) in list(self._noted.items()):
                if self._clock() < since + _REMEMBER_SECONDS:
                    found.setdefault(source, problem)
                else:
                    del self._noted[source]
        return [f"{source}: {problem}" for source, problem in sorted(found.items())]

    def set(self, source: str, problem: str) -> None:
        """`source` has this problem until `clear`."""
        with self._lock:
            known = self._problems.get(source)
            self._problems[source] = problem
        if known != problem:
            logger.error("%s: %s", source, problem)

    def note(self, source: str, problem: str) -> None:
        """This failed just now, and may never be tried again: it is told for a while, or until `clear`."""
        logger.error("%s: %s", source, problem)
        with self._lock:
            self._noted[source] = self._clock(), problem

    def clear(self, source: str) -> None:
        """What `source` reported has passed."""
        with self._lock:
            known = self._problems.pop(source, None), self._noted.pop(source, None)
        if any(known):
            logger.info("%s: recovered", source)

    def start_thread(
        self, name: str, target: Callable[..., Any], *arguments: Any, is_over: Callable[[], bool] | None = None
    ) -> threading.Thread:
        """Run `target(*arguments)` on a daemon thread.

        `is_over` says whether the thread may end by now; with it, a thread that ends before is a problem for good.
        Without it the thread may end whenever it likes. An exception is logged either way.

        Raises:
            ThreadStartError: the system has no more threads; nothing runs. `problems` tells it for a while.
        """

        def run() -> None:
            cause = "it returned"
            try:
                target(*arguments)
            except BaseException as error:
                logger.exception("thread %s failed", name)
                cause = f"{type(error).__name__}: {error}"
            if is_over is not None and not is_over():
                self.set(f"thread {name}", f"it has ended: {cause}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            problem = f"thread {name} cannot be started: {error}"
            logger.exception("%s", problem)
            with self._lock:
                self._noted["threads"] = self._clock(), problem
            raise ThreadStartError(problem) from error
        self.clear("threads")
        return thread


def _observe_descriptors() -> dict[str, str]:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return {"descriptors": f"no file can be opened ({error.strerror}); the limit of this process is {limit}"}
    return {}


def _observe_threads() -> dict[str, str]:
    thread = threading.Thread(target=int, name="probe", daemon=True)
    try:
        thread.start()
    except (RuntimeError, MemoryError) as error:
        return {"threads": f"no thread can be started: {error}"}
    return {}
