"""One TCP connection of the transport, owned by one thread.

The owner reads frames as straight-line code. Whenever it would have to wait for bytes it sends what is queued, runs
what other threads have posted, and otherwise sleeps in `poll`: there is no second thread per connection, no lock around
the socket, and nothing spins. `read_some` never waits: who reads into key-value blocks holds a guard around that one
call, so that whoever wants to withdraw the blocks waits for a copy in memory, never for the network.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol

from tandem_worker.transfer.errors import TransferError

BUFFER_BYTES = 4 << 20
_MAX_IOVECS = 512
_MAX_BURST_BYTES = 8 << 20
_SCRATCH_BYTES = 256 << 10
_FIRST_BYTES = 64 << 10
_MAX_UNSENT = 4096
_PATIENCE_PER_BYTE = 1e-6


def configure(sock: socket.socket) -> None:
    """No delay, large buffers, and a kernel that notices a vanished host within seconds.

    A buffer size that is set by hand ends the kernel's own tuning and is cut to `net.core.[rw]mem_max`, which is small
    by default: it is set only where the machine's owner has raised that limit.

    Raises TransferError when the connection is gone.
    """
    try:
        _set_options(sock)
    except OSError as error:
        raise TransferError(f"the connection was lost: {error.strerror or error}") from error


def _set_options(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, limit in ((socket.SO_SNDBUF, "wmem_max"), (socket.SO_RCVBUF, "rmem_max")):
        if _kernel_limit(limit) >= BUFFER_BYTES:
            sock.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 6000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _kernel_limit(name: str) -> int:
    try:
        return int(Path("/proc/sys/net/core", name).read_text())
    except (OSError, ValueError):  # not visible in every network namespace
        return 0


class Events(Protocol):
    """What the owner of a channel does while it waits. All are called on the owner's thread."""

    def on_posted(self) -> None:
        """Another thread called `wake`."""
        ...

    def on_tick(self, now: float) -> float | None:
        """Check deadlines. Returns the seconds until the next check; None when there is nothing to watch."""
        ...

    def next_frame(self) -> Sequence[memoryview | bytes] | None:
        """More to send; None when there is nothing. Asked for only when everything before it has left."""
        ...


class Waker:
    """Lets other threads interrupt the owner's sleep. One write per sleep, however often it is called."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.signalled = False
        """To be read by the owner."""
        self._closing = threading.Lock()

    @property
    def fd(self) -> int:
        """Descriptor that is readable when the owner is to wake; -1 after `close`."""
        return self._fd

    def wake(self) -> None:
        """Any thread. What was published before this call is seen by the owner after its next `clear`."""
        if self.signalled:
            return
        with self._closing:  # the number of a closed descriptor may already be another file's
            if self._fd >= 0:
                self.signalled = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """Owner only, before it looks at what was published."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self.signalled = False

    def close(self) -> None:
        """Close the descriptor. May be called again, and beside `wake` on other threads."""
        with self._closing:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)


class Channel:
    def __init__(
        self, sock: socket.socket, waker: Waker, events: Events, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._waker = waker
        self._events = events
        self._clock = clock
        self._out: deque[memoryview] = deque()
        self._poll = select.poll()
        self._poll.register(waker.fd, select.POLLIN)
        self._poll.register(sock, select.POLLIN)
        self._wants_output = False
        self._frame_seconds: float | None = None
        """How long the owner may still wait for the rest of a frame; None between frames."""
        self.bytes_sent = 0
        self.last_received = clock()

    def queue(self, *buffers: bytes | memoryview) -> None:
        """Send after what is queued already. The buffers must not change until they have left."""
        self._out.extend(memoryview(buffer) for buffer in buffers if len(buffer))

    def say(self, frame: bytes) -> None:
        """Queue a small frame. Raises TransferError when so many wait that the peer does not read."""
        if len(self._out) >= _MAX_UNSENT:
            raise TransferError(f"the peer does not take what is sent: {len(self._out)} pieces wait")
        self.queue(frame)

    @property
    def has_output(self) -> bool:
        """Something waits for the peer to take it."""
        return bool(self._out)

    @property
    def bytes_waiting(self) -> int:
        """Bytes that wait for the peer to take them."""
        return sum(len(buffer) for buffer in self._out)

    def read_header(self, num_bytes: int, seconds: float) -> bytearray:
        """The next frame's first bytes. From the first of them on the frame has `seconds`."""
        self._frame_seconds = None
        data = bytearray(num_bytes)
        self._fill(memoryview(data), seconds)
        return data

    def extend_deadline(self, num_bytes: int) -> None:
        """So much more of the frame is to come."""
        if self._frame_seconds is not None:
            self._frame_seconds += num_bytes * _PATIENCE_PER_BYTE

    def read(self, num_bytes: int) -> bytearray:
        """Exactly that many bytes. Memory is taken as they arrive: a length that is only announced costs nothing."""
        data = bytearray(min(num_bytes, _FIRST_BYTES))
        self._fill(memoryview(data))
        while (start := len(data)) < num_bytes:
            data.extend(bytes(min(num_bytes - start, start)))
            self._fill(memoryview(data)[start:])
        return data

    def _fill(self, pending: memoryview, seconds: float | None = None) -> None:
        while pending:  # of no bytes there is nothing to read: a read of none looks like the end of the stream
            if received := self.read_some([pending]):
                pending = pending[received:]
                if seconds is not None and self._frame_seconds is None:
                    self._frame_seconds = seconds
            else:
                self.wait()

    def read_some(self, buffers: Sequence[memoryview]) -> int:
        """One non-blocking read; 0 when nothing is there. Raises TransferError at the end of the stream."""
        try:
            received = self._sock.recvmsg_into(buffers[:_MAX_IOVECS])[0]
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise TransferError(f"the connection was lost: {error.strerror or error}") from error
        if received == 0:
            raise TransferError("the peer closed the connection")
        self.last_received = self._clock()
        return received

    def discard(self, num_bytes: int) -> None:
        """Read this many bytes and forget them, waiting where they have not come. Raises TransferError."""
        scratch = memoryview(bytearray(min(num_bytes, _SCRATCH_BYTES)))
        while num_bytes > 0:
            if received := self.read_some([scratch[:num_bytes]]):
                num_bytes -= received
            else:
                self.wait()

    def service(self) -> None:
        """Run what was posted and send what fits, without waiting. Between frames, so that a flood cannot starve it."""
        if self._waker.signalled:
            self._waker.clear()
            self._events.on_posted()
        self._send()

    def wait(self) -> None:
        """Until bytes may have arrived. Sends, runs posted work and checks deadlines meanwhile."""
        while True:
            self.service()
            delay = self._events.on_tick(self._clock())
            wants_output = bool(self._out)
            if wants_output != self._wants_output:
                self._poll.modify(self._sock, select.POLLIN | (select.POLLOUT if wants_output else 0))
                self._wants_output = wants_output
            ready = self._sleep(delay)
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                return

    def rest(self, seconds: float) -> None:
        """Read nothing for so long, between frames. Sends, runs posted work and checks deadlines meanwhile.

        Raises TransferError when the peer closes the connection: what it has sent before is not read any more.
        """
        if seconds <= 0:
            return
        self._frame_seconds = None
        until = self._clock() + seconds
        while (left := until - self._clock()) > 0:
            self.service()
            delay = self._events.on_tick(self._clock())
            self._poll.modify(self._sock, select.POLLRDHUP | (select.POLLOUT if self._out else 0))
            ready = self._sleep(left if delay is None else min(left, delay))
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                raise TransferError("the peer closed the connection")
        self._poll.modify(self._sock, select.POLLIN)
        self._wants_output = False

    def _sleep(self, delay: float | None) -> dict[int, int]:
        """Raises TransferError when a frame that has begun takes too long.

        Only time in this sleep counts, and no more of it than was asked for: this process may be stopped too.
        """
        if self._frame_seconds is None:
            return self._look(None if delay is None else max(0.0, delay))
        if self._frame_seconds <= 0:
            raise TransferError("the peer began a frame and did not end it in time")
        seconds = self._frame_seconds + 1e-3 if delay is None else max(0.0, min(delay, self._frame_seconds + 1e-3))
        began = self._clock()
        ready = self._look(seconds)
        self._frame_seconds -= min(seconds, self._clock() - began)
        return ready

    def _look(self, seconds: float | None) -> dict[int, int]:
        ready = dict(self._poll.poll(None if seconds is None else seconds * 1000))
        if self._waker.fd in ready:
            # Whoever wakes says so before it writes. Where the owner cleared in between, the descriptor alone knows,
            # and no sleep would last until it is read.
            self._waker.signalled = True
        return ready

    def _send(self) -> None:
        """Until the socket is full or nothing is left; after a burst the owner first looks at what has come in."""
        burst = 0
        while True:
            if not self._out:
                if (frame := self._events.next_frame()) is None:
                    return
                self.queue(*frame)
            if burst >= _MAX_BURST_BYTES:
                return
            try:
                sent = self._sock.sendmsg(list(islice(self._out, _MAX_IOVECS)))
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise TransferError(f"the connection was lost: {error.strerror or error}") from error
            burst += sent
            self._drop_sent(sent)

    def _drop_sent(self, sent: int) -> None:
        self.bytes_sent += sent
        while sent > 0:
            head = self._out.popleft()
            if sent < len(head):
                self._out.appendleft(head[sent:])
            sent -= len(head)

    def close(self) -> None:
        """Close the socket; what is queued is not sent."""
        self._out.clear()
        self._sock.close()


def advance(buffers: list[memoryview], received: int) -> None:
    """Drop the first `received` bytes of `buffers`."""
    index = 0
    while index < len(buffers) and received >= len(buffers[index]):
        received -= len(buffers[index])
        index += 1
    del buffers[:index]
    if received:
        buffers[0] = buffers[0][received:]
