"""One connection of the control channel: framed messages both ways, a heartbeat, one end.

A frame is its length (4 bytes, big-endian, without itself), one byte of kind, and the payload.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""A process that dies closes its connection at once; a machine that vanishes is noticed by its silence."""
_MAX_FRAME = 1 << 30
_HEADER = struct.Struct("!IB")


class Kind(IntEnum):
    HELLO = 1
    """Follower: who I am."""
    REFUSED = 2
    """Leader: not you, or not now; with the reason."""
    WELCOME = 3
    """Leader: everybody is here; where the ranks' own connections meet."""
    REPORT = 4
    """Follower: what I have, for example how much memory."""
    PLAN = 5
    """Leader: what was decided from everyone's reports."""
    STEP = 6
    """Leader: compute this."""
    HEARTBEAT = 7
    TRANSFER = 11
    """Leader: about moving KV blocks, in its place among the steps."""
    ANSWER = 12
    """Follower: about moving KV blocks."""
    LEAVING = 8
    """Follower: my pod is asked to end; finish what is running."""
    FAILED = 9
    """Either: I end, for this reason, and so must you."""
    STOP = 10
    """Leader: the orderly end."""


_KINDS = frozenset(int(kind) for kind in Kind)


class Loss(NamedTuple):
    """Why a group ended."""

    message: str
    reason: str = "GroupLost"
    """For the termination message: CamelCase. A rank that cannot start brings its own."""

    @classmethod
    def parse(cls, payload: bytes) -> Loss:
        content = parse_object(payload)
        return cls(str(content.get("message")), str(content.get("reason", "GroupLost")))

    def encode(self) -> bytes:
        return encode_object(self._asdict())


class LinkClosedError(Exception):
    """The connection is gone; the message says how it ended."""


class Link:
    """`send` may be called from any thread, `receive` from one."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_SECONDS)
        self._socket = connection
        self._lock = threading.Lock()
        self.peer_address: str = connection.getpeername()[0]
        self._closed = threading.Event()
        self._ended = threading.Event()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises LinkClosedError."""
        frame = _HEADER.pack(len(payload) + 1, kind) + payload
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            raise LinkClosedError(f"nothing can be sent any more: {error}") from error

    def send_object(self, kind: Kind, content: Mapping[str, Any]) -> None:
        self.send(kind, encode_object(content))

    def receive(self) -> tuple[Kind, bytes]:
        """The next message that is not a heartbeat. Raises LinkClosedError."""
        try:
            return self._receive()
        except LinkClosedError:
            self._ended.set()
            raise

    def await_end(self, timeout: float) -> bool:
        """Whether `receive`, on its thread, has come to the end of the connection."""
        return self._ended.wait(timeout)

    def _receive(self) -> tuple[Kind, bytes]:
        while True:
            length, kind = _HEADER.unpack(self._read(_HEADER.size))
            if not 1 <= length <= _MAX_FRAME or kind not in _KINDS:
                raise LinkClosedError("something else than a Tandem worker speaks there")
            payload = self._read(length - 1)
            if kind != Kind.HEARTBEAT:
                return Kind(kind), payload

    def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        view, filled = memoryview(buffer), 0
        while filled < count:
            try:
                received = self._socket.recv_into(view[filled:])
            except TimeoutError as error:
                raise LinkClosedError(f"it has been silent for {SILENCE_SECONDS:g} s") from error
            except OSError as error:
                raise LinkClosedError(f"the connection broke: {error}") from error
            if not received:
                raise LinkClosedError("it closed its connection")
            filled += received
        return bytes(buffer)

    def start_heartbeat(self) -> None:
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        with contextlib.suppress(LinkClosedError):  # whoever receives notices the end
            while not self._closed.wait(HEARTBEAT_SECONDS):
                self.send(Kind.HEARTBEAT)

    def hurry(self, seconds: float) -> None:
        """From now on nothing waits longer than this."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.settimeout(seconds)

    def close(self) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def encode_object(content: Mapping[str, Any]) -> bytes:
    return orjson.dumps(content)


def parse_object(payload: bytes) -> dict[str, Any]:
    """A message's JSON object. Raises LinkClosedError: who sends anything else is not understood any further."""
    try:
        content = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise LinkClosedError(f"it sent what is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise LinkClosedError("it sent what is not a JSON object")
    return content
