"""What was not verified is not used, and does not stay where others might read it."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.transfer import protocol
from tandem_worker.transfer.checksums import sum_blocks
from tandem_worker.transfer.decode.attempt import Attempt, wipe
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind

from tests.tandem_worker.transfer.scripted import BLOCKS, PROMPT_NAME, ScriptedPeer, read_frame, read_order


def flip(frame: bytes, at: int) -> bytes:
    damaged = bytearray(frame)
    damaged[at] ^= 0x10
    return bytes(damaged)


@pytest.mark.parametrize("at", range(0, protocol.HEADER_BYTES + protocol.blocks_head_bytes(1), 3))
@pytest.mark.parametrize("verify", [True, False])
def test_a_damaged_head_ends_the_connection_and_lands_nothing(
    scripted: Any, kit: SimpleNamespace, at: int, verify: bool
) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(flip(peer.blocks(transfer, BlockRange(0, 0, BLOCKS)), at) + b"".join(peer.answer(transfer)[1:]))
        sock.recv(1 << 16)

    pair, peer = scripted(script, verify=verify)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched
    assert sum(pair.client.stats().integrity_failures.values()) == 1


def test_a_block_under_another_number_fails_its_sum(scripted: Any, kit: SimpleNamespace) -> None:
    """All sums are right, but for where the block belongs."""

    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        payload = peer.block(0, 3)
        for _ in range(protocol.MAX_RESENDS + 1):
            sums = sum_blocks([(memoryview(payload),)], transfer, 0, 3)
            moved = protocol.encode_blocks_head(transfer, BlockRange(0, 4, 1), sums, len(payload))
            sock.sendall(moved + payload + peer.answer(transfer)[-1])
        sock.recv(1 << 16)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched
    assert pair.client.stats().integrity_failures["block"] == protocol.MAX_RESENDS + 1


@pytest.mark.parametrize(
    ("done", "kind"),
    [
        (Done(0, b"abcd", b"another prompt's"), "prompt"),
        (Done(0, b"abcd", bytes(16)), "prompt"),
        (Done(33, b"abcd", PROMPT_NAME), "cached"),
    ],
)
def test_an_end_that_does_not_fit_the_order_fails_it(
    scripted: Any, kit: SimpleNamespace, done: Done, kind: str
) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(b"".join(peer.answer(transfer)[:-1]) + protocol.encode_done(transfer, done))
        assert read_frame(sock)[0].kind is FrameKind.CANCEL
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.decode.done == []
    assert pair.client.stats().integrity_failures[kind] == 1


@pytest.mark.parametrize("end", ["cancel", "cut", "close"])
@pytest.mark.parametrize("verify", [True, False])
def test_half_a_frame_leaves_nothing(scripted: Any, kit: SimpleNamespace, end: str, verify: bool) -> None:
    go = threading.Event()

    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        frame = peer.blocks(read_order(sock), BlockRange(1, 0, BLOCKS))
        sock.sendall(frame[: len(frame) * 2 // 3])
        go.wait(30)

    pair, peer = scripted(script, verify=verify)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: not pair.untouched)
    if end == "cancel":
        pair.client.cancel("a", 1)
        assert pair.untouched
        go.set()
    else:
        go.set() if end == "cut" else pair.client.close()
        kit.eventually(lambda: bool(pair.decode.failed))
        assert pair.untouched
        go.set()


@pytest.mark.usefixtures("hasty")
def test_blocks_that_stay_damaged_leave_nothing(scripted: Any, kit: SimpleNamespace) -> None:
    def script(peer: ScriptedPeer, sock: socket.socket) -> None:
        peer.greet(sock)
        transfer = read_order(sock)
        sock.sendall(peer.blocks(transfer, BlockRange(0, 0, 1), damage=True))
        sock.recv(1)

    pair, peer = scripted(script)
    pair.client.start(pair.order(peer.endpoint, tokens=32))
    kit.eventually(lambda: pair.client.stats().integrity_failures["block"] == 1)
    kit.eventually(lambda: pair.untouched)
    kit.eventually(lambda: bool(pair.decode.failed))


def test_wiping_ends_with_the_attempt() -> None:
    data = bytearray(b"x" * 3_000_000)
    attempt = Attempt(1, "a", (1,), 0, None, unverified=[memoryview(data)[5:2_500_000]])
    assert attempt.close()
    assert data == b"x" * 5 + bytes(2_499_995) + b"x" * 500_000
    data[:] = b"y" * len(data)
    assert not attempt.close()
    assert data == b"y" * len(data), "what is another's by now"
    wipe([])
