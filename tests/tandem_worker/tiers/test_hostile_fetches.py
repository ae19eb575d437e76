"""Who has the key and lost its mind: what it may make a worker keep, and holders that answer otherwise than asked."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tandem_api.keys import open_ring
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.transfer import fetches, protocol
from tandem_worker.transfer.errors import QuotaError, TransferError
from tandem_worker.transfer.fetches import FetchOrder
from tandem_worker.transfer.prefill.quotas import FETCHED_SECONDS, Account, Ledger, Quotas
from tandem_worker.transfer.protocol import FrameKind, Header

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.peer_rig import SLOT_BYTES, PeerRig
from tests.tandem_worker.tiers.rig import wait_until
from tests.tandem_worker.tiers.test_peers import MakePeer, make_peer, make_prompt

__all__ = ["make_peer"]


def read_exact(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("the peer closed the connection")
        data += part
    return data


def read_frame(sock: socket.socket) -> tuple[Header, bytes]:
    header = protocol.decode_header(read_exact(sock, protocol.HEADER_BYTES), frozenset(FrameKind))
    return header, read_exact(sock, header.length)


@contextmanager
def enter(holder: PeerRig) -> Iterator[socket.socket]:
    """Past the door, as a worker that has said who it is."""
    sock = dial("127.0.0.1", holder.server.port, open_ring(), Purpose.KV, seconds=60)
    sock.settimeout(60)
    with contextlib.closing(sock):
        sock.sendall(protocol.encode_hello(holder.terms.identity))
        assert read_frame(sock)[0].kind is FrameKind.HELLO
        yield sock


def order(holder: PeerRig, names: list[bytes], transfer: int = 7, **changes: Any) -> bytes:
    wanted = FetchOrder(transfer=transfer, key=holder.terms.key.digest, names=tuple(names), seconds=5.0)
    return fetches.encode_fetch(replace(wanted, **changes))


def is_dropped(sock: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        while sock.recv(65536):
            pass
    return True


def test_blocks_of_another_build_are_refused_in_words(make_peer: MakePeer) -> None:
    holder = make_peer()
    with enter(holder) as sock:
        sock.sendall(order(holder, [bytes(16)], key=bytes(16)))
        header, body = read_frame(sock)
        assert (header.kind, header.transfer) == (FrameKind.FAILED, 7)
        assert "of another model, revision, layout, shard or format" in protocol.decode_text(body)
        sock.sendall(order(holder, [bytes(16)], transfer=8))
        assert read_frame(sock)[0].kind is FrameKind.FETCHED  # the connection is good for others


def test_who_asks_for_more_than_its_share_is_told_so(make_peer: MakePeer) -> None:
    """However many names a fetch has, one is taken after silence; the next one is not."""
    holder = make_peer()
    with enter(holder) as sock:
        sock.sendall(order(holder, [bytes(16)] * 40_000))
        assert read_frame(sock)[0].kind is FrameKind.FETCHED
        sock.sendall(order(holder, [bytes(16)], transfer=8))
        header, body = read_frame(sock)
        assert header.kind is FrameKind.FAILED
        assert "has asked for too many blocks of late" in protocol.decode_text(body)


def test_names_that_nobody_knows_bring_nothing(make_peer: MakePeer) -> None:
    holder = make_peer()
    holder.run("a", make_prompt(1))
    with enter(holder) as sock:
        sock.sendall(order(holder, [bytes([number] * 16) for number in range(200)]))
        header, body = read_frame(sock)
        assert (header.kind, fetches.decode_fetched(body)) == (FrameKind.FETCHED, 0)


@pytest.mark.parametrize(
    "frame",
    [
        protocol.encode_frame(FrameKind.FETCH, 1, b""),
        protocol.encode_frame(FrameKind.FETCH, 1, bytes(21)),
        protocol.encode_frame(FrameKind.FETCHED, 1, bytes(4)),
        fetches.encode_slots_head(1, 0, 1, 0),
        bytes(64),
    ],
)
def test_nonsense_ends_the_connection_and_nothing_else(make_peer: MakePeer, frame: bytes) -> None:
    holder = make_peer()
    with enter(holder) as sock:
        sock.sendall(frame)
        assert is_dropped(sock)
    prompt = make_prompt(1)
    assert holder.run("a", prompt) == greedy_answer(prompt, 8)


def test_a_worker_without_prefill_role_takes_no_orders(make_peer: MakePeer) -> None:
    prompt = RemotePrefill(
        request_id="r", generation=1, token_ids=(1, 2, 3), num_cached_tokens=0, block_ids=(), endpoints=(),
        cache_salt="", priority=0,
    )  # fmt: skip
    holder = make_peer()
    with enter(holder) as sock:
        sock.sendall(protocol.encode_prefill(3, prompt))
        header, body = read_frame(sock)
        assert header.kind is FrameKind.FAILED
        assert "takes no orders" in protocol.decode_text(body)


def test_who_does_not_read_what_it_asked_for_is_dropped_and_keeps_nothing(make_peer: MakePeer) -> None:
    holder = make_peer(num_blocks=4096)
    prompt = make_prompt(1, 4001)
    holder.run("a", prompt, max_tokens=1)
    names = holder.engine._scheduler.blocks.cache
    wanted = [names.name_of(block) for block in range(1, 1001) if names.is_named(block)]
    with enter(holder) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(order(holder, wanted, seconds=0.2))
        wait_until(lambda: holder.server.stats().connections == 0)
        wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
        assert not holder.server._ledger._fetches


def test_a_fetch_that_is_cancelled_keeps_nothing(make_peer: MakePeer) -> None:
    holder = make_peer()
    holder.run("a", make_prompt(1))
    names = holder.engine._scheduler.blocks.cache
    wanted = [names.name_of(block) for block in range(1, 11)]
    with enter(holder) as sock:
        for transfer in range(50):
            sock.sendall(order(holder, wanted, transfer=transfer) + protocol.encode_cancel(transfer))
        sock.sendall(order(holder, wanted, transfer=99))
        while (frame := read_frame(sock))[0].transfer != 99:
            pass
        assert frame[0].kind in (FrameKind.SLOTS, FrameKind.FAILED)
    wait_until(lambda: holder.engine._scheduler.blocks.num_held == 0)
    wait_until(lambda: not holder.server._ledger._fetches)


def test_the_same_number_twice_ends_the_connection(make_peer: MakePeer) -> None:
    holder = make_peer()
    gate = threading.Event()
    holder.engine._send(lambda: gate.wait(60) and None)
    with enter(holder) as sock:
        sock.sendall(order(holder, [bytes(16)]) + order(holder, [bytes(16)]))
        assert is_dropped(sock)
    gate.set()


def test_several_that_are_late_at_once_are_all_told_so(make_peer: MakePeer) -> None:
    holder = make_peer()
    gate = threading.Event()
    holder.engine._send(lambda: gate.wait(60) and None)
    with enter(holder) as sock:
        sock.sendall(order(holder, [bytes(16)], seconds=0.05) + order(holder, [bytes(16)], transfer=8, seconds=0.05))
        told = [read_frame(sock)[0] for _ in range(2)]
        assert [(header.kind, header.transfer) for header in told] == [(FrameKind.FAILED, 7), (FrameKind.FAILED, 8)]
        gate.set()
        sock.sendall(order(holder, [bytes(16)], transfer=9))
        assert read_frame(sock)[0].kind is FrameKind.FETCHED


def test_quotas_of_fetches() -> None:
    now = [0.0]
    limits = Quotas(
        tokens=10, tokens_per_session=10, fair_tokens=10, fetches=3, fetches_per_session=2, fetched_tokens=100
    )
    ledger = Ledger(limits, lambda: now[0])
    one, two = ledger.open("a", proven=True), ledger.open("b", proven=True)
    one.take_fetch(30)
    one.take_fetch(30)
    with pytest.raises(QuotaError, match="2 fetches open"):
        one.take_fetch(1)
    two.take_fetch(10)
    with pytest.raises(QuotaError, match="3 fetches are open"):
        two.take_fetch(10)
    one.return_fetch()
    with pytest.raises(QuotaError, match="too many blocks of late"):
        one.take_fetch(50)
    now[0] += FETCHED_SECONDS / 2
    one.take_fetch(50)
    one.close()
    two.take_fetch(80)
    assert ledger._fetches == 2
    two.close()
    assert ledger._fetches == 0
    assert ledger.refusals["fetches"] == 2
    assert ledger.refusals["fetched"] == 1


def test_who_leaves_and_comes_again_may_ask_for_no_more() -> None:
    now = [0.0]
    limits = Quotas(tokens=10, tokens_per_session=10, fair_tokens=10, fetched_tokens=100)
    ledger = Ledger(limits, lambda: now[0])

    def enter_as(worker: str) -> Account:
        account = ledger.open("a", proven=True)
        account.identify(worker)
        return account

    for _ in range(2):
        one = enter_as("w-0")
        one.take_fetch(100)
        one.close()
        one = enter_as("w-0")
        with pytest.raises(QuotaError, match="too many blocks of late"):
            one.take_fetch(10)
        one.close()
        other = enter_as("w-1")
        other.take_fetch(10)
        now[0] += FETCHED_SECONDS
        other.close()
    assert not ledger._fetched


Answer = Callable[[socket.socket, FetchOrder], None]


@contextmanager
def liar(puller: PeerRig, answer: Answer) -> Iterator[str]:
    """A holder that answers as it likes."""
    from tandem_worker.host.peers.door import Door
    from tandem_worker.host.vitals import Vitals

    def serve(sock: socket.socket, _: str) -> None:
        def run() -> None:
            with contextlib.suppress(OSError, ConnectionError), contextlib.closing(sock):
                sock.settimeout(60)
                read_frame(sock)
                sock.sendall(protocol.encode_hello(puller.terms.identity))
                while True:
                    header, body = read_frame(sock)
                    answer(sock, fetches.decode_fetch(body, header.transfer))

        threading.Thread(target=run, daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    door = Door(listener, ring=open_ring, purpose=Purpose.KV, admit=serve, vitals=Vitals())
    door.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        door.close()


def slots(first: int, count: int, payload: bytes, transfer: int | None = None) -> Answer:
    def answer(sock: socket.socket, order: FetchOrder) -> None:
        number = order.transfer if transfer is None else transfer
        sock.sendall(fetches.encode_slots_head(number, first, count, len(payload)) + payload)
        sock.sendall(fetches.encode_fetched(order.transfer, count))

    return answer


@pytest.mark.parametrize(
    ("answer", "damaged"),
    [
        (slots(0, 1, bytes(SLOT_BYTES)), 1),
        (slots(0, 10, bytes(10 * SLOT_BYTES)), 1),
        (slots(1, 1, bytes(SLOT_BYTES)), 1),
        (slots(0, 11, bytes(11 * SLOT_BYTES)), 1),
        (slots(0, 1, bytes(SLOT_BYTES + 1)), 1),
        (slots(0, 1, bytes(SLOT_BYTES), transfer=1), 1),
        (slots(0, 1000, b""), 1),
        (lambda sock, order: sock.sendall(fetches.encode_fetched(order.transfer, 3)), 1),
        (lambda sock, order: sock.sendall(protocol.encode_heartbeat(1)), 0),
        (lambda sock, order: sock.close(), 0),
    ],
)
def test_a_holder_that_lies_is_found_out(make_peer: MakePeer, answer: Answer, damaged: int) -> None:
    puller = make_peer()
    prompt = make_prompt(1)
    with liar(puller, answer) as endpoint:
        assert puller.run("a", prompt, kv_source=endpoint) == greedy_answer(prompt, 8)
        assert puller.run("b", make_prompt(2), kv_source=endpoint) == greedy_answer(make_prompt(2), 8)
    assert puller.cached("a") == 0
    assert puller.source.stats().integrity_failures == damaged


def test_a_block_of_another_prompt_or_place_is_found_out(make_peer: MakePeer) -> None:
    """Sound blocks, sealed as others."""
    holder, puller = make_peer(), make_peer()
    holder.run("a", make_prompt(1))
    other = make_prompt(2)
    names = holder.engine._scheduler.blocks.cache
    stolen = [names.name_of(block) for block in range(1, 11)]

    def swap(sock: socket.socket, order: FetchOrder) -> None:
        with enter(holder) as source:
            changed = FetchOrder(transfer=order.transfer, key=order.key, names=tuple(stolen), seconds=5.0)
            source.sendall(fetches.encode_fetch(changed))
            while True:
                header, body = read_frame(source)
                fields = protocol.encode_header(
                    header.kind, header.transfer, header.length, body[:4], header.num_blocks
                )
                sock.sendall(fields + body)
                if header.kind is FrameKind.FETCHED:
                    return

    with liar(puller, swap) as endpoint:
        assert puller.run("b", other, kv_source=endpoint) == greedy_answer(other, 8)
    assert (puller.cached("b"), puller.source.stats().integrity_failures) == (0, 1)


def test_what_is_written_is_read() -> None:
    names = tuple(bytes([number] * 16) for number in range(20))
    wanted = FetchOrder(transfer=5, key=bytes(range(16)), names=names, seconds=1.25)
    body = fetches.encode_fetch(wanted)[protocol.HEADER_BYTES :]
    assert fetches.decode_fetch(body, 5) == wanted
    assert fetches.decode_fetch(fetches.encode_fetch(FetchOrder(
        transfer=5, key=bytes(16), names=names, seconds=1e9))[protocol.HEADER_BYTES :], 5,
    ).seconds == protocol.MAX_FETCH_SECONDS  # fmt: skip
    for cut in (0, 19, 20, 21, len(body) - 1):
        with pytest.raises(TransferError):
            fetches.decode_fetch(body[:cut], 5)
