"""One connection of the control channel: framed messages both ways, a heartbeat, one end.

A frame is its length (4 bytes, big-endian, without itself), one byte of kind, and the payload.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import orjson

from tandem_worker.host.nvml import GpuSample, pack, unpack
from tandem_worker.host.vitals import Vitals

HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 30.0
"""A process that dies closes its connection at once; a machine that vanishes is noticed by its silence."""
_FIRST_BYTES = 1 << 16
_PROBLEMS_TOLD = 16
_PROBLEM_CHARACTERS = 500
_HEADER = struct.Struct("!IB")


class MessageKind(IntEnum):
    HELLO = 1
    """Follower: who I am."""
    REFUSED = 2
    """Leader: not you, or not now; with the reason."""
    WELCOME = 3
    """Leader: everybody is here; how the model is cut."""
    REPORT = 4
    """Follower: what I have, for example how much memory."""
    PLAN = 5
    """Leader: what was decided from everyone's reports."""
    STEP = 6
    """Leader: compute this."""
    HEARTBEAT = 7
    """Either: I am here, and this is wrong with me."""
    HEAD = 15
    """Leader: about the draft head, in its place among the steps."""
    TRANSFER = 11
    """Leader: about moving KV blocks, in its place among the steps."""
    MOVES = 16
    """Leader: copy blocks to host memory and back, in its place among the steps."""
    ANSWER = 12
    """Follower: about moving KV blocks."""
    LEAVING = 8
    """Follower: my pod is asked to end; finish what is running."""
    FAILED = 9
    """Either: I end, for this reason, and so must you."""
    STOP = 10
    """Leader: the orderly end."""
    CALL = 13
    """Follower: an operation on the group's table (`group.control.table`)."""
    RESULT = 14
    """Leader: what an operation came to."""


_KINDS = frozenset(int(kind) for kind in MessageKind)
_MiB = 1 << 20
MAX_PAYLOAD: Mapping[MessageKind, int] = {
    MessageKind.HELLO: 4096,
    MessageKind.REFUSED: 1 << 16,
    MessageKind.WELCOME: 1 << 16,
    MessageKind.REPORT: _MiB,
    MessageKind.PLAN: 16 * _MiB,
    MessageKind.STEP: 256 * _MiB,  # block tables of a full batch of the longest contexts, told anew: 4 bytes a block
    MessageKind.HEARTBEAT: 1 << 16,
    MessageKind.HEAD: 256 * _MiB,  # blocks of all texts that are guessed behind
    MessageKind.MOVES: 64 * _MiB,  # 8 bytes a block
    MessageKind.TRANSFER: 16 * _MiB,
    MessageKind.ANSWER: _MiB,
    MessageKind.LEAVING: 0,
    MessageKind.FAILED: 1 << 16,
    MessageKind.STOP: 0,
    MessageKind.CALL: 4 * _MiB,  # addresses of a rank's connections to all others
    MessageKind.RESULT: 4 * _MiB,
}
"""Bytes."""


class Loss(NamedTuple):
    """Why a group ended."""

    message: str
    reason: str = "GroupLost"
    """For the termination message: CamelCase. A rank that cannot start brings its own."""

    @classmethod
    def parse(cls, payload: bytes) -> Loss:
        """Read what `encode` wrote. Raises LinkClosedError when `payload` is no JSON object."""
        content = parse_object(payload)
        return cls(str(content.get("message")), str(content.get("reason", "GroupLost")))

    def encode(self) -> bytes:
        """The payload of the message that tells it: a JSON object of the fields."""
        return encode_object(self._asdict())


class LinkClosedError(Exception):
    """The connection is gone; the message says how it ended."""


class ControlLink:
    """`send` may be called from any thread, `receive` from one. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(SILENCE_SECONDS)
        self._socket = connection
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._broken = False
        self.heard_at = time.monotonic()
        """When the other end last sent something."""
        self.on_heartbeat: Callable[[bytes], None] = lambda payload: None
        """Called on the receiving thread."""

    def send(self, kind: MessageKind, payload: bytes = b"") -> None:
        """Raises LinkClosedError."""
        frame = _HEADER.pack(len(payload) + 1, kind) + payload
        try:
            with self._lock:
                self._socket.sendall(frame)
        except OSError as error:
            self._broken = True
            raise LinkClosedError(f"nothing can be sent any more: {error}") from error

    def send_object(self, kind: MessageKind, content: Mapping[str, Any]) -> None:
        """Send `content` as JSON. Raises LinkClosedError."""
        self.send(kind, encode_object(content))

    def receive(self, expects: Callable[[MessageKind], bool] = lambda kind: True) -> tuple[MessageKind, bytes]:
        """The next message that is not a heartbeat. Raises LinkClosedError, also for one that is not expected now.

        That is seen before anything of it is read.
        """
        try:
            return self._receive(expects)
        except LinkClosedError:
            self._ended.set()
            raise

    def await_end(self, timeout: float) -> bool:
        """Whether `receive`, on its thread, has come to the end of the connection."""
        return self._ended.wait(timeout)

    @property
    def ended(self) -> bool:
        """Whether `receive` has come to the end of the connection, or `close` was called here."""
        return self._ended.is_set() or self._closed.is_set()

    def _receive(self, expects: Callable[[MessageKind], bool]) -> tuple[MessageKind, bytes]:
        while True:
            length, number = _HEADER.unpack(self._read(_HEADER.size))
            if number not in _KINDS:
                raise LinkClosedError("something else than a Tandem worker speaks there")
            kind = MessageKind(number)
            if kind is not MessageKind.HEARTBEAT and not expects(kind):
                raise LinkClosedError(f"it sent {kind.name}, which is not expected now")
            if not 1 <= length <= MAX_PAYLOAD[kind] + 1:
                raise LinkClosedError(f"it sent {kind.name} of {length} bytes; {MAX_PAYLOAD[kind] + 1} are the most")
            payload = self._read(length - 1)
            if kind is not MessageKind.HEARTBEAT:
                return kind, payload
            self.on_heartbeat(payload)

    def _read(self, count: int) -> bytes:
        """Room is made as bytes arrive, not for what is announced; what has begun must not take for ever."""
        buffer, filled, deadline = bytearray(min(count, _FIRST_BYTES)), 0, None
        while filled < count:
            if filled == len(buffer):
                buffer.extend(bytes(min(filled, count - filled)))
            with memoryview(buffer) as view:
                filled += self._read_some(view[filled:])
            deadline = deadline or self.heard_at + SILENCE_SECONDS
            if self.heard_at > deadline:
                raise LinkClosedError(f"a message of it was not complete after {SILENCE_SECONDS:g} s")
        return bytes(buffer)

    def _read_some(self, buffer: memoryview) -> int:
        try:
            received = self._socket.recv_into(buffer)
        except TimeoutError as error:
            raise LinkClosedError(f"it has been silent for {self._socket.gettimeout():g} s") from error
        except OSError as error:
            raise LinkClosedError(f"the connection broke: {error}") from error
        if not received:
            raise LinkClosedError("it closed its connection")
        self.heard_at = time.monotonic()
        return received

    def start_heartbeat(self, vitals: Vitals) -> None:
        """Raises ThreadStartError. What is wrong with this process goes with every beat."""
        vitals.start_thread("heartbeat", self._beat, vitals, is_over=lambda: self._closed.is_set() or self._broken)

    def _beat(self, vitals: Vitals) -> None:
        with contextlib.suppress(LinkClosedError):  # whoever receives notices the end
            while not self._closed.wait(HEARTBEAT_SECONDS):
                self.send(MessageKind.HEARTBEAT, encode_beat(vitals.problems(), vitals.read_gpu()))

    def hurry(self, seconds: float) -> None:
        """From now on nothing waits longer than this."""
        with contextlib.suppress(OSError):  # it is closed already
            self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close the socket; a `receive` that waits raises LinkClosedError. May be called again."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def encode_beat(problems: Sequence[str], gpu: GpuSample) -> bytes:
    """The payload of a heartbeat: a JSON object of at most 16 problems, each cut to 500 characters, and of what the
    sender's GPU tells."""
    told = [problem[:_PROBLEM_CHARACTERS] for problem in problems[:_PROBLEMS_TOLD]]
    return orjson.dumps({"problems": told, "gpu": pack(gpu)})


def parse_beat(payload: bytes) -> tuple[list[str], GpuSample]:
    """Raises LinkClosedError."""
    try:
        content = orjson.loads(payload)
    except orjson.JSONDecodeError as error:
        raise LinkClosedError(f"its heartbeat is not JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("gpu"), dict):
        raise LinkClosedError("its heartbeat is not an object of problems and gpu")
    problems = content.get("problems")
    if not isinstance(problems, list) or not all(isinstance(problem, str) for problem in problems):
        raise LinkClosedError("its heartbeat is not a list of problems")
    return problems, unpack(content["gpu"])


def encode_object(content: Mapping[str, Any]) -> bytes:
    """The payload of messages that carry fields: `content` as a JSON object in UTF-8."""
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
