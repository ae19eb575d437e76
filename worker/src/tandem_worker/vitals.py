"""What `/healthz` says of this process: problems that are there now, and threads that must not have ended.

Whatever runs on a thread of its own is started here, so that a thread that dies, or cannot be started, is told.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tandem_worker.errors import ThreadStartError

logger = logging.getLogger(__name__)


class Vitals:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._problems: dict[str, str] = {}

    def problems(self) -> list[str]:
        """Sentences; empty while all is well."""
        with self._lock:
            return [f"{source}: {problem}" for source, problem in sorted(self._problems.items())]

    def set(self, source: str, problem: str) -> None:
        """`source` has this problem until `clear`."""
        with self._lock:
            known = self._problems.get(source)
            self._problems[source] = problem
        if known != problem:
            logger.error("%s: %s", source, problem)

    def clear(self, source: str) -> None:
        with self._lock:
            known = self._problems.pop(source, None)
        if known is not None:
            logger.info("%s: recovered", source)

    def start_thread(
        self, name: str, target: Callable[..., Any], *arguments: Any, is_over: Callable[[], bool] | None = None
    ) -> threading.Thread:
        """Run `target(*arguments)` on a daemon thread.

        `is_over` says whether the thread may end by now; with it, a thread that ends before is a problem for good.
        Without it the thread may end whenever it likes. An exception is logged either way.

        Raises:
            ThreadStartError: the system has no more threads; nothing runs.
        """

        def run() -> None:
            cause = "it returned"
            try:
                target(*arguments)
            except Exception as error:
                logger.exception("thread %s failed", name)
                cause = f"{type(error).__name__}: {error}"
            if is_over is not None and not is_over():
                self.set(f"thread {name}", f"it has ended: {cause}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise ThreadStartError(f"thread {name} cannot be started: {error}") from error
        return thread
