"""The worker's end of the helper process: calls with deadlines of their own.

A call that is late, and a helper that dies, end the helper and every call that waits for it; the memory that it shares
is mapped by nobody else then. Whoever wants to go on starts another one.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import orjson

from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.mooncake import find_mooncake_obstacle
from tandem_worker.tiers.errors import STORE_FAILED, STORE_FROZEN, STORE_MISSING, STORE_UNREACHABLE, TierError

logger = logging.getLogger(__name__)

START_SECONDS = 15.0
"""Loading the library and joining takes .4 s; where nobody answers it gives up after 4.3 s."""
_END_SECONDS = 5.0
"""For a helper that was killed."""
_PAGE = 4096
_LAST_WORDS = 3


@dataclass(eq=False)
class _Helper:
    process: subprocess.Popen[bytes]
    connection: Connection
    words: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_WORDS))
    """Last lines that it has written."""
    calls: dict[int, Future[Any]] = field(default_factory=dict)


class MooncakeClient:
    """`call` from any thread. `memory`, `[size]` uint8, is what `put` and `get` refer to by offset."""

    def __init__(self, address: str, size: int, environment: Mapping[str, str] | None = None) -> None:
        """`address`: host:port of the node's `mooncake_client`. `environment`: None has this process's."""
        self._address, self._size = address, -(-size // _PAGE) * _PAGE
        self._environment = dict(os.environ if environment is None else environment)
        self._descriptor = os.memfd_create("tandem-kv-store")
        os.ftruncate(self._descriptor, self._size)
        self.memory = np.frombuffer(mmap.mmap(self._descriptor, self._size), dtype=np.uint8)
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._next = 1

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return self._helper is not None

    @property
    def pid(self) -> int | None:
        """The helper's process; None while there is none."""
        helper = self._helper
        return None if helper is None else helper.process.pid

    def start(self, start_thread: Callable[[str, Callable[[], None]], object]) -> None:
        """Start a helper where there is none. `start_thread(name, target)`. Raises TierError."""
        if self._helper is not None:
            return
        here, there = multiprocessing.Pipe()
        command = [sys.executable, "-m", "tandem_worker.tiers.mooncake.helper"]
        command += [str(there.fileno()), str(self._descriptor), str(self._size), self._address]
        try:
            process = subprocess.Popen(
                command,
                env=self._environment,
                pass_fds=(there.fileno(), self._descriptor),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            here.close()
            raise TierError(STORE_FAILED, f"Mooncake's helper process cannot be started: {error}") from error
        finally:
            there.close()
        helper = _Helper(process, here)
        joined: Future[Any] = Future()
        helper.calls[0] = joined
        with self._lock:
            self._helper = helper
        try:
            start_thread("kv-store-words", lambda: _read_words(helper))
            start_thread("kv-store-answers", lambda: self._read_answers(helper))
        except ThreadStartError as error:
            failure = TierError(STORE_FAILED, f"Mooncake's helper process cannot be listened to: {error}")
            self._end(helper, failure)
            here.close()
            if process.stderr is not None:
                process.stderr.close()
            raise failure from error
        problem = self._wait(helper, joined, START_SECONDS, "joining")
        if problem:
            obstacle = find_mooncake_obstacle() if self._environment == dict(os.environ) else None
            error = TierError(STORE_MISSING, obstacle) if obstacle else TierError(STORE_UNREACHABLE, problem)
            self._end(helper, error)
            raise error

    def call(self, call: str, *arguments: Any, seconds: float) -> Sequence[int]:
        """One of the helper's calls. Raises TierError: it was late, or the helper is not there."""
        answer: Future[Any] = Future()
        with self._lock:
            helper = self._helper
            if helper is None:
                raise TierError(STORE_UNREACHABLE, "Mooncake's helper process has ended")
            number, self._next = self._next, self._next + 1
            helper.calls[number] = answer
            with contextlib.suppress(OSError):  # it has died, which `_read_answers` tells everybody
                helper.connection.send_bytes(orjson.dumps([number, call, *arguments]))
        return self._wait(helper, answer, seconds, call)

    def close(self) -> None:
        """End the helper, and all calls. Another one may be started."""
        helper = self._helper
        if helper is not None:
            self._end(helper, TierError(STORE_UNREACHABLE, "it is started again"))

    def _wait(self, helper: _Helper, answer: Future[Any], seconds: float, what: str) -> Any:
        try:
            return answer.result(seconds)
        except FutureTimeout:
            error = TierError(STORE_FROZEN, f"{what} has not returned for {seconds:g} s; the helper was ended")
            self._end(helper, error)
            raise error from None

    def _read_answers(self, helper: _Helper) -> None:
        """A thread's work for as long as this helper lives."""
        try:
            while True:
                number, answer = orjson.loads(helper.connection.recv_bytes())
                with self._lock:
                    waiting = helper.calls.pop(number, None)
                if waiting is not None:
                    waiting.set_result(answer)
        except (EOFError, OSError):
            pass
        with contextlib.suppress(subprocess.TimeoutExpired):  # its last words are still to come
            helper.process.wait(1.0)
        words = f": {' | '.join(helper.words)}" if helper.words else ""
        self._end(helper, TierError(STORE_FAILED, f"Mooncake's helper process has ended ({_explain(helper)}){words}"))
        helper.connection.close()

    def _end(self, helper: _Helper, error: TierError) -> None:
        """When this returns nothing of this helper writes to the memory any more."""
        helper.process.kill()
        deadline = time.monotonic() + _END_SECONDS
        with self._lock:
            calls, helper.calls = helper.calls, {}
            if self._helper is helper:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it runs no more, however long the kernel takes
                    helper.process.wait(max(0.0, deadline - time.monotonic()))
                self._helper = None
        for call in calls.values():
            if not call.done():
                call.set_exception(TierError(error.reason, str(error)))


def _explain(helper: _Helper) -> str:
    code = helper.process.poll()
    return "closed its connection" if code is None else f"signal {-code}" if code < 0 else f"exit status {code}"


def _read_words(helper: _Helper) -> None:
    """The library writes a line for every missing key: the last ones are kept for who asks why."""
    stream = helper.process.stderr
    assert stream is not None, "it was started with a pipe"
    with stream:
        for line in stream:
            helper.words.append(line.decode(errors="replace").strip()[:200])
