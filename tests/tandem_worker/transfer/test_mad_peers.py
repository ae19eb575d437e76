"""Strangers, and peers that have the key and lost their mind: what they may make a worker keep, and for how long."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_api.keys import KeyRing
from tandem_worker.transfer import protocol
from tandem_worker.transfer.errors import QuotaError
from tandem_worker.transfer.prefill.quotas import FIRST_FRAMES, NAMES_PER_HOST, URGENT_SECONDS, Bucket, Ledger, Quotas
from tandem_worker.transfer.protocol import BlockRange, FrameKind

from tests.tandem_worker.transfer.scripted import ScriptedPeer, enter, read_exact, read_frame, read_order, stranger

SOME = Quotas(
    sessions=12, sessions_per_host=6, sessions_per_worker=4, orders=6, orders_per_session=4, tokens=200,
    tokens_per_session=150, fair_tokens=60, attachments=6, attachments_per_session=4,
)  # fmt: skip


def ring() -> KeyRing:
    return KeyRing(primary="a", keys={"a": secrets.token_bytes(32)})


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_dropped(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(65536):
            pass
    return True


def greet(sock: socket.socket, pair: Any) -> socket.socket:
    sock.sendall(protocol.encode_hello(pair.identity))
    assert read_frame(sock)[0].kind is FrameKind.HELLO
    return sock


@pytest.fixture
def guarded(kit: SimpleNamespace) -> Iterator[Callable[..., Any]]:
    """A pair whose prefill worker has the small quotas above, and whose engine answers when the test says so."""
    pairs: list[Any] = []

    def build(auto: bool = False) -> Any:
        pair = kit.Pair(auto=auto)
        pair.endpoint = pair.serve({"quotas": SOME})
        pairs.append(pair)
        return pair

    yield build
    for pair in pairs:
        pair.close()


# Without the key.


def test_orders_need_the_same_key_at_both_ends(kit: SimpleNamespace) -> None:
    ours, theirs = ring(), ring()
    for client, server, works in ((ours, ours, True), (ours, theirs, False)):
        pair = kit.Pair(ring=lambda ring=client: ring)
        try:
            pair.client.start(pair.order(pair.serve({"ring": lambda ring=server: ring})))
            kit.eventually(lambda pair=pair: bool(pair.decode.done or pair.decode.failed))
            assert bool(pair.decode.done) is works
            assert pair.server.stats().refusals["wrong_proof"] == (not works)
            assert works or (pair.untouched and pair.prefill.orders == {})
        finally:
            pair.close()


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x10" * 15, bytes(4096), b"\xff" * 64, protocol.encode_release(1) * 9]
)
def test_a_stranger_learns_nothing(kit: SimpleNamespace, data: bytes) -> None:
    pair = kit.Pair()
    key = ring()
    try:
        host, _, port = pair.serve({"ring": lambda: key}).partition(":")
        with socket.create_connection((host, int(port)), timeout=60) as sock:
            sock.sendall(data)
            if len(data) < 56:
                sock.shutdown(socket.SHUT_WR)
            heard = b""
            with contextlib.suppress(ConnectionResetError):
                heard = sock.recv(4096)
        assert heard == b""
        kit.eventually(lambda: sum(pair.server.stats().refusals.values()) == 1)
    finally:
        pair.close()


def test_who_cannot_prove_its_key_is_not_told_who_is_there(kit: SimpleNamespace) -> None:
    """A hello behind a wrong proof is never read, and its sender hears no sentence about revisions or layouts."""
    pair = kit.Pair()
    key = ring()
    try:
        endpoint = pair.serve({"ring": lambda: key})
        pair.client.start(pair.order(endpoint))
        kit.eventually(lambda: bool(pair.decode.failed))
        reason = pair.decode.failed[0][2]
        assert "does not accept our proof" in reason
        assert not any(word in reason for word in ("prefill-0", "revision", "layout", "d1", "r1"))
    finally:
        pair.close()


def test_another_version_is_refused_with_a_sentence(pair: Any) -> None:
    with stranger(pair) as sock:
        ours, theirs = protocol.VERSION, protocol.VERSION + 1
        body = protocol.encode_hello(pair.identity)[protocol.HEADER_BYTES :]
        body = body.replace(b'"version": %d' % ours, b'"version": %d' % theirs)
        sock.sendall(protocol.encode_header(FrameKind.HELLO, 0, len(body), body) + body)
        header, answer = read_frame(sock)
        assert header.kind is FrameKind.REFUSED
        assert protocol.decode_text(answer) == f"the peer speaks version {theirs} of the KV transport, we speak {ours}"
        assert is_dropped(sock)


# With the key: memory.


@pytest.mark.usefixtures("hasty")
def test_announced_bytes_cost_nothing(kit: SimpleNamespace) -> None:
    """Sixteen bytes once made a worker allocate 42 MB; here 60 connections announce the largest frames there are."""
    pair = kit.Pair()
    endpoint = pair.serve()
    largest = protocol.bound_bodies(15 * 4)[FrameKind.PREFILL]
    opened: list[socket.socket] = []
    try:
        with enter(endpoint) as sock:  # what the first connection costs is not counted
            greet(sock, pair)
        before = resident_bytes()
        for index in range(60):
            sock = greet(enter(endpoint), pair)
            kind, size = ((FrameKind.PREFILL, largest), (FrameKind.RESEND, protocol.MAX_BODY[FrameKind.RESEND]))[
                index % 2
            ]
            sock.sendall(protocol.encode_header(kind, index, size))
            opened.append(sock)
        time.sleep(0.2)
        assert resident_bytes() - before < 30 << 20
        kit.eventually(lambda: pair.server.stats().connections == 0)  # no frame may take for ever
    finally:
        for sock in opened:
            sock.close()
        pair.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("bytes_at_once", [0, 1])
def test_a_frame_ends_in_time_or_the_connection_does(pair: Any, kit: SimpleNamespace, bytes_at_once: int) -> None:
    """Nothing, or a drop now and then: both are too slow."""
    with stranger(pair) as sock:
        greet(sock, pair)
        frame = protocol.encode_prefill(1, pair.order())
        sock.sendall(frame[:40])
        kit.eventually(lambda: pair.server.stats().connections == 1)
        for index in range(40, len(frame)):
            if pair.server.stats().connections == 0:
                break
            time.sleep(0.05)
            with contextlib.suppress(OSError):
                sock.sendall(frame[index : index + bytes_at_once])
    kit.eventually(lambda: pair.server.stats().connections == 0)
    assert pair.prefill.orders == {}


# With the key: quotas.


def test_connections_per_host_are_bounded(guarded: Any, kit: SimpleNamespace) -> None:
    pair = guarded(auto=True)
    socks = [greet(enter(pair.endpoint), pair) for _ in range(SOME.sessions_per_host)]
    try:
        with enter(pair.endpoint) as sock:
            assert is_dropped(sock)
        assert pair.server.stats().quota_refusals["sessions"] == 1
        socks.pop().close()
        kit.eventually(lambda: pair.server.stats().connections == SOME.sessions_per_host - 1)
        pair.client.start(pair.order(pair.endpoint))
        kit.eventually(lambda: bool(pair.decode.done))
    finally:
        for sock in socks:
            sock.close()


def test_ranks_behind_one_address_are_counted_by_the_pod_that_they_prove_to_be(kit: SimpleNamespace) -> None:
    """A node that rewrites its pods' addresses makes of many pods one address, but not one peer."""
    pair, keys = kit.Pair(auto=True), ring()
    endpoint = pair.serve({"quotas": SOME, "ring": lambda: keys})
    socks: list[socket.socket] = []
    try:
        for number in range(8):  # more than an address may have of those that have not said who they are
            sock = enter(endpoint, keys)
            socks.append(sock)
            sock.sendall(protocol.encode_hello(replace(pair.identity, worker=f"decode-{number // 4}")))
            assert read_frame(sock)[0].kind is FrameKind.HELLO
        with enter(endpoint, keys) as sock:
            sock.sendall(protocol.encode_hello(replace(pair.identity, worker="decode-0")))
            header, body = read_frame(sock)
            assert header.kind is FrameKind.REFUSED
            assert protocol.decode_text(body) == "worker decode-0 has 4 connections already"
            assert is_dropped(sock)
        socks.pop(0).close()
        kit.eventually(lambda: pair.server.stats().connections == 7)
        with enter(endpoint, keys) as sock:
            sock.sendall(protocol.encode_hello(replace(pair.identity, worker="decode-0")))
            assert read_frame(sock)[0].kind is FrameKind.HELLO
    finally:
        for sock in socks:
            sock.close()
        pair.close()


def test_names_that_nobody_proves_do_not_count() -> None:
    ledger = Ledger(SOME)
    for number in range(SOME.sessions_per_host):
        ledger.open("h").identify(f"decode-{number}")
    with pytest.raises(QuotaError, match="h has 6 connections"):
        ledger.open("h")


def test_orders_are_bounded_for_one_and_for_all(guarded: Any, kit: SimpleNamespace) -> None:
    pair = guarded()
    with enter(pair.endpoint) as one, enter(pair.endpoint) as other:
        for sock, allowed in ((one, SOME.orders_per_session), (other, SOME.orders - SOME.orders_per_session)):
            greet(sock, pair)
            for transfer in range(allowed + 1):
                sock.sendall(protocol.encode_prefill(transfer + 100 * allowed, pair.order(tokens=4)))
            while (frame := read_frame(sock))[0].kind is FrameKind.HEARTBEAT:
                pass
            assert frame[0].kind is FrameKind.FAILED
            assert "orders" in protocol.decode_text(frame[1])
        assert len(pair.prefill.orders) == SOME.orders
        assert pair.server.stats().quota_refusals["orders"] == 2
        one.sendall(protocol.encode_cancel(400))
        kit.eventually(lambda: len(pair.prefill.released) == 1)
        one.sendall(protocol.encode_prefill(7, pair.order(tokens=4)))
        kit.eventually(lambda: len(pair.prefill.orders) == SOME.orders + 1)
    kit.eventually(lambda: len(pair.prefill.released) == SOME.orders + 1)


def test_ordered_tokens_are_bounded(guarded: Any) -> None:
    pair = guarded()
    with greet(enter(pair.endpoint), pair) as sock:
        for transfer in range(3):
            sock.sendall(protocol.encode_prefill(transfer, pair.order(tokens=60)))
        while (frame := read_frame(sock))[0].kind is FrameKind.HEARTBEAT:
            pass
        assert frame[0].kind is FrameKind.FAILED
        assert "180 tokens" in protocol.decode_text(frame[1])


def test_who_has_ordered_much_comes_later_with_more(kit: SimpleNamespace) -> None:
    """From all its connections together. What a pod with little under way orders is not behind all of that."""
    pair, keys = kit.Pair(auto=False), ring()
    endpoint = pair.serve({"quotas": replace(SOME, tokens=10_000), "ring": lambda: keys})
    socks = {name: enter(endpoint, keys) for name in ("one", "same", "other")}
    try:
        for name, sock in socks.items():
            greeting = replace(pair.identity, worker="greedy" if name in {"one", "same"} else "modest")
            sock.sendall(protocol.encode_hello(greeting))
            assert read_frame(sock)[0].kind is FrameKind.HELLO
        seen: list[float] = []
        for transfer, name in enumerate(["one", "one", "same", "other", "other", "same"]):
            socks[name].sendall(protocol.encode_prefill(transfer, replace(pair.order(tokens=30), priority=0)))
            kit.eventually(lambda count=transfer + 1: len(pair.prefill.orders) == count)
            seen.append(list(pair.prefill.orders.values())[-1][0].priority)
        assert seen == [0, 0.5, 1, 0, 0.5, 1.5]
        socks["one"].close()
        kit.eventually(lambda: len(pair.prefill.released) == 2)
        socks["same"].sendall(
            protocol.encode_cancel(5) + protocol.encode_prefill(9, replace(pair.order(tokens=30), priority=0))
        )
        kit.eventually(lambda: len(pair.prefill.orders) == 7)
        assert list(pair.prefill.orders.values())[-1][0].priority == 0.5
    finally:
        for sock in socks.values():
            sock.close()
        pair.close()


def test_what_peers_claim_to_be_urgent_is_bounded() -> None:
    """A priority of -1000 was worth more than all that makes a pod's orders come later."""
    now = 100.0
    ledger = Ledger(SOME, clock=lambda: now)
    first, second = (ledger.open("h", proven=True) for _ in range(2))
    first.identify("one")
    second.identify("two")
    half = SOME.fair_tokens // 2
    assert first.place(-1000, half) == second.place(-1000, half) == -1000
    for account in (first, second):  # whoever it is
        assert account.place(-1000, half) == 0
        assert account.place(3, half) == 3
    now += URGENT_SECONDS / 2
    assert second.place(-1000, half) == -1000
    assert second.place(-1000, half) == 0
    now += 10 * URGENT_SECONDS
    assert first.place(-5, 100 * half) == -5, "what is larger than ever fits waits for all of it"
    assert first.place(-5, 1) == 0


def test_many_names_gain_little() -> None:
    ledger = Ledger(Quotas.of(1000), clock=lambda: 100.0)
    accounts = [ledger.open("h0", proven=True) for _ in range(NAMES_PER_HOST)]
    for number, account in enumerate(accounts):
        account.identify(f"name-{number}")
    accounts[0].take_order(8000)
    accounts[1].take_order(8000)
    assert accounts[2].place(0, 1) == 0, "so many pods may share an address"
    newcomer = ledger.open("h0", proven=True)
    newcomer.identify("another name")
    assert newcomer.place(0, 1) == 16_000 / 1000 / NAMES_PER_HOST
    assert accounts[0].place(0, 1) == 8
    newcomer.close()
    assert accounts[2].place(0, 1) == 0
    elsewhere = ledger.open("h9", proven=True)
    elsewhere.identify("elsewhere")
    assert elsewhere.place(0, 1) == 0


@pytest.mark.usefixtures("hasty")
def test_attachments_are_bounded_and_do_not_wait_for_ever(guarded: Any, kit: SimpleNamespace) -> None:
    pair = guarded()
    with greet(enter(pair.endpoint), pair) as sock:
        for transfer in range(SOME.attachments_per_session + 1):
            sock.sendall(protocol.encode_attach(transfer, 3))
        texts: list[str] = []
        while len(texts) < SOME.attachments_per_session + 1:
            header, body = read_frame(sock)
            if header.kind is FrameKind.FAILED:
                texts.append(protocol.decode_text(body))
        assert "attachments" in texts[0]
        assert all("no order of this number" in text for text in texts[1:])
        assert not pair.server._outbox._shelves


def test_repeats_are_bounded(guarded: Any, kit: SimpleNamespace) -> None:
    pair = guarded(auto=True)
    with greet(enter(pair.endpoint), pair) as sock:
        sock.sendall(protocol.encode_prefill(5, pair.order(tokens=32)))
        for _ in range(protocol.MAX_RESENDS + 1):
            while read_frame(sock)[0].kind is not FrameKind.DONE:
                pass
            sock.sendall(protocol.encode_resend(5, [BlockRange(0, 0, 8)]))
        assert is_dropped(sock)
    assert pair.server.stats().quota_refusals["resends"] == 1


def test_nobody_can_ask_for_more_than_there_was(guarded: Any) -> None:
    pair = guarded(auto=True)
    with greet(enter(pair.endpoint), pair) as sock:
        sock.sendall(protocol.encode_prefill(5, pair.order(tokens=32)))
        while read_frame(sock)[0].kind is not FrameKind.DONE:
            pass
        sock.sendall(protocol.encode_resend(5, [BlockRange(0, 0, 8)] * 4))
        assert is_dropped(sock)


def test_a_flood_about_orders_that_are_not_there_ends(pair: Any) -> None:
    with stranger(pair) as sock:
        greet(sock, pair)
        with contextlib.suppress(OSError):
            for _ in range(50):
                sock.sendall(b"".join(protocol.encode_release(n) for n in range(100)))
        assert is_dropped(sock)


def test_orders_and_cancels_without_pause_are_read_at_a_bounded_rate(kit: SimpleNamespace) -> None:
    """From all connections of one pod together; another pod's order is served meanwhile."""
    keys = ring()
    pair = kit.Pair(auto=False, ring=lambda: keys)
    endpoint = pair.serve({"quotas": replace(SOME, frames_per_second=100.0), "ring": lambda: keys})
    mad = [enter(endpoint, keys) for _ in range(2)]

    def order_and_cancel(sock: socket.socket, first: int) -> None:
        with contextlib.suppress(OSError):
            for transfer in range(first, first + 100_000):
                order = pair.order(tokens=4, name="mad")
                sock.sendall(protocol.encode_prefill(transfer, order) + protocol.encode_cancel(transfer))

    began = time.monotonic()
    threads = []
    try:
        for number, sock in enumerate(mad):
            sock.sendall(protocol.encode_hello(replace(pair.identity, worker="mad")))
            threads.append(threading.Thread(target=order_and_cancel, args=(sock, number << 32)))
            threads[-1].start()
        time.sleep(2.0)
        taken, seconds = len(pair.prefill.orders), time.monotonic() - began
        assert 50 <= taken <= (FIRST_FRAMES + 100 * seconds) / 2 + len(mad)
        pair.client.start(pair.order(endpoint, name="sound"))
        kit.eventually(lambda: any(name.startswith("sound/") for name in list(pair.prefill.orders)), 60)
        pair.prefill.run(next(name for name in list(pair.prefill.orders) if name.startswith("sound/")))
        kit.eventually(lambda: bool(pair.decode.done), 60)
    finally:
        for sock in mad:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(30)
        for sock in mad:
            sock.close()
        pair.close()


def test_who_leaves_while_nothing_is_read_from_it_leaves_nothing_behind(kit: SimpleNamespace) -> None:
    pair = kit.Pair(auto=False)
    endpoint = pair.serve({"quotas": replace(SOME, frames_per_second=0.1, frames_at_once=4)})
    try:
        with greet(enter(endpoint), pair) as sock:
            sock.sendall(b"".join(protocol.encode_prefill(transfer, pair.order(tokens=4)) for transfer in range(9)))
            kit.eventually(lambda: len(pair.prefill.orders) == 3)
            time.sleep(0.1)
            assert len(pair.prefill.orders) == 3
        kit.eventually(lambda: len(pair.prefill.released) == 3, 60)
        assert pair.server.stats().connections == 0
    finally:
        pair.close()


def test_a_bucket_fills_and_never_overflows() -> None:
    bucket = Bucket(rate=10.0, most=20.0, left=5.0, now=100.0)
    assert bucket.take(5, 100.0) == 0
    assert bucket.take(1, 100.0) == pytest.approx(0.1)
    assert bucket.take(1, 100.0) == pytest.approx(0.2)  # another connection of the same owner waits longer
    assert bucket.take(20, 1000.0) == 0
    assert bucket.take(10, 1000.0) == pytest.approx(1.0)


def test_quotas_are_given_back() -> None:
    ledger = Ledger(SOME)
    accounts = [ledger.open("h") for _ in range(SOME.sessions_per_host)]
    with pytest.raises(QuotaError, match="h has 6 connections"):
        ledger.open("h")
    for _ in range(SOME.orders_per_session):
        accounts[0].take_order(1)
    with pytest.raises(QuotaError, match="orders"):
        accounts[0].take_order(1)
    accounts[1].take_order(SOME.tokens_per_session)
    with pytest.raises(QuotaError, match="tokens"):
        accounts[1].take_order(1)
    for account in accounts:
        account.close()
    fresh = ledger.open("h")
    fresh.take_order(SOME.tokens_per_session)
    refused = {quota: count for quota, count in ledger.refusals.items() if count}
    assert refused == {"sessions": 1, "orders": 1, "tokens": 1}


# With the key: time.


def heartbeat_for_ever(sock: socket.socket, started: int | None) -> None:
    if started is not None:
        sock.sendall(protocol.encode_start(started))
    for step in range(1, 10_000):
        sock.sendall(protocol.encode_heartbeat(step))
        time.sleep(0.02)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("hasty", "starts", "reason"),
    [
        ({"handshake": 15.0, "silence": 15.0, "stall": 15.0}, False, "not begun"),
        ({"handshake": 15.0, "silence": 15.0, "patience": 15.0}, True, "no progress"),
    ],
    indirect=["hasty"],
)
def test_heartbeats_do_not_extend_an_order_for_ever(
    scripted: Any, kit: SimpleNamespace, starts: bool, reason: str
) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        heartbeat_for_ever(sock, transfer if starts else None)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed), 60)
    assert reason in pair.decode.failed[0][2]
    assert pair.decode.overdue == ([] if starts else [("a", 1)])


@pytest.mark.usefixtures("hasty")
def test_a_peer_that_takes_nothing_is_given_up(guarded: Any, kit: SimpleNamespace) -> None:
    pair = guarded()
    with enter(pair.endpoint) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greet(sock, pair)
        sock.sendall(protocol.encode_prefill(1, pair.order(tokens=32)))
        name = pair.prefill.next_order()
        for _ in range(3000):  # far more than the socket buffers take
            pair.prefill.run(name, finish=False)
        kit.eventually(lambda: name in pair.prefill.released, 60)
        assert read_exact(sock, 1)


def test_a_worker_says_when_it_begins(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    assert not held_pair.client.has_begun("a", 1)
    held_pair.prefill.begin(name)
    kit.eventually(lambda: held_pair.client.has_begun("a", 1))
    held_pair.prefill.run(name)
    kit.eventually(lambda: bool(held_pair.decode.done))


def test_blocks_say_that_a_worker_has_begun(held_pair: Any, kit: SimpleNamespace) -> None:
    held_pair.client.start(held_pair.order(held_pair.serve()))
    name = held_pair.prefill.next_order()
    held_pair.prefill.run(name, range(1), finish=False)
    kit.eventually(lambda: held_pair.client.has_begun("a", 1))
