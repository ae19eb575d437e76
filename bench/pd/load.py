"""Long prompts as they arrive, and what clients see of the answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.completions import ask, make_prompt

PROMPTS = (600, 1200)
"""Tokens, all lengths between them equally often."""
OUTPUT = 64
"""Tokens of each answer."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    at: float
    """Seconds after the first one."""
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it, by the client's clock."""

    first: float
    """Seconds to the first token."""
    gaps: tuple[float, ...]
    """Seconds between texts."""
    text: str
    computed_by: str
    """Who computed the prompt, as the worker says."""


def make_load(requests: int, rate: float, seed: int) -> list[Ask]:
    """Poisson arrivals of prompts that have nothing in common."""
    chance = random.Random(seed)
    at, asks = 0.0, list[Ask]()
    for _ in range(requests):
        tokens = chance.randint(*PROMPTS)
        asks.append(Ask(at, tuple(make_prompt(tokens, chance))))
        at += chance.expovariate(rate)
    return asks


async def replay(url: str, asks: Sequence[Ask], salt: str) -> list[Answer]:
    """Send each request at its time. With another `salt` nothing is cached of what was sent before."""
    began = time.perf_counter()

    async def send(ask: Ask) -> Answer:
        await asyncio.sleep(max(0.0, ask.at - (time.perf_counter() - began)))
        return await stream(url, ask.prompt, salt)

    return list(await asyncio.gather(*map(send, asks)))


async def stream(url: str, prompt: Sequence[int], salt: str, *, output: int = OUTPUT) -> Answer:
    """One streamed completion of exactly so many tokens. Raises RuntimeError where it is not answered in full."""
    received = await ask(url, prompt, output, cache_salt=salt)
    times = received.times
    fields, _, _ = received.data.partition(b"\r\n\r\n")
    named = [line for line in fields.decode().split("\r\n") if line.startswith("x-tandem-prefill-worker: ")]
    events = [json.loads(line[6:]) for line in received.data.decode().splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    gaps = tuple(after - before for before, after in pairwise(times))
    return Answer(times[0] - received.sent, gaps, text, named[0].partition(": ")[2] if named else "")
