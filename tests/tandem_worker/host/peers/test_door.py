from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tandem_api.keys import KeyRing
from tandem_worker.host.errors import AuthenticationError, ThreadStartError
from tandem_worker.host.peers.door import Door, _source_of
from tandem_worker.host.peers.handshake import GREETING_BYTES, Initiator, Purpose, Refusal
from tandem_worker.host.vitals import Vitals

from tests.tandem_worker.host.peers.conftest import Entrance, eventually, make_ring

Open = Callable[..., Entrance]


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ended(sock: socket.socket) -> bool:
    """Whether the other end has closed it."""
    sock.settimeout(60)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_has_the_key_gets_in_and_can_talk(open_door: Open) -> None:
    entrance = open_door()
    with entrance.dial() as peer:
        eventually(lambda: len(entrance.admitted) == 1)
        (inside,) = entrance.admitted
        assert not inside.getblocking()
        inside.setblocking(True)
        peer.sendall(b"hello")
        assert inside.recv(5) == b"hello"
        inside.sendall(b"welcome")
        assert peer.recv(7) == b"welcome"
    assert not any(entrance.door.refusals.values())


def test_what_follows_the_proof_at_once_is_not_lost(open_door: Open) -> None:
    """The peer's first words may be in the same packet."""
    entrance = open_door()
    with entrance.dial() as peer:
        peer.sendall(b"x" * 100_000)
        eventually(lambda: len(entrance.admitted) == 1)
        inside = entrance.admitted[0]
        inside.setblocking(True)
        received = 0
        while received < 100_000:
            received += len(inside.recv(1 << 16))


def test_without_the_key_nobody_gets_in(open_door: Open) -> None:
    entrance = open_door()
    for ring, purpose in ((make_ring("k1"), Purpose.KV), (make_ring("k9"), Purpose.KV), (entrance.ring, Purpose.GROUP)):
        with pytest.raises(AuthenticationError, match="does not accept our proof"):
            entrance.dial(ring, purpose)
    refusals = entrance.door.refusals
    assert (refusals[Refusal.WRONG_PROOF], refusals[Refusal.UNKNOWN_KEY]) == (2, 1)
    assert not entrance.admitted


def test_keys_rotate_under_an_open_door(open_door: Open) -> None:
    entrance = open_door()
    old, new = entrance.ring, make_ring("k2")
    entrance.ring = KeyRing(primary="k2", keys={**old.keys, **new.keys})
    for ring in (old, entrance.ring):
        entrance.dial(ring).close()
    entrance.ring = new
    with pytest.raises(AuthenticationError):
        entrance.dial(old)
    entrance.dial(new).close()


@pytest.mark.parametrize("words", [b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" * 9, b"\x16\x03\x01" * 99, bytes(500)])
def test_other_protocols_are_told_nothing(open_door: Open, words: bytes) -> None:
    entrance = open_door()
    with entrance.knock() as stranger:
        stranger.sendall(words)
        assert ended(stranger)
    assert entrance.door.refusals[Refusal.NOT_TANDEM] == 1


def test_a_wrong_proof_ends_without_a_word(open_door: Open) -> None:
    entrance = open_door()
    with entrance.knock() as stranger:
        stranger.sendall(Initiator(entrance.ring, Purpose.KV).greeting)
        assert len(stranger.recv(100)) == 32
        stranger.sendall(bytes(32))
        assert ended(stranger)


def test_who_dawdles_is_sent_away_whatever_it_drips(open_door: Open) -> None:
    entrance = open_door(seconds=0.4)
    with entrance.knock() as silent, entrance.knock() as dripping:
        greeting = Initiator(entrance.ring, Purpose.KV).greeting
        started = time.monotonic()
        for place in range(GREETING_BYTES):
            try:
                dripping.sendall(greeting[place : place + 1])
            except OSError:
                break
            time.sleep(0.05)
        assert ended(dripping)
        assert ended(silent)
        assert time.monotonic() - started < 56 * 0.05 + 60  # it never got to its challenge's end
    assert entrance.door.refusals[Refusal.TOO_SLOW] == 2


def test_a_crowd_pushes_out_who_waits_longest_and_peers_get_in(open_door: Open) -> None:
    entrance = open_door(max_waiting=16, seconds=60)
    crowd = [entrance.knock() for _ in range(16)]
    more = [entrance.knock() for _ in range(48)]
    assert all(ended(sock) for sock in crowd)
    entrance.dial().close()
    assert entrance.door.refusals[Refusal.TOO_MANY] >= 48
    for sock in (*crowd, *more):
        sock.close()


def test_one_address_pushes_out_itself_alone(open_door: Open) -> None:
    """Sound peers on slow ways stay, however many connections one stranger opens meanwhile."""
    entrance = open_door(max_waiting=16, seconds=60)
    ours = Initiator(entrance.ring, Purpose.KV)
    sound = [entrance.knock("127.0.0.2"), entrance.knock("127.0.0.3")]
    sound[0].sendall(ours.greeting)
    challenge = sound[0].recv(32)
    crowd = [entrance.knock("127.0.0.9") for _ in range(100)]
    assert all(ended(sock) for sock in crowd[:86])
    eventually(lambda: entrance.door.refusals[Refusal.TOO_MANY] == 86)
    late = entrance.knock("127.0.0.2")  # who comes now gets the stranger's place too
    assert ended(crowd[86])
    sound[0].sendall(ours.prove(challenge))
    ours.check(sound[0].recv(32))
    eventually(lambda: len(entrance.admitted) == 1)
    for sock in (sound[1], late):
        other = Initiator(entrance.ring, Purpose.KV)
        sock.sendall(other.greeting)
        sock.sendall(other.prove(sock.recv(32)))
        other.check(sock.recv(32))
    for sock in (*sound, *crowd, late):
        sock.close()


def test_who_is_inside_is_never_pushed_out(open_door: Open) -> None:
    entrance = open_door(max_waiting=16, seconds=60)
    peers = [entrance.dial() for _ in range(20)]
    eventually(lambda: len(entrance.admitted) == 20)
    crowd = [entrance.knock() for _ in range(64)]
    eventually(lambda: entrance.door.refusals[Refusal.TOO_MANY] == 48)
    for inside, peer in zip(entrance.admitted, peers, strict=True):
        inside.sendall(b"still here")
        assert peer.recv(10) == b"still here"
    for sock in (*peers, *crowd):
        sock.close()


@pytest.mark.parametrize(("host", "source"), [
    ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"),
])  # fmt: skip
def test_whose_share_a_connection_counts_to(host: str, source: str) -> None:
    assert _source_of(host) == source


def test_a_flood_costs_little_and_peers_get_in_meanwhile(open_door: Open) -> None:
    entrance = open_door()
    stop = threading.Event()

    def flood() -> None:
        while not stop.is_set():
            try:
                with entrance.knock() as sock:
                    sock.sendall(b"\x00" * 200)
            except OSError:
                continue

    before, threads, started = resident_bytes(), num_descriptors(), time.monotonic()
    flooders = [threading.Thread(target=flood) for _ in range(4)]
    for thread in flooders:
        thread.start()
    for _ in range(20):
        entrance.dial().close()
    assert time.monotonic() - started < 120
    stop.set()
    for thread in flooders:
        thread.join(60)
    for sock in entrance.admitted:
        sock.close()
    eventually(lambda: num_descriptors() <= threads + 2)
    assert resident_bytes() - before < 20 << 20
    assert entrance.door.refusals.total() > 20
    assert entrance.vitals.problems() == []


def test_idle_strangers_leave_no_descriptor_behind(open_door: Open) -> None:
    before = num_descriptors()
    entrance = open_door(seconds=0.2)
    strangers = [entrance.knock() for _ in range(50)]
    eventually(lambda: entrance.door.refusals[Refusal.TOO_SLOW] == 50)
    for sock in strangers:
        sock.close()
    entrance.door.close()
    eventually(lambda: num_descriptors() <= before)


def test_an_admission_that_fails_costs_one_connection(open_door: Open) -> None:
    seen: list[str] = []

    def admit(sock: socket.socket, name: str) -> None:
        seen.append(name)
        if len(seen) == 1:
            raise ThreadStartError("no thread")
        sock.close()

    entrance = open_door(admit=admit)
    with entrance.dial() as first:
        assert ended(first)
    with entrance.dial() as second:
        assert ended(second)
    assert len(seen) == 2
    assert entrance.vitals.problems() == []


def test_a_listener_that_is_closed_under_the_door_is_named(open_door: Open) -> None:
    entrance = open_door()
    entrance.listener.shutdown(socket.SHUT_RDWR)
    eventually(lambda: bool(entrance.vitals.problems()), 60)
    (problem,) = entrance.vitals.problems()
    assert problem.startswith("thread kv-door: it has ended: OSError")


def test_a_ring_that_raises_is_named(open_door: Open) -> None:
    def fail() -> KeyRing:
        raise ValueError("no ring")

    entrance = open_door(ring=fail)
    with entrance.knock():
        eventually(lambda: entrance.vitals.problems() == ["thread kv-door: it has ended: ValueError: no ring"], 60)


def test_a_door_whose_thread_cannot_start_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch, ring: KeyRing) -> None:
    before = num_descriptors()
    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, ring=lambda: ring, purpose=Purpose.KV, admit=lambda *_: None, vitals=Vitals())

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ThreadStartError):
            door.start()
    door.close()
    assert num_descriptors() <= before


def test_it_may_be_closed_from_its_own_thread_and_twice(open_door: Open) -> None:
    done = threading.Event()

    def admit(sock: socket.socket, name: str) -> None:
        sock.close()
        entrance.door.close()
        done.set()

    entrance = open_door(admit=admit)
    with entrance.dial() as peer:
        assert ended(peer)
    assert done.wait(30)
    eventually(lambda: entrance.listener.fileno() == -1)
    entrance.door.close()
    assert entrance.vitals.problems() == []


EXHAUSTED = """
import os, resource, secrets, socket, time
from tandem_api.keys import KeyRing
from tandem_worker.host.peers.door import Door, _source_of
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals

ring = KeyRing(primary="k", keys={"k": bytes(32)})
listener = socket.create_server(("127.0.0.1", 0))
vitals = Vitals()
gone = []

def admit(sock, name):
    sock.close()
    gone.append(name)

door = Door(listener, ring=lambda: ring, purpose=Purpose.KV, admit=admit, vitals=vitals)
door.start()
print(listener.getsockname()[1], flush=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def wait(wanted):
    deadline = time.monotonic() + 60
    while any("kv port" in problem for problem in vitals.problems()) is not wanted:
        assert time.monotonic() < deadline, vitals.problems()
        time.sleep(0.01)

input()
while not gone:
    time.sleep(0.01)
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
print("exhausted", flush=True)
input()
wait(True)
print([problem for problem in vitals.problems() if "kv port" in problem], flush=True)
before = time.process_time()
time.sleep(0.5)
assert time.process_time() - before < 0.25, "it spins"
for fd in held:
    os.close(fd)
wait(False)
print("recovered", door.refusals["too_many"] > 0, flush=True)
input()
"""


def test_without_descriptors_peers_are_turned_away_at_once_and_it_recovers() -> None:
    """Nobody needs to knock again for the problem to go."""
    with subprocess.Popen(
        [sys.executable, "-c", EXHAUSTED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go_on() -> str:
            process.stdin.write("\n")
            return process.stdout.readline()

        ring = KeyRing(primary="k", keys={"k": bytes(32)})
        port = int(process.stdout.readline())
        entrance = Entrance(None, port, None, None, ring)
        entrance.dial().close()
        assert go_on() == "exhausted\n"
        started = time.monotonic()
        with pytest.raises(ConnectionError):
            entrance.dial()
        assert time.monotonic() - started < 60
        assert "connections are turned away: Too many open files" in go_on()
        assert process.stdout.readline() == "recovered True\n"
        entrance.dial().close()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 0
