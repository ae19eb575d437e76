"""Ports that programs which tests start will bind."""

from __future__ import annotations

import contextlib
import os
import random
import socket

_given: set[int] = set()


def free_port(neighbours: int = 0) -> int:
    """A port that nobody listens on, nor on the `neighbours` after it, and that was not given before: workers bind
    theirs seconds later. The processes of one test run have a range each.

    Below those that the kernel gives to outgoing connections, which would take it before the worker does.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        first = random.randrange(2100) + 15000 + 2125 * number
        ports = range(first, first + 1 + neighbours)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in ports:
                held.enter_context(socket.socket()).bind(("0.0.0.0", port))
            if _given.isdisjoint(ports):
                _given.update(ports)
                return first
