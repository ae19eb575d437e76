"""Requests to a real prefill worker, decode worker and gateway on loopback, and when their tokens came."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem_sim.traces import Arrival

MODEL = "smollm2"
_LARGEST_TOKEN = 40_000


@dataclass(frozen=True, slots=True)
class Stream:
    """Seconds by one clock."""

    sent: float
    output: int
    """Tokens. Some have no text of their own and come with the next one."""
    events: tuple[float, ...]
    """When text came. Several events of one read have the same time."""

    @property
    def first(self) -> float:
        """Time to the first token."""
        return self.events[0] - self.sent

    @property
    def token_seconds(self) -> float:
        """Mean of the others."""
        return (self.events[-1] - self.events[0]) / max(1, self.output - 1)

    def count(self, begin: float, end: float) -> float:
        """Tokens between two moments."""
        return sum(begin < at <= end for at in self.events) * self.output / len(self.events)


def measure_step(streams: Sequence[Stream]) -> float:
    """Seconds of a decode step while all of these ran together."""
    begin, end = max(one.events[0] for one in streams), min(one.events[-1] for one in streams)
    steps = sum(one.count(begin, end) for one in streams) / len(streams)
    if steps < 8:
        raise RuntimeError(f"{len(streams)} streams did not overlap: the machine is too busy")
    return (end - begin) / steps


def make_prompt(tokens: int, chance: random.Random) -> list[int]:
    """Token ids that begin like no other prompt."""
    return [chance.randrange(100, _LARGEST_TOKEN) for _ in range(tokens)]


async def stream(url: str, prompt: Sequence[int], output: int) -> Stream:
    """One streamed completion of exactly so many tokens. Raises RuntimeError where it is not answered in full."""
    place = urlsplit(url)
    body = {
        "model": MODEL, "prompt": list(prompt), "max_tokens": output, "temperature": 0, "stream": True,
        "ignore_eos": True,
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
    return Stream(sent, output, tuple(times))


async def measure_batch(url: str, prompt: int, streams: int, output: int, chance: random.Random) -> float:
    """Seconds of a decode step while so many streams run together."""
    return measure_step(
        await asyncio.gather(*(stream(url, make_prompt(prompt, chance), output) for _ in range(streams)))
    )


async def replay(url: str, arrivals: Sequence[Arrival], seed: int) -> list[Stream]:
    """Send each request at its time."""
    chance = random.Random(seed)
    prompts = [make_prompt(arrival.prompt, chance) for arrival in arrivals]
    began = time.perf_counter()

    async def send(arrival: Arrival, prompt: list[int]) -> Stream:
        await asyncio.sleep(max(0.0, arrival.at - (time.perf_counter() - began)))
        return await stream(url, prompt, arrival.output)

    return list(await asyncio.gather(*(send(one, prompt) for one, prompt in zip(arrivals, prompts, strict=True))))
