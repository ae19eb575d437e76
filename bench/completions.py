"""Streamed completions of exactly so many tokens, sent at given times, and when their text came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

MODEL = "smollm2"
_LARGEST_TOKEN = 40_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Received:
    """One answer. Seconds by one clock."""

    sent: float
    times: tuple[float, ...]
    """When text came. Several events of one read have the same time."""
    data: bytes
    """The whole answer, its header included."""


def make_prompt(tokens: int, chance: random.Random) -> list[int]:
    """Token ids that begin like no other prompt."""
    return [chance.randrange(100, _LARGEST_TOKEN) for _ in range(tokens)]


async def ask(url: str, prompt: Sequence[int], output: int, **more: object) -> Received:
    """So many tokens after `prompt`; `more` goes into the body. Raises RuntimeError where the answer is incomplete."""
    place = urlsplit(url)
    body = {
        "model": MODEL, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "stream": True,
        "ignore_eos": True, **more,
    }  # fmt: skip
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\n"
        f"connection: close\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    sent = time.perf_counter()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    writer.write(head.encode() + payload)
    received, times = bytearray(), list[float]()
    while piece := await reader.read(1 << 16):
        received += piece
        times += [time.perf_counter()] * (received.count(b'"text"') - len(times))
    writer.close()
    if b"data: [DONE]" not in received or not times:
        raise RuntimeError(f"the answer is incomplete: {bytes(received[-500:])!r}")
    return Received(sent, tuple(times), bytes(received))


async def send_on_time(times: Sequence[float], send: Callable[[int], Awaitable[T]]) -> list[T]:
    """What `send(i)` gives, each called `times[i]` seconds after the beginning."""
    began = time.perf_counter()

    async def wait_and_send(number: int) -> T:
        await asyncio.sleep(max(0.0, times[number] - (time.perf_counter() - began)))
        return await send(number)

    return list(await asyncio.gather(*map(wait_and_send, range(len(times)))))
