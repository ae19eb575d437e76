"""What a short request costs in the gateway's own Python: calls, and microseconds without any socket.

    python -m bench.gateway.calls

Calls are the same on every machine and at any load, so they show what a change costs where times do not; the lowest of
many batches is shown of the times. Both ends are stand-ins for a transport that take what is written and drop it. Some
requests are always under way: what is asked of workers' queues, and moved in them, costs nothing for one alone.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvloop
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import parse_settings
from tandem_gateway.upstream.http1_connection import WorkerConnection

from bench.gateway.load import RequestShape
from bench.gateway.stub import CHUNK, END, HEAD

WARM_UP = 600
COUNTED = 100
BATCHES, BATCH = 200, 32
IN_FLIGHT = 8
REQUESTS = [RequestShape(1, 0, 200).build(number) for number in range(512)]


class Socket:
    def __init__(self) -> None:
        self.quiet, self.other = os.pipe()

    def fileno(self) -> int:
        return self.quiet

    def setsockopt(self, *_: object) -> None: ...


class Transport:
    """Takes everything at once. `on_write` is told."""

    def __init__(self, socket: Socket, on_write: Callable[[], None]) -> None:
        self._socket = socket
        self._on_write = on_write

    def write(self, _: bytes) -> None:
        self._on_write()

    def get_extra_info(self, name: str) -> Socket | None:
        return self._socket if name == "socket" else None

    def set_write_buffer_limits(self, **_: int) -> None: ...

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        raise RuntimeError("the gateway gave up a connection")


def build_request(*, pairs: bool) -> Callable[[int], None]:
    """What sends the n-th request through a gateway with two workers, or two of each role, and answers the oldest that
    is under way."""
    workers = [f"--worker=role=decode,url=127.0.0.1:{9000 + number}" for number in range(2)]
    if pairs:
        workers += [f"--worker=role=prefill,url=127.0.0.1:{9100 + number}" for number in range(2)]
    settings = parse_settings(["--served-name", "m", "--no-access-log", *workers])
    server, socket = Server(settings), Socket()
    server.apply_workers(list(settings.workers))
    asked: deque[WorkerConnection] = deque()
    clients: list[Any] = [ClientConnection(server.reception) for _ in range(IN_FLIGHT)]
    for client in clients:
        client.connection_made(Transport(socket, lambda: None))
    for endpoint in server.gateway.scheduler.endpoints.values():
        link: Any = server.gateway.link(endpoint)
        for _ in range(IN_FLIGHT):
            connection: Any = WorkerConnection(link)
            connection.connection_made(Transport(socket, lambda connection=connection: asked.append(connection)))
            link.release(connection, asyncio.get_running_loop().time())
    answer = HEAD + CHUNK + END

    def send(number: int) -> None:
        if len(asked) == IN_FLIGHT:  # the oldest, whose client is the one that asks next
            asked.popleft().data_received(answer)
        clients[number % IN_FLIGHT].data_received(REQUESTS[number % len(REQUESTS)])

    return send


async def count_calls(*, pairs: bool) -> float:
    """Calls of Python functions per request."""
    send = build_request(pairs=pairs)
    for number in range(WARM_UP):
        send(number)
    calls = 0

    def profile(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    for number in range(COUNTED):
        send(WARM_UP + number)
    sys.setprofile(None)
    return calls / COUNTED


async def time_requests(*, pairs: bool) -> float:
    """Microseconds per request, in the fastest batch."""
    send = build_request(pairs=pairs)
    best = float("inf")
    for batch in range(BATCHES):
        began = time.perf_counter()
        for number in range(BATCH):
            send(batch * BATCH + number)
        best = min(best, time.perf_counter() - began)
    return best / BATCH * 1e6


async def main() -> None:
    for name, pairs in (("tandem", False), ("tandem, PD", True)):
        calls, took = await count_calls(pairs=pairs), await time_requests(pairs=pairs)
        print(f"{name:12s} {calls:6.1f} Python calls, {took:5.1f} us per short request, without sockets")


if __name__ == "__main__":
    uvloop.run(main())
