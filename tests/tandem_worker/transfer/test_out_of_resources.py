"""Where the system gives no thread or descriptor: told at once, undone, counted, and over when there are some again."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.vitals import Vitals


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Threads whose names begin with one of these cannot be started."""
    refused: set[str] = set()
    honest = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(tuple(refused)):
            raise RuntimeError("can't start new thread")
        honest(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    return refused


def problems_of_transport(vitals: Vitals) -> list[str]:
    """Without the threads that could not be started, which are told for a while by themselves."""
    return [problem for problem in vitals.problems() if problem.startswith("KV ")]


def test_a_link_without_a_thread_falls_back_at_once(kit: SimpleNamespace, no_threads: set[str]) -> None:
    vitals = Vitals()
    pair = kit.Pair(vitals=vitals)
    try:
        endpoint = pair.serve()
        no_threads.add("kv-link")
        descriptors = count_descriptors()
        pair.client.start(pair.order(endpoint, "127.0.0.1:1"))
        assert len(pair.decode.failed) == 1, "before `start` returned"
        assert "can't start new thread" in pair.decode.failed[0][2]
        (problem,) = problems_of_transport(vitals)
        assert problem.startswith("KV links: no connection to a prefill worker can be made: thread kv-link-127.0.0.1:1")
        receiver = pair.client._receiver
        assert not pair.client._orders and not pair.client._by_transfer  # noqa: PT018
        assert not receiver._by_attempt and not receiver._links  # noqa: PT018
        assert count_descriptors() == descriptors
        no_threads.clear()
        pair.client.start(pair.order(endpoint))
        kit.eventually(lambda: bool(pair.decode.done))
        assert problems_of_transport(vitals) == []
    finally:
        pair.close()


def test_a_session_without_a_thread_turns_its_peer_away(kit: SimpleNamespace, no_threads: set[str]) -> None:
    vitals = Vitals()
    pair = kit.Pair()
    try:
        endpoint = pair.serve({"vitals": vitals})
        no_threads.add("kv-session")
        pair.client.start(pair.order(endpoint))
        kit.eventually(lambda: bool(pair.decode.failed))
        kit.eventually(
            lambda: ["peers are turned away" in problem for problem in problems_of_transport(vitals)] == [True]
        )
        assert pair.server.stats().connections == 0
        assert not pair.server._sessions
        assert pair.prefill.orders == {}
        no_threads.clear()
        time.sleep(kit.QUICK.retry_after)
        pair.client.start(pair.order(endpoint))
        kit.eventually(lambda: bool(pair.decode.done))
        assert problems_of_transport(vitals) == []
    finally:
        pair.close()


def test_a_server_whose_door_has_no_thread_does_not_start(kit: SimpleNamespace, no_threads: set[str]) -> None:
    pair = kit.Pair()
    no_threads.add("kv-door")
    descriptors = count_descriptors()
    try:
        with pytest.raises(ThreadStartError):
            pair.serve()
        assert count_descriptors() == descriptors
        pair.server = None
    finally:
        pair.close()


def test_a_link_without_a_waker_falls_back_at_once(
    pair: Any, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = pair.serve()

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd", refuse)
        pair.client.start(pair.order(endpoint))
        assert len(pair.decode.failed) == 1
        assert "Too many open files" in pair.decode.failed[0][2]
    pair.client.start(pair.order(endpoint))
    kit.eventually(lambda: bool(pair.decode.done))


@pytest.mark.parametrize("spare", range(6))
def test_out_of_descriptors_and_back(pair: Any, kit: SimpleNamespace, spare: int) -> None:
    """Really out of them, but for a few: whichever end lacks one, nobody waits for a timeout."""
    endpoint = pair.serve()
    with all_but(spare):
        pair.client.start(pair.order(endpoint))
        kit.eventually(lambda: bool(pair.decode.done or pair.decode.failed))
    assert pair.decode.failed or spare > 2
    time.sleep(0.3)  # the door's pause
    pair.client.start(pair.order(endpoint, generation=2))
    kit.eventually(lambda: any(result.generation == 2 for result in pair.decode.done))


@contextlib.contextmanager
def all_but(spare: int) -> Iterator[None]:
    """Every descriptor but `spare` is taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest_descriptor() + 20, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(spare):
            os.close(taken.pop())
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def highest_descriptor() -> int:
    return max(int(name) for name in os.listdir("/proc/self/fd"))
