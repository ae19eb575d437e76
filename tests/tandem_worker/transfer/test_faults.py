"""Peers that lie, stumble and vanish: a scripted peer on a raw socket against the real other end."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.transfer import protocol
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind

from tests.tandem_worker.transfer.scripted import (
    BLOCKS,
    ScriptedPeer,
    read_frame,
    read_order,
    serve_well,
    stranger,
)


def test_the_scripted_peer_is_a_good_one(scripted: Any, kit: SimpleNamespace) -> None:
    pair, peer = scripted(serve_well)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))
    assert pair.arrived(0, 8)


def test_a_damaged_block_is_sent_again(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(peer.blocks(transfer, BlockRange(0, 0, BLOCKS), damage=True))
        sock.sendall(b"".join(peer.answer(transfer)[1:]))
        header, body = read_frame(sock)
        assert header.kind is FrameKind.RESEND
        (wanted,) = protocol.decode_resend(body)
        assert (wanted.layer, wanted.count) == (0, 1)
        sock.sendall(peer.blocks(transfer, wanted) + peer.answer(transfer)[-1])
        assert read_frame(sock)[0].kind is FrameKind.RELEASE
        peer.resends += 1

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: peer.resends == 1)
    assert pair.arrived(0, 8)
    assert pair.client.stats().resends == 1
    assert pair.decode.failed == []


def test_blocks_that_stay_damaged_are_given_up(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(b"".join(peer.answer(transfer)[1:]))
        while read_frame(sock)[0].kind is FrameKind.RESEND:
            peer.resends += 1
            damaged = peer.blocks(transfer, BlockRange(0, 0, BLOCKS), damage=True)
            sock.sendall(damaged + peer.answer(transfer)[-1])

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "damaged 3 times" in pair.decode.failed[0][2]
    assert peer.resends == 2
    assert pair.decode.done == []


def test_without_verification_nothing_is_checked(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(peer.blocks(transfer, BlockRange(0, 0, BLOCKS), damage=True))
        sock.sendall(b"".join(peer.answer(transfer)[1:]))
        read_frame(sock)

    pair, peer = scripted(script, verify=False)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))


def test_duplicates_change_nothing(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        *frames, done = peer.answer(transfer)
        damaged = peer.blocks(transfer, BlockRange(1, 2, 3), damage=True)
        sock.sendall(b"".join(frames) + damaged + frames[0] + done + done + damaged)
        read_frame(sock)
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))
    pair.client.start(pair.order(name="b"))
    assert pair.arrived(0, 8)
    assert len(pair.decode.done) == 1


FRAME_BYTES = protocol.HEADER_BYTES + protocol.blocks_head_bytes(BLOCKS) + BLOCKS * 512
CUTS = [0, 1, protocol.HEADER_BYTES, protocol.HEADER_BYTES + 3, protocol.HEADER_BYTES + protocol.blocks_head_bytes(0),
        protocol.HEADER_BYTES + protocol.blocks_head_bytes(0) + 64, 1000, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 5,
        2 * FRAME_BYTES, 3 * FRAME_BYTES - 1, 3 * FRAME_BYTES, 3 * FRAME_BYTES + protocol.HEADER_BYTES + 6]  # fmt: skip


@pytest.mark.parametrize("cut", CUTS)
def test_a_connection_cut_anywhere_is_made_again_elsewhere(scripted: Any, kit: SimpleNamespace, cut: int) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        data = b"".join(peer.answer(read_order(sock)))
        assert cut < len(data)
        sock.sendall(data[:cut])

    pair, bad = scripted(script)
    good = ScriptedPeer(pair, serve_well)
    try:
        pair.client.start(pair.order(bad.endpoint, good.endpoint, tokens=32))
        kit.eventually(lambda: bool(pair.decode.done))
        assert pair.arrived(0, 8)
    finally:
        pair.client.close()
        good.close()


@pytest.mark.parametrize("cut", [0, 1, 16, 40])
def test_a_connection_cut_in_the_handshake(scripted: Any, kit: SimpleNamespace, cut: int) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        read_frame(sock)
        sock.sendall(protocol.encode_hello(peer.pair.identity)[:cut])

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint))
    kit.eventually(lambda: bool(pair.decode.failed))


@pytest.mark.parametrize("seed", range(8))
def test_garbage_from_a_peer_fails_the_order_only(scripted: Any, kit: SimpleNamespace, seed: int) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        if seed % 2:
            peer.greet(sock)
            read_order(sock)
        sock.sendall(random.Random(seed).randbytes(5000))
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched


@pytest.mark.parametrize("bad", [BlockRange(3, 0, 1), BlockRange(0, 8, 1), BlockRange(0, 7, 2), BlockRange(0, 1, 1)])
def test_blocks_that_were_not_ordered_land_nowhere(scripted: Any, kit: SimpleNamespace, bad: BlockRange) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        payload = bytes([7]) * (512 * bad.count)
        sock.sendall(protocol.encode_blocks_head(transfer, bad, [0] * bad.count, len(payload)) + payload)
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32, cached=8))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched


def test_a_payload_of_the_wrong_length_lands_nowhere(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        head = protocol.encode_blocks_head(read_order(sock), BlockRange(0, 0, 1), [0], 511)
        sock.sendall(head + bytes([7]) * 511)
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched


@pytest.mark.usefixtures("hasty")
def test_a_silent_peer_is_given_up(scripted: Any, kit: SimpleNamespace) -> None:
    """A worker whose machine is gone, or that is stopped: the connection stands, nothing comes."""

    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        read_order(sock)
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "silent" in pair.decode.failed[0][2] or "no progress" in pair.decode.failed[0][2]


@pytest.mark.usefixtures("hasty")
def test_a_peer_that_never_greets_is_given_up(scripted: Any, kit: SimpleNamespace) -> None:
    pair, peer = scripted(lambda peer, sock: sock.recv(1 << 16) and sock.recv(1))
    pair.client.start(pair.order(peer.endpoint))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "no hello" in pair.decode.failed[0][2]


@pytest.mark.parametrize("phase", range(0, 3 * FRAME_BYTES, 997))
def test_nothing_lands_after_cancel(scripted: Any, kit: SimpleNamespace, phase: int) -> None:
    """The rest of the answer is sent after `cancel` has returned, wherever in a frame it was."""
    sent, go, ended = threading.Event(), threading.Event(), threading.Event()

    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        data = b"".join(peer.answer(read_order(sock)))
        sock.sendall(data[:phase])
        sent.set()
        go.wait(30)
        sock.sendall(data[phase:])
        other = read_order(sock)
        sock.sendall(protocol.encode_text(FrameKind.FAILED, other, "that was all"))
        ended.set()
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    assert sent.wait(30)
    pair.client.cancel("a", 1)
    before = [layer.clone() for layer in pair.target.layers]
    go.set()
    pair.client.start(pair.order(peer.endpoint, tokens=4, name="b"))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert all(bool((a == b).all()) for a, b in zip(before, pair.target.layers, strict=True))
    assert pair.decode.done == []
    assert ended.wait(30)


EVENT = st.one_of(
    st.tuples(st.just("blocks"), st.integers(0, 2), st.integers(0, 2), st.integers(0, 7), st.booleans()),
    st.tuples(st.just("done"), st.integers(0, 2)),
    st.tuples(st.just("failed"), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 2)),
)


@settings(max_examples=40, deadline=None)
@given(events=st.lists(EVENT, max_size=25))
def test_any_order_of_events(events: list[tuple[Any, ...]], kit_module: SimpleNamespace) -> None:
    """Three orders share a connection and the same reserved blocks are watched: what is cancelled stays as it was."""
    inbox: list[socket.socket] = []
    ready, transfers = threading.Event(), []

    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfers.extend(read_order(sock) for _ in range(3))
        inbox.append(sock.dup())
        ready.set()
        while sock.recv(1 << 16):
            pass

    pair = kit_module.Pair()
    peer = ScriptedPeer(pair, script)
    try:
        for number in range(3):
            pair.client.start(pair.order(peer.endpoint, tokens=32, name=f"r{number}"))
        assert ready.wait(30)
        sock = inbox[0]
        snapshot: list[Any] | None = None
        cancelled: set[int] = set()
        for kind, order, *rest in events:
            if kind == "cancel":
                pair.client.cancel(f"r{order}", 1)
                cancelled.add(order)
                if len(cancelled) == 3 and snapshot is None:
                    snapshot = [layer.clone() for layer in pair.target.layers]
                continue
            with contextlib.suppress(OSError):
                if kind == "blocks":
                    layer, index, damage = rest
                    sock.sendall(peer.blocks(transfers[order], BlockRange(layer, index, 1), damage=damage))
                elif kind == "done":
                    sock.sendall(protocol.encode_done(transfers[order], Done(0, b"abcd", b"name of a prompt")))
                else:
                    sock.sendall(protocol.encode_text(FrameKind.FAILED, transfers[order], "no"))
        sock.close()
        names = [result.request_id for result in pair.decode.done] + [name for name, *_ in pair.decode.failed]
        assert len(names) == len(set(names)), "an order ends once"
        if snapshot is not None:
            pair.client.close()
            assert all(bool((a == b).all()) for a, b in zip(snapshot, pair.target.layers, strict=True))
    finally:
        pair.close()
        peer.close()


@pytest.fixture(scope="module")
def kit_module() -> SimpleNamespace:
    """`kit` for hypothesis, which wants fixtures that live longer than an example."""
    import sys

    module = next(m for name, m in sys.modules.items() if name.endswith("transfer.conftest"))
    return SimpleNamespace(Pair=module.Pair)


# Strangers at the prefill worker's port.


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01" + bytes(300), bytes(64), b"\xff" * 64,
     protocol.encode_header(FrameKind.HELLO, 0, 16384 + 1), protocol.encode_header(FrameKind.PREFILL, 1, 40_000_000),
     protocol.encode_header(FrameKind.HELLO, 0, 10) + b"0123456789", protocol.encode_release(1)],
)  # fmt: skip
def test_a_stranger_is_dropped(pair: Any, kit: SimpleNamespace, data: bytes) -> None:
    with stranger(pair) as sock:
        sock.sendall(data)
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(4096):
                rest += piece
    assert len(rest) < 2000
    pair.client.start(pair.order(f"127.0.0.1:{pair.server.port}"))
    kit.eventually(lambda: bool(pair.decode.done))


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("data", [b"", b"\x10", protocol.encode_header(FrameKind.HELLO, 0, 100) + b"{"])
def test_a_stranger_that_waits_is_dropped(pair: Any, data: bytes) -> None:
    with stranger(pair) as sock:
        sock.sendall(data)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "frames",
    [
        [protocol.encode_header(FrameKind.PREFILL, 1, 3) + b"abc"],
        [protocol.encode_header(FrameKind.BLOCKS, 1, 0)],
        [protocol.encode_header(FrameKind.PREFILL, 1, 100_000_000)],
    ],
)
def test_a_peer_that_breaks_the_protocol_is_dropped(pair: Any, frames: list[bytes]) -> None:
    with stranger(pair) as sock:
        sock.sendall(protocol.encode_hello(pair.identity) + b"".join(frames))
        assert read_frame(sock)[0].kind is FrameKind.HELLO
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""


def test_a_peer_that_uses_a_number_twice_is_dropped(held_pair: Any, kit: SimpleNamespace) -> None:
    order = protocol.encode_prefill(5, held_pair.order(tokens=8))
    with stranger(held_pair) as sock:
        sock.sendall(protocol.encode_hello(held_pair.identity) + order + order)
        kit.eventually(lambda: len(held_pair.prefill.released) == 1)


def test_a_peer_that_does_not_read_holds_up_nobody_else(held_pair: Any, kit: SimpleNamespace) -> None:
    with stranger(held_pair) as slow:
        slow.sendall(protocol.encode_hello(held_pair.identity))
        slow.sendall(protocol.encode_prefill(1, held_pair.order(tokens=32)))
        name = held_pair.prefill.next_order()
        for _ in range(3000):  # far more than the socket buffers take
            held_pair.prefill.run(name, finish=False)
        held_pair.client.start(held_pair.order(f"127.0.0.1:{held_pair.server.port}", tokens=32))
        kit.eventually(lambda: len(held_pair.prefill.orders) == 2)
        held_pair.prefill.run(list(held_pair.prefill.orders)[1])
        kit.eventually(lambda: bool(held_pair.decode.done))
    kit.eventually(lambda: name in held_pair.prefill.released)
