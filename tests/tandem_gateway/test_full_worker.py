"""A worker that takes no more: whose request goes, and when who goes is to come back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

PLACES = 4
ADDRESSES = ("127.0.0.1", "127.0.0.2")


class Places:
    """Of a worker that keeps requests waiting until its door is open, and refuses more than it has places for."""

    def __init__(self, answer: Callable) -> None:
        self._answer = answer
        self.waiting: list[str] = []
        self.door = asyncio.Event()

    async def __call__(self, worker, request, writer) -> None:
        if len(self.waiting) >= PLACES:
            body = b'{"error": {"message": "full", "type": "rate_limit_error", "code": "queue_full"}}'
            writer.write(
                b"HTTP/1.1 429 No\r\ncontent-type: application/json\r\nretry-after: 1\r\nx-tandem-retry: full\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            return
        name = request.headers["x-request-id"]
        self.waiting.append(name)
        try:
            await self.door.wait()
            await self._answer(worker, request, writer)
        finally:
            self.waiting.remove(name)


@pytest.fixture
async def ask(chat, connect):
    async def ask_from(port: int, address: str, name: str) -> tuple[int, str, dict]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        try:
            writer.write(chat(headers=f"x-request-id: {name}\r\n"))
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            body = await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))
        finally:
            writer.transport.abort()
        told = head.split("retry-after: ")[1].split("\r\n")[0] if "retry-after: " in head else ""
        return int(head.split()[1]), told, json.loads(body)

    return ask_from


async def test_a_full_worker_gives_up_the_newest_of_whoever_holds_most(
    start_gateway, start_worker, fault, until, ask
) -> None:
    places = Places(fault.answer)
    running = await start_gateway(await start_worker(default=places))
    many = []
    for number in range(PLACES):
        many.append(asyncio.create_task(ask(running.port, ADDRESSES[0], f"a{number}")))
        await until(lambda number=number: f"a{number}" in places.waiting)
    assert (await ask(running.port, ADDRESSES[0], "a4"))[0] == 429, "nobody makes room for who has most"
    one = asyncio.create_task(ask(running.port, ADDRESSES[1], "b0"))
    status, _, body = await many.pop()
    assert (status, body["error"]["code"], body["error"]["type"]) == (429, "queue_full", "rate_limit_error")
    await until(lambda: "b0" in places.waiting)
    assert places.waiting == ["a0", "a1", "a2", "b0"]
    another = asyncio.create_task(ask(running.port, ADDRESSES[1], "b1"))
    await until(lambda: "b1" in places.waiting)
    assert (await ask(running.port, ADDRESSES[1], "b2"))[0] == 429, "both have as many"
    places.door.set()
    assert {(await task)[0] for task in (*many[:2], one, another)} == {200}
    assert (await many[2])[0] == 429


@pytest.mark.parametrize(("speed", "tokens", "says"), [(0.0, 5000, "1"), (100.0, 690, "7"), (10.0, 10**6, "60")])
async def test_when_to_come_back_follows_from_what_waits(
    start_gateway, start_worker, fault, ask, speed: float, tokens: int, says: str
) -> None:
    """What the worker says holds while nothing is known of its speed."""
    places = Places(fault.answer)
    running = await start_gateway(await start_worker(default=places))
    (endpoint,) = running.gateway.scheduler.endpoints.values()
    places.waiting += ["others'"] * PLACES
    endpoint.speed.value = speed
    endpoint.charge(0, 0, tokens)
    status, told, _ = await ask(running.port, ADDRESSES[0], "a")
    endpoint.charge(0, 0, -tokens)
    assert (status, told) == (429, says)
