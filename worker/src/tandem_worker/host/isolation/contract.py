"""What is agreed between the caller and the isolated processes: limits, errors, and the frames they exchange.

IsolationError
├── LimitError         the call ran into one of its limits; the input is to blame, so it is not tried again
├── FunctionError      the function raised: a defect, or an input that it does not take
├── QueueFullError     too many calls wait already
└── UnavailableError   no process can be had: it cannot be started, or it died under the call
"""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from tandem_worker.host.errors import WorkerError

Function = Callable[[bytes], bytes]

_HEAD = struct.Struct("<BQ")
_SMALL_BYTES = 4096


class IsolationError(WorkerError):
    """Root of what a call raises."""


class LimitError(IsolationError):
    """`limit` is one of the `Limits` by name, `deadline`, or `crash`; the message is the end of a sentence about it."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


class FunctionError(IsolationError):
    """The message has the exception's type and text."""


class QueueFullError(IsolationError):
    """Nothing was done."""


class UnavailableError(IsolationError):
    """The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may take."""

    memory_bytes: int
    """Address space beyond what the setup takes."""
    stack_bytes: int
    cpu_seconds: float
    answer_bytes: int

    def explain(self, number: int) -> LimitError:
        """What a signal that ended a job says about its input."""
        match number:
            case signal.SIGALRM:
                return LimitError("deadline", "takes longer than its deadline")
            case signal.SIGPROF | signal.SIGXCPU:
                return LimitError("cpu_seconds", f"takes more than {self.cpu_seconds:g} s of computing")
            case signal.SIGSEGV | signal.SIGBUS:
                # Libraries in C end so too where they do not look whether they got the memory they asked for.
                room = (
                    f"{self.stack_bytes >> 10} KiB of stack or takes more than {self.memory_bytes >> 20} MiB of memory"
                )
                return LimitError("stack_bytes", f"is nested too deeply for {room}")
            case signal.SIGABRT:
                return LimitError("memory_bytes", f"takes more than {self.memory_bytes >> 20} MiB of memory")
            case _:
                return LimitError("crash", f"ended its process with signal {number}")


class AnswerStatus(IntEnum):
    """First byte of an answer."""

    DONE = 0
    RAISED = 1
    OUT_OF_MEMORY = 2


class PeerGoneError(Exception):
    """The other end closed in the middle of a frame, or before it."""


def write_frame(sock: socket.socket, status: AnswerStatus, body: bytes, deadline: float | None = None) -> None:
    """Raises OSError, TimeoutError."""
    _set_timeout(sock, deadline)
    head = _HEAD.pack(status, len(body))
    if len(body) <= _SMALL_BYTES:
        sock.sendall(head + body)  # whole or not at all, for one who closes after the head
    else:
        sock.sendall(head)
        sock.sendall(body)


def read_frame(sock: socket.socket, most: int, deadline: float | None = None) -> tuple[AnswerStatus, bytes]:
    """`deadline` is on the monotonic clock, `most` counts bytes. Raises PeerGoneError, TimeoutError, LimitError."""
    status, size = _HEAD.unpack(_read(sock, _HEAD.size, deadline))
    if size > most:
        raise LimitError("answer_bytes", f"makes more than {most >> 20} MiB")
    return AnswerStatus(status), bytes(_read(sock, size, deadline))


def _read(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Memory grows as bytes arrive."""
    data = bytearray()
    while len(data) < size:
        _set_timeout(sock, deadline)
        try:
            part = sock.recv(min(size - len(data), 1 << 20))
        except ConnectionError as error:
            raise PeerGoneError from error
        if not part:
            raise PeerGoneError
        data += part
    return data


def _set_timeout(sock: socket.socket, deadline: float | None) -> None:
    if deadline is None:
        sock.settimeout(None)
        return
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    sock.settimeout(remaining)
