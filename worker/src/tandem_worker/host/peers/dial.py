"""The connecting end: name resolution, connect and handshake within one deadline."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from tandem_api.keys import KeyRing

from tandem_worker.host.errors import AuthenticationError
from tandem_worker.host.peers.handshake import ACCEPTANCE_BYTES, CHALLENGE_BYTES, Initiator, Purpose

_MAX_LOOKUPS = 8
"""Names being resolved at once: a resolver that hangs must not collect threads."""
_lookups = threading.BoundedSemaphore(_MAX_LOOKUPS)


def dial(
    host: str,
    port: int,
    ring: KeyRing,
    purpose: Purpose,
    *,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> socket.socket:
    """A blocking socket on which both ends have proven the key.

    `seconds` covers everything: resolving `host` (a name or an address), connecting and the handshake.

    Raises:
        OSError: nobody is reached in time (TimeoutError), refuses, or is lost on the way.
        AuthenticationError: the peer went away where it had to accept our proof, or does not prove the key itself.
    """
    deadline = clock() + seconds
    sock = _connect(host, port, deadline, clock)
    try:
        _shake_hands(sock, Initiator(ring, purpose), ring.primary, deadline, clock)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def _connect(host: str, port: int, deadline: float, clock: Callable[[], float]) -> socket.socket:
    """The first address that answers. Each gets its share of the time: a silent one leaves some for the next."""
    error: OSError | None = None
    addresses = resolve(host, port, _left(deadline, clock))
    for index, (family, kind, protocol, _, address) in enumerate(addresses):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(_left(deadline, clock) / (len(addresses) - index))
            sock.connect(address)
        except OSError as problem:
            sock.close()
            error = problem
            continue
        return sock
    raise error or OSError(f"{host} has no address")


def _left(deadline: float, clock: Callable[[], float]) -> float:
    """Raises TimeoutError when nothing is left."""
    seconds = deadline - clock()
    if seconds <= 0:
        raise TimeoutError("timed out")
    return seconds


def _shake_hands(
    sock: socket.socket, ours: Initiator, key_id: str, deadline: float, clock: Callable[[], float]
) -> None:
    def read(num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            sock.settimeout(_left(deadline, clock))
            part = sock.recv(num_bytes - len(data))
            if not part:
                raise ConnectionResetError("the peer closed the connection")
            data += part
        return data

    sock.settimeout(_left(deadline, clock))
    sock.sendall(ours.greeting)
    proof = ours.prove(read(CHALLENGE_BYTES))
    sock.settimeout(_left(deadline, clock))
    sock.sendall(proof)
    try:
        acceptance = read(ACCEPTANCE_BYTES)
    except ConnectionError as error:
        raise AuthenticationError(f"the peer does not accept our proof of key {key_id!r}") from error
    ours.check(acceptance)


def resolve(host: str, port: int, seconds: float) -> list[Any]:
    """Stream addresses of `host` as `socket.getaddrinfo` gives them. Raises OSError, TimeoutError.

    The system's resolver takes no timeout, so names are resolved on threads of their own; addresses need none.
    """
    if not 0 < port < 1 << 16:  # the system would take it modulo 65536
        raise OSError(f"{port} is not a port")
    deadline = time.monotonic() + seconds
    try:
        with contextlib.suppress(socket.gaierror):
            return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except UnicodeError as error:  # a part of the name is empty or longer than 63 characters
        raise OSError(f"{host[:80]!r} is not a host's name") from error
    if not _lookups.acquire(timeout=seconds):
        raise TimeoutError(f"{host} was not resolved: the system's resolver does not answer")
    found: Future[list[Any]] = Future()

    def look_up() -> None:
        try:
            found.set_result(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except Exception as error:
            found.set_exception(error)
        finally:
            _lookups.release()

    try:
        threading.Thread(target=look_up, name="resolve", daemon=True).start()
    except RuntimeError as error:  # no more threads
        _lookups.release()
        raise OSError(f"{host} cannot be resolved: {error}") from error
    try:
        return found.result(max(0.0, deadline - time.monotonic()))
    except FutureTimeoutError:
        raise TimeoutError(f"{host} was not resolved within {seconds:.1f} s") from None
