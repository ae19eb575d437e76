from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep

import pytest
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.vitals import Vitals


def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = monotonic() + seconds
    while not condition():
        assert monotonic() < deadline
        sleep(0.005)


def test_problems_come_and_go() -> None:
    vitals = Vitals()
    assert vitals.problems() == []
    vitals.set("b", "is slow")
    vitals.set("a", "is gone")
    vitals.set("a", "is gone for good")
    assert vitals.problems() == ["a: is gone for good", "b: is slow"]
    vitals.clear("a")
    vitals.clear("a")
    assert vitals.problems() == ["b: is slow"]


@pytest.mark.parametrize("error", [RuntimeError("no more"), SystemExit(3), KeyboardInterrupt("stop")])
def test_a_thread_that_fails_is_named(error: BaseException) -> None:
    vitals = Vitals()

    def fail() -> None:
        raise error

    vitals.start_thread("accept", fail, is_over=lambda: False).join(30)
    assert vitals.problems() == [f"thread accept: it has ended: {type(error).__name__}: {error}"]


def test_a_thread_that_returns_too_early_is_named() -> None:
    vitals, over = Vitals(), threading.Event()
    vitals.start_thread("a", lambda: None, is_over=over.is_set).join(30)
    over.set()
    vitals.start_thread("b", lambda: None, is_over=over.is_set).join(30)
    vitals.start_thread("c", lambda: None).join(30)
    assert vitals.problems() == ["thread a: it has ended: it returned"]


def test_what_failed_once_is_told_for_a_while_or_until_it_works() -> None:
    now = [0.0]
    vitals = Vitals(lambda: now[0])
    vitals.note("KV links", "nobody can be reached")
    now[0] = 14.0
    assert vitals.problems() == ["KV links: nobody can be reached"]
    now[0] = 16.0
    assert vitals.problems() == []
    vitals.note("KV links", "nobody can be reached")
    vitals.clear("KV links")
    assert vitals.problems() == []


def test_a_thread_that_cannot_be_started_is_told_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    vitals = Vitals(lambda: now)
    ran = threading.Event()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadStartError, match="thread link cannot be started: can't start new thread"):
            vitals.start_thread("link", ran.set)
        assert vitals.problems() == ["threads: no thread can be started: can't start new thread"]
    assert vitals.problems() == ["threads: thread link cannot be started: can't start new thread"]
    now += 20
    assert vitals.problems() == []
    assert not ran.is_set()


def test_a_thread_that_can_be_started_again_is_the_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    vitals = Vitals()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadStartError):
            vitals.start_thread("link", int)
    vitals.start_thread("link", int).join(30)
    assert vitals.problems() == []


EXHAUSTED = """
import os, resource
from tandem_worker.host.vitals import Vitals
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
vitals, held = Vitals(), []
assert vitals.problems() == []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print(vitals.problems())
os.close(held.pop())
print(vitals.problems())
"""


def test_a_process_without_descriptors_says_so_and_recovers() -> None:
    found = subprocess.run([sys.executable, "-c", EXHAUSTED], capture_output=True, text=True, timeout=50, check=True)
    assert found.stdout.splitlines() == [
        "['descriptors: no file can be opened (Too many open files); the limit of this process is 64']",
        "[]",
    ]


WITHOUT_THREADS = """
import os, resource, threading
from tandem_worker.host.vitals import Vitals
os.setuid(65533)
vitals = Vitals()
assert vitals.problems() == []
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
print(vitals.problems())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only another user's limit on processes counts nobody else's")
def test_a_process_without_threads_says_so() -> None:
    assert resource.getrlimit(resource.RLIMIT_NPROC)
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, timeout=50, check=True
    )
    assert found.stdout == '["threads: no thread can be started: can\'t start new thread"]\n'
