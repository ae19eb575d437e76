"""The accepting end: one thread takes connections in and lets through those that prove the key.

Strangers cost little: a descriptor and some hundred bytes each, `max_waiting` of them at most, `seconds` long. No
thread is started and nothing is said for them but a nonce. When all places are taken, the address that holds the most
gives one up: one stranger pushes out itself, and who has proven the key is not among those who wait. The thread goes on
where the system refuses it something: without descriptors it gives up a spare one to turn peers away at once, which are
then free to go elsewhere, instead of leaving them in the backlog until they time out.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import select
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_api.keys import KeyRing

from tandem_worker.host.errors import AuthenticationError, ThreadStartError
from tandem_worker.host.peers.handshake import GREETING_BYTES, PROOF_BYTES, Acceptor, Purpose, Refusal
from tandem_worker.host.vitals import Vitals

logger = logging.getLogger(__name__)

_OUT_OF_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_NOT_LISTENING = {errno.EBADF, errno.EINVAL, errno.ENOTSOCK}
_PAUSE_SECONDS = 0.2
_REFUSALS_LOGGED_EVERY = 10.0
_ACCEPTS_PER_TURN = 32

Admit = Callable[[socket.socket, str], None]
"""Gets a non-blocking socket on which both ends have proven the key, and `host:port` of the peer. It owns the socket.
Called on the door's thread: it hands the connection on and returns."""


@dataclass(slots=True)
class _Waiting:
    """A connection that has not proven anything yet."""

    sock: socket.socket
    name: str
    source: str
    acceptor: Acceptor
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    challenged: bool = False


class Door:
    """Admits peers from a listening socket."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        ring: Callable[[], KeyRing],
        purpose: Purpose,
        admit: Admit,
        vitals: Vitals,
        seconds: float = 3.0,
        max_waiting: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds`: for the whole handshake. A connection beyond `max_waiting` pushes one out: of the address with the
        most connections, the one that waits longest."""
        self._listener = listener
        self._ring, self._purpose, self._admit, self._vitals = ring, purpose, admit, vitals
        self._seconds, self._max_waiting, self._clock = seconds, max_waiting, clock
        self._waiting: OrderedDict[int, _Waiting] = OrderedDict()
        self._by_source: dict[str, OrderedDict[int, None]] = {}
        """Descriptors of `_waiting` by where they come from, in order of arrival."""
        self._poll = select.poll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._paused_until: float | None = None
        self._is_short = False
        """The system had no descriptor for a connection, and has not had one since."""
        self._closed = False
        self._ending = threading.Lock()
        self._next_report = 0.0
        self._unreported: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter(dict.fromkeys(Refusal, 0))
        """Connections that were not let through, by `Refusal`. Grows only; read by metrics."""
        self._source = f"{purpose} port {listener.getsockname()[1]}"
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Raises ThreadStartError."""
        self._listener.setblocking(False)
        try:
            self._thread = self._vitals.start_thread(f"{self._purpose}-door", self._run, is_over=lambda: self._closed)
        except ThreadStartError:
            self.close()
            raise

    def close(self) -> None:
        """Close the listener and whoever waits. Any thread."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            if self._wake >= 0:  # the number of a closed descriptor may already be another file's
                os.eventfd_write(self._wake, 1)
        if self._thread is None:
            self._end()
        elif self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    # The door's thread.

    def _run(self) -> None:
        self._poll.register(self._wake, select.POLLIN)
        self._poll.register(self._listener, select.POLLIN)
        listening = self._listener.fileno()
        try:
            while not self._closed:
                ready = self._poll.poll(self._patience() * 1000)
                for fd, _ in ready:
                    if fd == listening:
                        self._accept()
                    elif fd in self._waiting:
                        self._listen_to(fd)
                self._turn_away_late()
                self._resume()
        finally:
            self._end()

    def _patience(self) -> float:
        """Seconds until something must be looked at without being asked."""
        deadlines = [waiting.deadline for waiting in list(self._waiting.values())[:1]]
        if self._paused_until is not None:
            deadlines.append(self._paused_until)
        elif self._is_short:
            deadlines.append(self._clock() + _PAUSE_SECONDS)
        return max(0.0, min(deadlines, default=self._clock() + 60.0) - self._clock()) + 1e-3

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closed:
                    return
                if error.errno in _NOT_LISTENING:
                    raise
                self._do_without(error)
                return
            try:
                self._take(sock, address[0], address[1])
            except BaseException:
                sock.close()
                raise

    def _do_without(self, error: OSError) -> None:
        """The system has nothing left for a new connection, or this one was gone before it was accepted."""
        if error.errno not in _OUT_OF_RESOURCES:
            logger.debug("%s: a connection was lost before it was accepted: %s", self._source, error)
            return
        self._vitals.set(self._source, f"connections are turned away: {error.strerror}")
        self._is_short = True
        self._refuse(Refusal.TOO_MANY, "no descriptor", "the system refuses a descriptor")
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
            with contextlib.suppress(OSError):  # nobody waits any more, or another thread was faster
                for _ in range(_ACCEPTS_PER_TURN):
                    self._listener.accept()[0].close()
        self._reopen_spare()
        self._paused_until = self._clock() + _PAUSE_SECONDS
        self._poll.unregister(self._listener)

    def _reopen_spare(self) -> None:
        if self._spare is None:
            with contextlib.suppress(OSError):  # tried again with the next pause
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _resume(self) -> None:
        if self._paused_until is not None and self._clock() >= self._paused_until:
            self._paused_until = None
            self._poll.register(self._listener, select.POLLIN)
        if self._is_short and self._paused_until is None:
            self._reopen_spare()
            if self._spare is not None and _has_descriptors():
                self._is_short = False
                self._vitals.clear(self._source)

    def _take(self, sock: socket.socket, host: str, port: int) -> None:
        source = _source_of(host)
        if len(self._waiting) >= self._max_waiting:
            self._drop(self._find_greediest(source), Refusal.TOO_MANY, "too many wait")
        sock.setblocking(False)
        acceptor = Acceptor(self._ring(), self._purpose)
        deadline = self._clock() + self._seconds
        self._waiting[sock.fileno()] = _Waiting(sock, f"{host}:{port}", source, acceptor, deadline)
        self._by_source.setdefault(source, OrderedDict())[sock.fileno()] = None
        self._poll.register(sock, select.POLLIN)

    def _find_greediest(self, newcomer: str) -> int:
        """The oldest connection of the address with the most; where addresses have as many, `newcomer`'s own."""

        def size(source: str) -> tuple[int, bool]:
            return len(self._by_source[source]) + (source == newcomer), source == newcomer

        return next(iter(self._by_source[max(self._by_source, key=size)]))

    def _listen_to(self, fd: int) -> None:
        waiting = self._waiting[fd]
        wanted = PROOF_BYTES if waiting.challenged else GREETING_BYTES
        try:
            data = waiting.sock.recv(wanted - len(waiting.received))
            if not data:
                self._drop(fd, Refusal.GONE, "it closed the connection")
                return
            waiting.received += data
            if len(waiting.received) == wanted:
                self._answer(fd, waiting)
        except (BlockingIOError, InterruptedError):
            return
        except AuthenticationError as error:
            self._drop(fd, Refusal(error.reason), str(error))
        except OSError as error:
            self._drop(fd, Refusal.GONE, error.strerror or str(error))

    def _answer(self, fd: int, waiting: _Waiting) -> None:
        """Raises AuthenticationError, OSError. The answers always fit an empty send buffer."""
        message = bytes(waiting.received)
        waiting.received.clear()
        if not waiting.challenged:
            waiting.sock.send(waiting.acceptor.challenge(message))
            waiting.challenged = True
            return
        waiting.sock.send(waiting.acceptor.accept(message))
        self._release(fd)
        try:
            self._admit(waiting.sock, waiting.name)
        except Exception:
            logger.exception("%s: the connection from %s could not be taken in", self._source, waiting.name)
            waiting.sock.close()

    def _turn_away_late(self) -> None:
        now = self._clock()
        for fd, waiting in list(self._waiting.items()):
            if waiting.deadline > now:
                return  # they wait in the order of their deadlines
            self._drop(fd, Refusal.TOO_SLOW, f"no proof within {self._seconds:g} s")

    def _release(self, fd: int) -> _Waiting:
        self._poll.unregister(fd)
        waiting = self._waiting.pop(fd)
        of_source = self._by_source[waiting.source]
        del of_source[fd]
        if not of_source:
            del self._by_source[waiting.source]
        return waiting

    def _drop(self, fd: int, reason: Refusal, why: str) -> None:
        waiting = self._release(fd)
        self._refuse(reason, waiting.name, why)
        waiting.sock.close()

    def _refuse(self, reason: Refusal, name: str, why: str) -> None:
        """Count it, and tell it now and then: a flood must not fill the log."""
        self.refusals[reason] += 1
        self._unreported[reason] += 1
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + _REFUSALS_LOGGED_EVERY
            logger.warning(
                "%s: a connection from %s was refused: %s",
                self._source,
                name,
                why,
                extra={"refused": {str(kind): count for kind, count in self._unreported.items()}},
            )
            self._unreported.clear()

    def _end(self) -> None:
        for waiting in self._waiting.values():
            waiting.sock.close()
        self._waiting.clear()
        self._by_source.clear()
        self._listener.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None
        with self._ending:
            os.close(self._wake)
            self._wake = -1


def _source_of(host: str) -> str:
    """Tell whose share a connection counts to. Of IPv6, whoever has one address has all that share its first 64
    bits."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def _has_descriptors() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
