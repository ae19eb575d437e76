"""A connection to a worker that may have chunks."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from tandem_api.keys import KeyRing
from xxhash import xxh3_128_digest

from tandem_worker.host.files.layout import Layout
from tandem_worker.host.files.wire import (
    LENGTH,
    MAX_HEADER,
    NEWS,
    UNKNOWN,
    PeerQuestion,
    ReplyHeader,
    WireError,
    decode_header,
    encode,
    read_exact,
    unpack_news,
)
from tandem_worker.host.peers.dial import dial
from tandem_worker.host.peers.handshake import Purpose

CONNECT_SECONDS = 3.0
STALL_SECONDS = 4.0
"""A source that sends nothing for so long is left."""


class WrongBytesError(Exception):
    """A source sent other bytes than it says, or says what is known to be wrong."""


class PeerLink:
    """One question at a time. All methods raise OSError (TimeoutError), WireError."""

    def __init__(
        self, address: tuple[str, int], layout: Layout, ring: Callable[[], KeyRing], own_id: str, own_port: int
    ) -> None:
        """Connects. Raises also AuthenticationError."""
        self._layout, self._id, self._port = layout, own_id, own_port
        self._version = 0
        self._sock = dial(*address, ring(), Purpose.FILES, seconds=CONNECT_SECONDS)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """End the connection."""
        self._sock.close()

    def news(self) -> tuple[ReplyHeader, list[tuple[int, bytes]]]:
        """What the peer is up to, and what became of its chunks since the last call."""
        header = self._ask("news", time.monotonic() + 2 * STALL_SECONDS, since=self._version)
        # Of every chunk at most one line.
        payload = self._payload(header, self._layout.num_chunks * NEWS.size, time.monotonic() + 2 * STALL_SECONDS)
        if header.known:
            self._version = header.version
        return header, unpack_news(payload, self._layout.num_chunks)

    def chunk(self, index: int, seconds: float) -> tuple[bytearray, bytes] | None:
        """A chunk and its sum, which is right; None where the peer has it no longer. Raises WrongBytesError."""
        deadline = time.monotonic() + seconds
        header = self._ask("chunk", deadline, chunk=index)
        size = self._layout.chunk(index).size
        data = self._payload(header, size, deadline)
        if not header.known:
            return None
        if len(data) != size:
            raise WireError("a chunk of another size came")
        digest = xxh3_128_digest(data)
        told = bytes.fromhex(header.sum)
        if told not in (digest, UNKNOWN):
            raise WrongBytesError(f"chunk {index} is not what its sum says")
        return data, digest

    def _ask(self, kind: str, deadline: float, **fields: int) -> ReplyHeader:
        question = PeerQuestion(kind=kind, layout=self._layout.fingerprint, asker=self._id, port=self._port, **fields)  # pyright: ignore[reportArgumentType]
        self._sock.settimeout(STALL_SECONDS)
        self._sock.sendall(encode(question))
        length = self._read(LENGTH.size, deadline)
        (size,) = LENGTH.unpack(length)
        if not 0 < size <= MAX_HEADER:
            raise WireError("its answer's header is too long")
        return decode_header(self._read(size, deadline))

    def _payload(self, header: ReplyHeader, most: int, deadline: float) -> bytearray:
        if header.payload > most:
            raise WireError("it sends more than was asked for")
        return self._read(header.payload, deadline)

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray(size)
        read_exact(self._sock, memoryview(data), STALL_SECONDS, deadline)
        return data
