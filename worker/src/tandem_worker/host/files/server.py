"""The serving end: one thread answers all starters, from the page cache, at a rate that streams do not notice.

It holds the interpreter for microseconds at a time: bytes go from file to socket inside the kernel (`sendfile`), and
between two pieces the thread sleeps. It gives way to the engine's threads where cores are short (niceness).
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_api.keys import KeyRing

from tandem_worker.host.files.limit import ByteBucket
from tandem_worker.host.files.wire import (
    LENGTH,
    MAX_QUESTION,
    PeerQuestion,
    ReplyHeader,
    WireError,
    decode_question,
    encode,
)
from tandem_worker.host.peers.door import Door
from tandem_worker.host.peers.handshake import Purpose
from tandem_worker.host.vitals import Vitals

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
_PIECE = 512 << 10
_STALL_SECONDS = 20.0
"""A starter that takes nothing for so long is left alone."""
_QUIET_SECONDS = 60.0
"""So is one that asks nothing."""
_NICENESS = 10


@dataclass(slots=True)
class FileAnswer:
    """What to send: a header with its payload, then a piece of a file."""

    header: ReplyHeader
    payload: bytes = b""
    fd: int = -1
    offset: int = 0
    size: int = 0


@dataclass(slots=True)
class _Connection:
    sock: socket.socket
    name: str
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    fd: int = -1
    offset: int = 0
    left: int = 0
    blocked: bool = False

    @property
    def busy(self) -> bool:
        return bool(self.unsent) or self.left > 0


class FileServer:
    """Answers questions with what `answer` says. `rate` is bytes per second, over all connections, as it is now."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        ring: Callable[[], KeyRing],
        vitals: Vitals,
        answer: Callable[[PeerQuestion, str], FileAnswer],
        rate: Callable[[], float],
    ) -> None:
        """`answer` gets a question and the asker's address, on the server's thread; it may raise OSError."""
        self._answer, self._rate, self._vitals = answer, rate, vitals
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._wake, select.POLLIN)
        self._new: queue.SimpleQueue[tuple[socket.socket, str]] = queue.SimpleQueue()
        self._connections: dict[int, _Connection] = {}
        self._turns: deque[int] = deque()
        """Connections with bytes to send that take them."""
        self._bucket = ByteBucket(time.monotonic())
        self._closed = False
        self._thread: threading.Thread | None = None
        self.bytes_sent = 0
        """Bytes of files. Grows only; read by metrics."""
        self.door = Door(listener, ring=ring, purpose=Purpose.FILES, admit=self._admit, vitals=vitals)

    def start(self) -> None:
        """Raises ThreadStartError."""
        self._thread = self._vitals.start_thread("files", self._run, is_over=lambda: self._closed)
        self.door.start()

    def close(self) -> None:
        """End all connections. Any thread."""
        self.door.close()
        self._closed = True
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=2.0)
            if self._thread.is_alive():  # it still polls the descriptor
                return
        os.close(self._wake)

    def _admit(self, sock: socket.socket, name: str) -> None:
        self._new.put((sock, name))
        os.eventfd_write(self._wake, 1)

    # The server's thread.

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        try:
            while not self._closed:
                for fd, event in self._poll.poll(self._patience() * 1000):
                    if fd == self._wake:
                        os.eventfd_read(self._wake)
                        self._take_in()
                    elif (connection := self._connections.get(fd)) is not None:
                        self._look_at(connection, event)
                self._send()
                self._end_late()
        finally:
            for connection in list(self._connections.values()):
                self._end(connection)

    def _patience(self) -> float:
        if self._turns:
            return max(0.001, self._bucket.wait(self._rate()))
        now = time.monotonic()
        return max(0.0, min((c.deadline for c in self._connections.values()), default=now + 60.0) - now) + 1e-3

    def _take_in(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                sock, name = self._new.get_nowait()
                if len(self._connections) >= MAX_CONNECTIONS:
                    logger.info("%s is turned away: %d starters are being served", name, MAX_CONNECTIONS)
                    sock.close()
                    continue
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connections[sock.fileno()] = _Connection(sock, name, time.monotonic() + _QUIET_SECONDS)
                self._poll.register(sock, select.POLLIN)

    def _look_at(self, connection: _Connection, event: int) -> None:
        if connection.busy:
            if event & (select.POLLERR | select.POLLHUP):
                self._end(connection)
            elif connection.blocked:
                connection.blocked = False
                self._turns.append(connection.sock.fileno())
                self._poll.modify(connection.sock, 0)
            return
        try:
            self._read(connection)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, WireError) as error:
            if not isinstance(error, ConnectionError):
                logger.info("%s is answered no more: %s", connection.name, error)
            self._end(connection)

    def _read(self, connection: _Connection) -> None:
        """No byte more than the question's: another one is read when this one is answered."""
        received = connection.received
        wanted = LENGTH.size
        if len(received) >= LENGTH.size:
            wanted += LENGTH.unpack_from(received)[0]
        data = connection.sock.recv(wanted - len(received))
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
        if len(received) == LENGTH.size:
            if not 0 < LENGTH.unpack(received)[0] <= MAX_QUESTION:
                raise WireError("its question is too long")
        elif len(received) == wanted > LENGTH.size:
            question = decode_question(received[LENGTH.size :])
            received.clear()
            self._reply(connection, self._answer(question, connection.name.rpartition(":")[0]))

    def _reply(self, connection: _Connection, answer: FileAnswer) -> None:
        header = answer.header.model_copy(update={"payload": len(answer.payload) + answer.size})
        connection.unsent = memoryview(encode(header) + answer.payload)
        connection.fd, connection.offset, connection.left = answer.fd, answer.offset, answer.size
        connection.deadline = time.monotonic() + _STALL_SECONDS
        connection.blocked = False
        self._turns.append(connection.sock.fileno())
        self._poll.modify(connection.sock, 0)

    def _send(self) -> None:
        """A piece to each in turn, while the bucket has any."""
        for _ in range(len(self._turns)):
            connection = self._connections.get(self._turns.popleft())
            if connection is None:
                continue
            fd = connection.sock.fileno()
            try:
                if not self._send_piece(connection):
                    self._turns.appendleft(fd)
                    return
            except (BlockingIOError, InterruptedError):
                connection.blocked = True
                self._poll.modify(connection.sock, select.POLLOUT)
                continue
            except OSError as error:
                logger.debug("%s is gone: %s", connection.name, error)
                self._end(connection)
                continue
            if connection.busy:
                self._turns.append(fd)
            else:
                connection.deadline = time.monotonic() + _QUIET_SECONDS
                self._poll.modify(connection.sock, select.POLLIN)

    def _send_piece(self, connection: _Connection) -> bool:
        """False when the bucket is empty. Raises OSError."""
        now = time.monotonic()
        if connection.unsent:
            count = connection.sock.send(connection.unsent)
            connection.unsent = connection.unsent[count:]
        if not connection.unsent and connection.left:
            granted = self._bucket.take(min(_PIECE, connection.left), self._rate(), now)
            if not granted:
                return False
            count = 0
            try:
                count = os.sendfile(connection.sock.fileno(), connection.fd, connection.offset, granted)
            finally:
                self._bucket.give_back(granted - count)
            if not count:
                raise OSError("the file is shorter than it was")
            connection.offset += count
            connection.left -= count
            self.bytes_sent += count
        connection.deadline = now + _STALL_SECONDS
        return True

    def _end_late(self) -> None:
        now = time.monotonic()
        for connection in [c for c in self._connections.values() if c.deadline <= now]:
            if connection.busy and not connection.blocked:  # it waits for the bucket, not for the starter
                connection.deadline = now + _STALL_SECONDS
                continue
            self._end(connection)

    def _end(self, connection: _Connection) -> None:
        fd = connection.sock.fileno()
        if fd in self._connections:
            del self._connections[fd]
            self._poll.unregister(fd)
            connection.sock.close()
