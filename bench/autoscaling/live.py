"""Requests to a real prefill worker, decode worker and gateway on loopback, and when their tokens came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_sim.traces import Arrival

from bench.completions import ask, make_prompt, send_on_time


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


async def answer(url: str, prompt: Sequence[int], output: int) -> Stream:
    """One streamed completion of exactly so many tokens. Raises RuntimeError where it is not answered in full."""
    streamed = await ask(url, prompt, output)
    return Stream(streamed.sent, output, streamed.times)


async def measure_batch(url: str, prompt: int, streams: int, output: int, chance: random.Random) -> float:
    """Seconds of a decode step while so many streams run together."""
    return measure_step(
        await asyncio.gather(*(answer(url, make_prompt(prompt, chance), output) for _ in range(streams)))
    )


async def replay(url: str, arrivals: Sequence[Arrival], seed: int) -> list[Stream]:
    """Send each request at its time."""
    chance = random.Random(seed)
    prompts = [make_prompt(arrival.prompt, chance) for arrival in arrivals]
    return await send_on_time(
        [arrival.at for arrival in arrivals],
        lambda number: answer(url, prompts[number], arrivals[number].output),
    )
