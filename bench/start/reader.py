"""Starters that take a model's chunks from one worker and throw them away: `python -m bench.start.reader FACTS`.

They cost little beside a worker that is measured: the kernel drops what arrives (`MSG_TRUNC`). A line on standard input
begins or ends the reading by turns; an answer on standard output says how many bytes came while it lasted.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from dataclasses import dataclass

from tandem_api.keys import KeyRing
from tandem_worker.host.files.wire import LENGTH, PeerQuestion, decode_header, encode, read_exact
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose

_LIMIT_SECONDS = 60.0
_PIECE = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderFacts:
    port: int
    key: str
    layout: str
    """Fingerprint."""
    num_chunks: int
    count: int
    """Of starters."""


class Reader(threading.Thread):
    def __init__(self, facts: ReaderFacts, number: int, reading: threading.Event) -> None:
        super().__init__(daemon=True)
        self._facts, self._next, self._reading = facts, number * facts.num_chunks // facts.count, reading
        self.received = 0
        self._buffer = bytearray(_PIECE)

    def run(self) -> None:
        while True:
            self._reading.wait()
            # A source leaves whoever asks nothing for long: each sitting has a connection of its own.
            with dial("127.0.0.1", self._facts.port, _ring(self._facts.key), Purpose.FILES, seconds=10) as sock:
                sock.settimeout(_LIMIT_SECONDS)
                while self._reading.is_set():
                    self.received += self._ask(sock)

    def _ask(self, sock: socket.socket) -> int:
        self._next = (self._next + 1) % self._facts.num_chunks
        question = PeerQuestion(kind="chunk", layout=self._facts.layout, asker="0" * 16, chunk=self._next)
        sock.sendall(encode(question))
        (size,) = LENGTH.unpack(_read(sock, LENGTH.size))
        header = decode_header(_read(sock, size))
        if not header.known:
            raise RuntimeError(f"chunk {self._next} is not there")
        left = header.payload
        while left:
            left -= _drop(sock, left, self._buffer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return header.payload


def _ring(key: str) -> KeyRing:
    return KeyRing(primary="a", keys={"a": bytes.fromhex(key)})


def _read(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    read_exact(sock, memoryview(data), _LIMIT_SECONDS, float("inf"))
    sock.settimeout(_LIMIT_SECONDS)
    return data


def _drop(sock: socket.socket, most: int, buffer: bytearray) -> int:
    """Seldom and much, and nothing is written: a starter elsewhere costs the worker's cores nothing."""
    wanted = min(most, _PIECE)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
    select.select([sock], [], [], _LIMIT_SECONDS)
    count = sock.recv_into(buffer, wanted, socket.MSG_TRUNC)
    if not count:
        raise ConnectionResetError("the source closed the connection")
    return count


def main(facts: ReaderFacts) -> None:
    os.nice(19)
    reading = threading.Event()
    readers = [Reader(facts, number, reading) for number in range(facts.count)]
    for reader in readers:
        reader.start()
    for _ in sys.stdin:
        if reading.is_set():
            reading.clear()
        else:
            for reader in readers:
                reader.received = 0
            reading.set()
        print(sum(reader.received for reader in readers), flush=True)


if __name__ == "__main__":
    main(ReaderFacts(**json.loads(sys.argv[1])))
