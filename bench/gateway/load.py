"""Clients for the measurements, one event loop: answers are counted, timed and thrown away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

SAMPLE = 512
"""Different requests of a scenario."""


@dataclass(frozen=True, slots=True)
class RequestShape:
    """What a request asks for."""

    tokens: int
    interval_us: int
    """Between two tokens."""
    prompt_bytes: int
    steps: bool = False
    """Tokens of all such requests come at the same moments."""

    def build(self, number: int) -> bytes:
        """The whole request; three quarters of the prompt are shared in 16 groups."""
        shared = f"group {number % 16} ".ljust(self.prompt_bytes * 3 // 4, "s")
        content = shared + f"question {number} ".ljust(self.prompt_bytes // 4, "q")
        fields = {
            "model": "m",
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "max_tokens": self.tokens,
            "seed": self.interval_us,
        }
        body = json.dumps(fields | ({"temperature": 1} if self.steps else {})).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


@dataclass(slots=True)
class LoadCounts:
    """What the clients have seen since the last `clear`."""

    requests: int = 0
    chunks: int = 0
    errors: int = 0
    ttft: list[float] = field(default_factory=list)
    """Seconds."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between two reads of a stream."""

    def clear(self) -> None:
        self.requests = self.chunks = 0
        self.ttft.clear()
        self.gaps.clear()


class Client(asyncio.Protocol):
    """One connection that sends a request whenever it is told to."""

    def __init__(self, counts: LoadCounts, on_answered: Callable[[Client], None]) -> None:
        self.counts = counts
        self.on_answered = on_answered
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.socket = transport.get_extra_info("socket")

    def send(self, request: bytes) -> None:
        self.waiting = True
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        counts, now = self.counts, time.perf_counter()
        # A gateway that leaves Nagle's algorithm on is not charged 40 ms for a delayed acknowledgement.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        if self.waiting:
            self.waiting = False
            counts.ttft.append(now - self.sent_at)
            counts.errors += not data.startswith(b"HTTP/1.1 200")
        else:
            counts.gaps.append(now - self.heard_at)
        self.heard_at = now
        counts.chunks += data.count(b"token ")
        if data.endswith(b"0\r\n\r\n"):
            counts.requests += 1
            self.on_answered(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.counts.errors += not self.closing

    def close(self) -> None:
        self.closing = True
        self.transport.close()


class Load:
    """Clients of one target."""

    def __init__(self, port: int, shape: RequestShape) -> None:
        self.port = port
        self.counts = LoadCounts()
        self.clients: list[Client] = []
        self._requests = [shape.build(number) for number in range(SAMPLE)]
        self._number = 0
        self._idle: list[Client] = []

    async def connect(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            _, client = await loop.create_connection(
                lambda: Client(self.counts, self._idle.append), "127.0.0.1", self.port
            )
            self.clients.append(client)
            self._idle.append(client)

    def keep_busy(self) -> None:
        """From now on every client sends the next request as soon as an answer is complete."""
        for client in self.clients:
            client.on_answered = self._send
            self._send(client)

    async def arrive(self, rate: float, seconds: float) -> None:
        """Send requests at even times, so many a second, whoever has answered by then."""
        loop = asyncio.get_running_loop()
        due, end = loop.time(), loop.time() + seconds
        while due < end:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not self._idle:
                await self.connect(1)
            self._send(self._idle.pop())
            due += 1.0 / rate

    def close(self) -> None:
        for client in self.clients:
            client.close()

    def _send(self, client: Client) -> None:
        self._number += 1
        client.send(self._requests[self._number % SAMPLE])
