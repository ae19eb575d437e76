"""A scripted prefill worker with a real engine: what it writes, when, and what it says of it, to the decode end."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.transfer import protocol
from tandem_worker.transfer.checksums import sum_blocks
from tandem_worker.transfer.choice import MOONCAKE
from tandem_worker.transfer.contract import Offer
from tandem_worker.transfer.mooncake.engine import Engine, Memory
from tandem_worker.transfer.mooncake.frames import Grant, Landed, Slot, decode_grant, encode_grant, encode_landed
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind

from tests.tandem_worker.transfer.engines import begin_engine
from tests.tandem_worker.transfer.scripted import BLOCKS, LAYERS, PROMPT_NAME, ScriptedPeer, read_frame, stranger

Play = Callable[["Liar", socket.socket], None]
_engines: list[Engine] = []


class Liar:
    """Plays one connection; its engine writes what and where the script says."""

    def __init__(self, peer: ScriptedPeer, sock: socket.socket) -> None:
        self._peer, self._sock = peer, sock
        if not _engines:
            _engines.append(begin_engine())
        self._engine = _engines[0]
        self._memory = Memory(1 << 20)
        self.transfer = 0
        self.grant: Grant | None = None
        self.slots: list[Slot] = []

    def greet(self) -> None:
        assert read_frame(self._sock)[0].kind is FrameKind.HELLO
        identity = replace(self._peer.pair.identity, worker="prefill-0", offers=(Offer(MOONCAKE, "tcp"),))
        self._sock.sendall(protocol.encode_hello(identity))

    def read(self) -> tuple[FrameKind, bytes]:
        """The next frame that is no grant; of grants the slots are noted."""
        while True:
            header, body = read_frame(self._sock)
            if header.kind is FrameKind.GRANT:
                self.grant = decode_grant(body)
                self.slots += self.grant.slots
                continue
            if header.kind is FrameKind.PREFILL:
                self.transfer = header.transfer
            return header.kind, body

    def await_order(self) -> None:
        while self.read()[0] is not FrameKind.PREFILL:
            pass

    def payload(self, blocks: BlockRange) -> bytes:
        return b"".join(self._peer.block(blocks.layer, blocks.first + i) for i in range(blocks.count))

    def write(self, data: bytes, slot: Slot) -> bool:
        """Whether the engines say that it was written."""
        assert self.grant is not None
        self._memory.view[: len(data)] = data
        number = self._engine.submit(
            self.grant.engine, self._memory.address, self.grant.base + slot.number * self.grant.slot_bytes, len(data)
        )
        assert number is not None
        deadline = time.monotonic() + 20
        while (written := self._engine.check(number)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return written

    def tell(self, blocks: BlockRange, slot: Slot, *, data: bytes | None = None, lost: bool = False) -> None:
        data = self.payload(blocks) if data is None else data
        size = len(data) // blocks.count
        parts = [(memoryview(data[i * size : (i + 1) * size]),) for i in range(blocks.count)]
        sums = array("Q", sum_blocks(parts, self.transfer, blocks.layer, blocks.first))
        self._sock.sendall(encode_landed(self.transfer, Landed(slot, (blocks,), sums, 10, lost)))

    def send(self, blocks: BlockRange, *, damage: bool = False) -> Slot:
        slot, data = self.slots.pop(0), self.payload(blocks)
        assert self.write(data[:9] + bytes([data[9] ^ 1]) + data[10:] if damage else data, slot)
        self.tell(blocks, slot)
        return slot

    def finish(self) -> None:
        self._sock.sendall(protocol.encode_done(self.transfer, Done(0, b"abcd", PROMPT_NAME)))

    def send_all(self) -> None:
        for layer in range(LAYERS):
            self.send(BlockRange(layer, 0, BLOCKS))
        self.finish()


@pytest.fixture
def lie(kit: SimpleNamespace) -> Iterator[Callable[..., tuple[Any, str]]]:
    opened: list[Any] = []

    def build(play: Play, *, verify: bool = True) -> tuple[Any, str]:
        def script(peer: ScriptedPeer, sock: socket.socket) -> None:
            liar = Liar(peer, sock)
            liar.greet()
            liar.await_order()
            play(liar, sock)

        pair = kit.Pair(verify=verify, transport="Mooncake")
        peer = ScriptedPeer(pair, script)
        opened.extend((pair, peer))
        return pair, peer.endpoint

    yield build
    for each in opened:
        each.close()


def test_the_scripted_peer_is_a_good_one(lie: Any, kit: SimpleNamespace) -> None:
    pair, endpoint = lie(lambda liar, sock: (liar.send_all(), liar.read()))
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))
    assert pair.arrived(0, 8)
    assert list(pair.client.stats().transports) == ["Mooncake"]


@pytest.mark.parametrize("verify", [True, False], ids=["verify", "verify-false"])
def test_what_was_damaged_in_its_slot_is_asked_for_again(lie: Any, kit: SimpleNamespace, verify: bool) -> None:
    """Also without `spec.kv.verify`: whoever reaches the engine can write."""

    def play(liar: Liar, sock: socket.socket) -> None:
        liar.send(BlockRange(0, 0, BLOCKS), damage=True)
        for layer in range(1, LAYERS):
            liar.send(BlockRange(layer, 0, BLOCKS))
        liar.finish()
        kind, body = liar.read()
        assert kind is FrameKind.RESEND
        (wanted,) = protocol.decode_resend(body)
        assert (wanted.layer, wanted.first, wanted.count) == (0, 0, 1)
        liar.send(wanted)
        liar.finish()
        liar.read()

    pair, endpoint = lie(play, verify=verify)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))
    assert pair.arrived(0, 8)
    assert pair.client.stats().integrity_failures["block"] == 1


def test_a_slot_that_is_said_to_be_written_and_is_not_leaves_nothing(lie: Any, kit: SimpleNamespace) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        for _ in range(3):
            for layer in range(LAYERS):
                liar.tell(BlockRange(layer, 0, BLOCKS), liar.slots.pop(0))
            liar.finish()
            liar.read()

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "damaged 3 times" in pair.decode.failed[0][2]
    assert pair.untouched


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda slot: Slot(slot.number, slot.epoch + 1), "was not granted"),
        (lambda slot: Slot(99, slot.epoch), "was not granted"),
    ],
    ids=["another-epoch", "another-slot"],
)
def test_a_slot_that_is_not_the_peers_ends_the_connection(
    lie: Any, kit: SimpleNamespace, spoil: Callable[[Slot], Slot], words: str
) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        liar.tell(BlockRange(0, 0, 1), spoil(liar.slots[0]))
        sock.recv(1)

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert words in pair.decode.failed[0][2]
    assert pair.untouched


@pytest.mark.parametrize("bad", [BlockRange(3, 0, 1), BlockRange(0, 8, 1), BlockRange(0, 7, 2), BlockRange(0, 1, 1)])
def test_blocks_that_were_not_ordered_land_nowhere(lie: Any, kit: SimpleNamespace, bad: BlockRange) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        slot, data = liar.slots.pop(0), bytes([7]) * (512 * bad.count)
        assert liar.write(data, slot)
        liar.tell(bad, slot, data=data)
        sock.recv(1)

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32, cached=8))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "ordered were" in pair.decode.failed[0][2]
    assert pair.untouched


def test_more_than_a_slot_holds_ends_the_connection(lie: Any, kit: SimpleNamespace) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        ranges = (BlockRange(0, 0, 8),) * 512  # 2 MiB
        body = Landed(liar.slots[0], ranges, array("Q", bytes(8 * 4096)), 0)
        sock.sendall(encode_landed(liar.transfer, body))
        sock.recv(1)

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed) or pair.client.stats().integrity_failures["block"] > 0)
    kit.eventually(lambda: bool(pair.decode.failed))
    assert pair.untouched


def test_nothing_lands_after_cancel_whatever_is_written(lie: Any, kit: SimpleNamespace) -> None:
    """The engine goes on writing into slots that it was granted, and the peer goes on saying so."""
    go, ended, results = threading.Event(), threading.Event(), list[bool]()

    def play(liar: Liar, sock: socket.socket) -> None:
        liar.send(BlockRange(0, 0, 4))
        go.wait(30)
        for layer in range(LAYERS):
            slot = liar.slots.pop(0)
            results.append(liar.write(liar.payload(BlockRange(layer, 0, BLOCKS)), slot))
            liar.tell(BlockRange(layer, 0, BLOCKS), slot)
        liar.finish()
        old = liar.transfer
        while liar.transfer == old:
            liar.read()
        sock.sendall(protocol.encode_text(FrameKind.FAILED, liar.transfer, "that was all"))
        ended.set()
        sock.recv(1)

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.target.layers[0][4].any()))
    pair.client.cancel("a", 1)
    before = [layer.clone() for layer in pair.target.layers]
    go.set()
    pair.client.start(pair.order(endpoint, tokens=4, name="b"))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert all(bool((a == b).all()) for a, b in zip(before, pair.target.layers, strict=True))
    assert pair.decode.done == []
    assert results == [True] * LAYERS
    assert ended.is_set()


def test_a_write_that_comes_after_the_connection_meets_nobodys_memory(lie: Any, kit: SimpleNamespace) -> None:
    """As of a worker that was frozen: its engine is still connected, and refused."""
    go, results = threading.Event(), list[bool]()

    def play(liar: Liar, sock: socket.socket) -> None:
        slot = liar.send(BlockRange(0, 0, 4))
        sock.shutdown(socket.SHUT_RDWR)
        go.wait(30)
        results.append(liar.write(bytes([9]) * 4096, slot))

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    held = pair.client.stats().held_slots
    assert held >= 1
    before = [layer.clone() for layer in pair.target.layers]
    go.set()
    kit.eventually(lambda: bool(results))
    assert results == [False]
    assert all(bool((a == b).all()) for a, b in zip(before, pair.target.layers, strict=True))


def test_pieces_that_are_lost_come_again_in_other_slots(lie: Any, kit: SimpleNamespace) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        lost = liar.slots.pop(0)
        liar.tell(BlockRange(0, 0, BLOCKS), lost, lost=True)
        for layer in range(1, LAYERS):
            liar.send(BlockRange(layer, 0, BLOCKS))
        liar.finish()
        kind, body = liar.read()
        assert kind is FrameKind.RESEND
        for wanted in protocol.decode_resend(body):
            liar.send(wanted)
        liar.finish()
        assert liar.read()[0] is FrameKind.RELEASE
        assert lost.number not in [slot.number for slot in liar.slots]

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.done))
    assert pair.arrived(0, 8)


def test_an_engine_that_cannot_write_is_given_up_with_a_sentence(lie: Any, kit: SimpleNamespace) -> None:
    def play(liar: Liar, sock: socket.socket) -> None:
        for _ in range(4):
            liar.tell(BlockRange(0, 0, 1), liar.slots.pop(0), lost=True)
        sock.recv(1)

    pair, endpoint = lie(play)
    pair.client.start(pair.order(endpoint, tokens=32))
    kit.eventually(lambda: bool(pair.decode.failed))
    assert "could not write to 127.0.0.1:" in pair.decode.failed[0][2]
    pair.client.start(pair.order(endpoint, name="b"))
    kit.eventually(lambda: len(pair.decode.failed) == 2)
    assert "Mooncake is asked for (spec.kv.transport), and" in pair.decode.failed[1][2]
    assert "could not write" in (pair.client.stats().fallback or "")


# Decode workers that lie.

SLOTS = (Slot(0, 1),)


@pytest.mark.parametrize(
    ("transport", "grant"),
    [
        ("TCP", Grant("127.0.0.1:15000", 1 << 40, 1 << 20, SLOTS)),
        ("Mooncake", Grant("127.0.0.2:15000", 1 << 40, 1 << 20, SLOTS)),
        ("Mooncake", Grant("localhost:15000", 1 << 40, 1 << 20, SLOTS)),
        ("Mooncake", Grant("127.0.0.1:15000", 1 << 40, 64, SLOTS)),
        ("Mooncake", Grant("127.0.0.1:15000", 1 << 40, 1 << 20, ())),
    ],
    ids=["not-offered", "another-address", "a-name", "too-small", "none"],
)
def test_grants_that_a_prefill_worker_does_not_take(kit: SimpleNamespace, transport: str, grant: Grant) -> None:
    pair = kit.Pair(transport=transport)
    try:
        with stranger(pair) as sock:
            sock.sendall(protocol.encode_hello(replace(pair.identity, offers=(Offer(MOONCAKE, "tcp"),))))
            assert read_frame(sock)[0].kind is FrameKind.HELLO
            sock.sendall(encode_grant(7, grant))
            assert sock.recv(1) == b""
        pair.client.start(pair.order(f"127.0.0.1:{pair.server.port}"))
        kit.eventually(lambda: bool(pair.decode.done))
    finally:
        pair.close()


def test_slots_of_an_engine_that_is_not_there_cost_this_order_alone(kit: SimpleNamespace) -> None:
    """The engine says so at once; the blocks are told to be lost, and the worker serves others."""
    pair = kit.Pair(transport="Mooncake")
    try:
        with stranger(pair) as sock:
            sock.sendall(protocol.encode_hello(replace(pair.identity, offers=(Offer(MOONCAKE, "tcp"),))))
            assert read_frame(sock)[0].kind is FrameKind.HELLO
            sock.sendall(encode_grant(7, Grant("127.0.0.1:1", 1 << 40, 1 << 20, SLOTS)))
            sock.sendall(protocol.encode_prefill(7, pair.order(tokens=8)))
            kinds = [read_frame(sock)[0].kind for _ in range(1)]
            assert kinds == [FrameKind.LANDED]
            pair.client.start(pair.order(f"127.0.0.1:{pair.server.port}"))
            kit.eventually(lambda: bool(pair.decode.done))
    finally:
        pair.close()
