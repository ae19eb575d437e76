"""Ports that are a test's own: of programs that it starts, of servers that come back to theirs, and of nobody."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import deque

MAX_HELD = 256
"""Ports that a process holds at a time, each by a descriptor: more than those of any test."""
_TRIES = 1000
_held: deque[int] = deque()


def free_port(neighbours: int = 0) -> int:
    """A port that is free on every address of IPv4, as are the `neighbours` after it. Raises OSError where none is.

    This process holds them, bound and not listening, until it has given `MAX_HELD` others: to whoever else looks for a
    port they are taken, and connections to them are refused. Whoever is told of one listens there at any time, on one
    address or on several, and again after that, with SO_REUSEADDR, as servers do.
    """
    for _ in range(_TRIES):
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(socket.socket()) for _ in range(1 + neighbours)]
            sockets[0].bind(("0.0.0.0", 0))
            first: int = sockets[0].getsockname()[1]
            try:
                for number, sock in enumerate(sockets[1:], 1):
                    sock.bind(("0.0.0.0", first + number))
            except (OSError, OverflowError):  # the latter above 65535
                continue
            for sock in sockets:  # only now: what others hold would not be taken for taken
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            stack.pop_all()
        _held.extend(sock.detach() for sock in sockets)
        while len(_held) > MAX_HELD:
            os.close(_held.popleft())
        return first
    raise OSError(f"{1 + neighbours} ports in a row: not in {_TRIES} tries")
