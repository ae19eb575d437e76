"""Long prompts as they arrive, and what clients see of the answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.completions import ask, make_prompt, send_on_time

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
    return await send_on_time([ask.at for ask in asks], lambda number: ask_for(url, asks[number].prompt, salt))


async def ask_for(url: str, prompt: Sequence[int], salt: str, *, output: int = OUTPUT) -> Answer:
    """One answer of exactly so many tokens. Raises RuntimeError where it does not come in full."""
    streamed = await ask(url, prompt, output, cache_salt=salt)
    lines = streamed.data.decode().splitlines()
    named = [line.partition(": ")[2] for line in lines if line.startswith("x-tandem-prefill-worker: ")]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    gaps = tuple(after - before for before, after in pairwise(streamed.times))
    return Answer(streamed.times[0] - streamed.sent, gaps, text, named[0] if named else "")
