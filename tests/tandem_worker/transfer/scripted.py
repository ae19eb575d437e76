"""A scripted prefill worker on a raw socket."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

from tandem_api.keys import OPEN_RING, KeyRing
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import GREETING_BYTES, PROOF_BYTES, Acceptor, Purpose
from tandem_worker.transfer import protocol
from tandem_worker.transfer.checksums import sum_blocks
from tandem_worker.transfer.protocol import BlockRange, Done, FrameKind

PROMPT_NAME = b"name of a prompt"
LAYERS, BLOCKS = 3, 8
EVERY_KIND = frozenset(FrameKind)


class ScriptedPeer:
    """Plays the prefill worker, one script per connection; the last one serves all further connections."""

    def __init__(self, pair: Any, *scripts: Callable[[ScriptedPeer, socket.socket], None]) -> None:
        self.pair = pair
        self._scripts = list(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.resends = 0
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
            thread = threading.Thread(target=self._play, args=(script, sock), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _play(self, script: Callable[[ScriptedPeer, socket.socket], None], sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError, EOFError):
            accept_handshake(sock)
            script(self, sock)

    def close(self) -> None:
        self._stopping.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(30)

    def greet(self, sock: socket.socket) -> None:
        assert read_frame(sock)[0].kind is FrameKind.HELLO
        sock.sendall(protocol.encode_hello(self.pair.identity))

    def block(self, layer: int, index: int) -> bytes:
        return self.pair.source.layers[layer][15 - index].numpy().tobytes()

    def blocks(self, transfer: int, blocks: BlockRange, *, damage: bool = False) -> bytes:
        payload = [self.block(blocks.layer, blocks.first + i) for i in range(blocks.count)]
        sums = sum_blocks([(memoryview(part),) for part in payload], transfer, blocks.layer, blocks.first)
        body = bytearray(b"".join(payload))
        if damage:
            body[len(body) // 2] ^= 0x10
        return protocol.encode_blocks_head(transfer, blocks, sums, len(body)) + bytes(body)

    def answer(self, transfer: int) -> list[bytes]:
        frames = [self.blocks(transfer, BlockRange(layer, 0, BLOCKS)) for layer in range(LAYERS)]
        return [*frames, protocol.encode_done(transfer, Done(0, b"abcd", PROMPT_NAME))]


def read_exact(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def accept_handshake(sock: socket.socket) -> None:
    """As `Door` does."""
    acceptor = Acceptor(OPEN_RING, Purpose.KV)
    sock.sendall(acceptor.challenge(read_exact(sock, GREETING_BYTES)))
    sock.sendall(acceptor.accept(read_exact(sock, PROOF_BYTES)))


def read_frame(sock: socket.socket) -> tuple[protocol.Header, bytes]:
    header = protocol.decode_header(read_exact(sock, protocol.HEADER_BYTES), EVERY_KIND)
    body = read_exact(sock, header.length)
    if header.kind is not FrameKind.BLOCKS:
        protocol.check_body(header, body)
    return header, body


def read_order(sock: socket.socket) -> int:
    while True:
        header, _ = read_frame(sock)
        if header.kind is FrameKind.PREFILL:
            return header.transfer


def serve_well(peer: ScriptedPeer, sock: socket.socket) -> None:
    peer.greet(sock)
    while True:
        sock.sendall(b"".join(peer.answer(read_order(sock))))


def stranger(pair: Any) -> socket.socket:
    """At the door of `pair`'s prefill worker and past it: it has the key, or none is configured."""
    return enter(pair.serve())


def enter(endpoint: str, ring: KeyRing = OPEN_RING) -> socket.socket:
    host, _, port = endpoint.partition(":")
    sock = dial(host, int(port), ring, Purpose.KV, seconds=60)
    sock.settimeout(30)
    return sock
