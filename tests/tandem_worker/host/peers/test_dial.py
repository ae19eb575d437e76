from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.keys import KeyRing
from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.dial import dial, resolve
from tandem_worker.host.peers.handshake import ACCEPTANCE_BYTES, CHALLENGE_BYTES, Purpose

from tests.tandem_worker.host.peers.conftest import Entrance


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def call(listener: socket.socket, ring: KeyRing, seconds: float = 0.4) -> socket.socket:
    return dial("127.0.0.1", listener.getsockname()[1], ring, Purpose.KV, seconds=seconds)


def test_names_are_resolved(open_door: Callable[..., Entrance], ring: KeyRing) -> None:
    entrance = open_door()
    with dial("localhost", entrance.port, ring, Purpose.KV, seconds=60) as peer:
        assert peer.gettimeout() is None


def test_nobody_listens(ring: KeyRing) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(ConnectionRefusedError):
            dial("127.0.0.1", unused.getsockname()[1], ring, Purpose.KV, seconds=60)


def test_whoever_listens_and_says_nothing_costs_the_given_time(listener: socket.socket, ring: KeyRing) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        call(listener, ring)
    assert 0.3 < time.monotonic() - started < 60


def test_whoever_drips_costs_the_given_time(listener: socket.socket, ring: KeyRing) -> None:
    """A deadline for the handshake, not for each byte."""

    dripped: list[int] = []

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            for _ in range(CHALLENGE_BYTES - 1):
                connection.sendall(b"x")
                time.sleep(0.25)
                dripped.append(1)

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(TimeoutError):
        call(listener, ring)
    assert len(dripped) < CHALLENGE_BYTES - 1, "it was given up before all had come"
    dripping.join(60)


@pytest.mark.parametrize(("acceptance", "words"), [
    (bytes(ACCEPTANCE_BYTES), "does not prove key 'k1'"), (b"", "does not accept our proof of key 'k1'"),
])  # fmt: skip
def test_who_does_not_have_the_key_is_not_believed(
    listener: socket.socket, ring: KeyRing, acceptance: bytes, words: str
) -> None:
    def pretend() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(bytes(CHALLENGE_BYTES))
            connection.recv(1000)
            connection.sendall(acceptance)

    pretender = threading.Thread(target=pretend)
    pretender.start()
    with pytest.raises(AuthenticationError, match=words):
        call(listener, ring, seconds=10)
    pretender.join(60)


def test_a_name_with_a_silent_address_reaches_the_next(
    open_door: Callable[..., Entrance], ring: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrance = open_door()
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    crowd = [socket.socket() for _ in range(4)]  # its backlog is full: a further connection waits
    for sock in crowd:
        sock.setblocking(False)
        sock.connect_ex(full.getsockname())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)
             for address in (full.getsockname(), ("127.0.0.1", entrance.port))]  # fmt: skip
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    dial("two-addresses", 1, ring, Purpose.KV, seconds=4).close()
    for sock in (full, *crowd):
        sock.close()


@given(st.text(min_size=1) | st.from_regex(r"[A-Za-z0-9_.\-\[\]:]{1,300}", fullmatch=True), st.integers(-1, 99999))
@settings(deadline=None, max_examples=200)
def test_whatever_is_named_ends_in_addresses_or_an_os_error(host: str, port: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        known = socket.getaddrinfo

        def without_network(name: str, *arguments: object, flags: int = 0, **options: object) -> list[object]:
            return known(name, *arguments, flags=flags | socket.AI_NUMERICHOST, **options)

        patch.setattr(socket, "getaddrinfo", without_network)
        try:
            found = resolve(host, port, 5.0)
        except OSError:
            return
        assert all(entry[4][1] == port for entry in found)


def test_a_resolver_that_hangs_costs_the_given_time_and_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    hanging, known = threading.Event(), socket.getaddrinfo

    def hang(host: str, *arguments: object, **options: object) -> list[object]:
        if not options.get("flags"):
            assert hanging.wait(60)
        return known(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    before = threading.active_count()
    failures: list[float] = []

    def ask() -> None:
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="was not resolved"):
            resolve("prefill-0.svc", 7000, 0.5)
        failures.append(time.monotonic() - started)

    askers = [threading.Thread(target=ask) for _ in range(20)]
    for thread in askers:
        thread.start()
    for thread in askers:
        thread.join(60)
    assert len(failures) == 20
    assert max(failures) < 5
    assert threading.active_count() - before <= 8
    assert resolve("127.0.0.1", 7000, 0.5)  # addresses need no resolver
    hanging.set()
    deadline = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert resolve("localhost", 7000, 10.0)


def test_no_thread_for_the_resolver_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(20):  # nothing is used up
            with pytest.raises(OSError, match="localhost cannot be resolved: can't start"):
                resolve("localhost", 7000, 0.5)
    assert resolve("localhost", 7000, 10.0)
