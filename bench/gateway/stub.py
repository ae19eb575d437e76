"""Small servers for measurements: `engine` streams tokens without computing any, `prefill` is one that sends a single
token at once, `relay` copies bytes.

usage: stub.py engine PORT | stub.py prefill PORT | stub.py relay PORT TARGET_PORT
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":"token "},"finish_reason":null}]}\n\n'  # noqa: E501
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
INTERVAL = re.compile(rb'"seed": ?(\d+)')
"""Microseconds between tokens."""
STEPS = b'"temperature"'
"""Tokens of all such requests come at the same moments, as those of an engine's steps do."""
ABOUT = {
    b"/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "stub"}]},
    b"model_info": {"model_path": "m", "tokenizer_path": "m", "served_model_name": "m", "is_generation": True},
    b"server_info": {"model_path": "m", "served_model_name": "m", "tp_size": 1, "dp_size": 1, "version": "0.5.9"},
    b"load": [{"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}],
}
"""What other routers ask before they send anything, by a part of the path."""


class StubEngine(asyncio.Protocol):
    def __init__(self, *, prefill: bool = False) -> None:
        self.buffer = bytearray()
        self.prefill = prefill

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        border = self.buffer.find(b"\r\n\r\n")
        if border < 0:
            return
        match = LENGTH.search(self.buffer, 0, border)
        end = border + 4 + (int(match[1]) if match else 0)
        if len(self.buffer) < end:
            return
        line = bytes(self.buffer[: self.buffer.find(b"\r\n")])
        body = bytes(self.buffer[border + 4 : end])
        del self.buffer[:end]
        found = TOKENS.search(body)
        if found is None:
            self.describe(line)
            return
        tokens = 1 if self.prefill else int(found[1])
        interval = 0.0 if self.prefill else read_number(INTERVAL, body) / 1e6
        if interval:
            self.transport.write(HEAD + CHUNK)
            self.step(tokens - 1, interval, first_due(body, interval))
        else:
            self.transport.write(HEAD + CHUNK * tokens + END)

    def describe(self, line: bytes) -> None:
        about = next((about for part, about in ABOUT.items() if part in line), {"status": "ok"})
        body = json.dumps(about).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)

    def step(self, left: int, interval: float, due: float) -> None:
        if self.transport.is_closing():
            return
        if not left:
            self.transport.write(END)
            return
        asyncio.get_running_loop().call_at(due, self.emit, left, interval, due)

    def emit(self, left: int, interval: float, due: float) -> None:
        self.transport.write(CHUNK)
        self.step(left - 1, interval, due + interval)


def read_number(pattern: re.Pattern[bytes], body: bytes) -> int:
    """The number that every request to a stub must have."""
    found = pattern.search(body)
    assert found is not None, body
    return int(found[1])


def first_due(body: bytes, interval: float) -> float:
    """When the second token of a request is due."""
    now = asyncio.get_running_loop().time()
    return (now // interval + 1) * interval if STEPS in body else now + interval


class Relay(asyncio.Protocol):
    """One side of a pair of connections."""

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.other: Relay | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.target is not None:
            self.task = asyncio.get_running_loop().create_task(self.connect(self.target))

    async def connect(self, port: int) -> None:
        _, other = await asyncio.get_running_loop().create_connection(lambda: Relay(None), "127.0.0.1", port)
        other.other, self.other = self, other
        other.transport.writelines(self.early)

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.transport.close()


async def main(kind: str, port: int, target: int | None) -> None:
    """`target`: where a relay copies to."""
    loop = asyncio.get_running_loop()
    factory = {"engine": StubEngine, "prefill": lambda: StubEngine(prefill=True), "relay": lambda: Relay(target)}[kind]
    server = await loop.create_server(factory, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None))
