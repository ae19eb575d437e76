"""Requests made up: conversations and single requests, and traces with the statistics of the published ones."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from math import ceil, log
from pathlib import Path

from tandem_sim.traces import AZURE_COLUMNS, BLOCK_TOKENS, Arrival


def make_conversations(
    *, sessions: int = 1500, seconds: float = 1800, system_blocks: int = 4, tenants: int = 5, seed: int = 1
) -> list[Arrival]:
    """Conversations of several turns under the system prompts of a few tenants, begun evenly over the time."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    fresh = iter(range(tenants * system_blocks, 10**9))
    for session in range(sessions):
        tenant = chance.randrange(tenants)
        blocks = [tenant * system_blocks + index for index in range(system_blocks)]
        at = chance.uniform(0, seconds)
        rest = 0
        for _ in range(min(40, int(chance.expovariate(1 / 6)) + 1)):
            output = min(2000, int(chance.expovariate(1 / 300)) + 1)
            grown = rest + min(20_000, int(chance.lognormvariate(6, 1.2)) + 1)
            blocks += [next(fresh) for _ in range(grown // BLOCK_TOKENS)]
            rest = grown % BLOCK_TOKENS
            arrivals.append(Arrival(at, len(blocks) * BLOCK_TOKENS + rest, output, tuple(blocks), session))
            rest += output
            at += output * 0.02 + chance.expovariate(1 / 45)
    return sorted(arrivals, key=lambda arrival: arrival.at)


def make_requests(
    *, rate: float = 5.4, seconds: float = 1800.0, prompt: float = 1000.0, output: float = 130.0, seed: int = 1
) -> list[Arrival]:
    """Single requests without prefixes: Poisson arrivals, log-normal lengths around these medians."""
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    at = 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        arrivals.append(
            Arrival(
                at,
                min(16_000, int(chance.lognormvariate(log(prompt), 0.9)) + 1),
                min(1000, int(chance.lognormvariate(log(output), 0.9)) + 1),
                (),
                len(arrivals),
            )
        )
    return arrivals


def make_like_conversation(seconds: float, rate: float = 3.4, seed: int = 1) -> list[Arrival]:
    """Chats like those of Mooncake's conversation trace: in the mean 11,700 prompt tokens, most of them log-normal
    around 5,600, 340 output tokens, and a third of the prompts' tokens were in an earlier prompt.

    Seven of ten conversations have one turn. One turn in nine finds its history shortened.
    """
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    fresh = iter(range(10**12))
    begin = -2400.0  # conversations that have begun before
    session = 0
    while (begin := begin + chance.expovariate(rate / _TURNS)) < seconds:
        session += 1
        at, tokens = begin, min(126_000.0, chance.lognormvariate(log(5600), 1.22))
        blocks = [next(fresh) for _ in range(int(tokens) // BLOCK_TOKENS)]
        for turn in range(_draw_turns(chance)):
            if turn:
                at += chance.lognormvariate(log(123), 1.05)
                if chance.random() < 1 / 9:
                    blocks = blocks[: int(len(blocks) * chance.random())]
                else:
                    tokens = min(126_000.0, tokens + chance.lognormvariate(log(400), 1.3))
                blocks += [next(fresh) for _ in range(int(tokens) // BLOCK_TOKENS - len(blocks))]
            output = chance.expovariate(1 / 40) if chance.random() < 0.3 else chance.gammavariate(4, 118)
            if 0 <= at < seconds:
                prompt = max(1, int(tokens))
                arrivals.append(Arrival(at, prompt, min(2000, int(output) + 1), tuple(blocks), session))
    return sorted(arrivals, key=lambda arrival: arrival.at)


_TURNS = 1.68
"""Turns of a conversation, in the mean."""


def _draw_turns(chance: random.Random) -> int:
    turns = 1
    if chance.random() < 0.33:
        turns += 1
        while chance.random() < 0.515:
            turns += 1
    return turns


def make_like_azure(seconds: float, rate: float = 5.5, seed: int = 1) -> list[Arrival]:
    """Single requests like those of Azure's conversation trace of 2023: Poisson arrivals, in the mean 1,160 prompt and
    210 output tokens, without prefixes.
    """
    chance = random.Random(seed)
    arrivals: list[Arrival] = []
    at = 0.0
    while (at := at + chance.expovariate(rate)) < seconds:
        prompt = min(14_000, int(chance.weibullvariate(1210, 1.12)) + 1)
        output = min(1000, int(chance.lognormvariate(log(129), 1.0)) + 1)
        arrivals.append(Arrival(at, prompt, output, (), len(arrivals)))
    return arrivals


MAKERS = {"conversation": make_like_conversation, "azure": make_like_azure}


def write(arrivals: Sequence[Arrival], name: str, path: Path) -> None:
    """In the format of the trace that is imitated."""
    if name == "azure":
        begin = datetime(2023, 11, 16, 18, tzinfo=UTC)
        rows = [
            f"{(begin + timedelta(seconds=one.at)).replace(tzinfo=None).isoformat(' ', 'microseconds')},"
            f"{one.prompt},{one.output}"
            for one in arrivals
        ]
        path.write_text("\n".join([",".join(AZURE_COLUMNS), *rows, ""]))
        return
    last = 1 + max((max(one.blocks, default=0) for one in arrivals), default=0)
    with path.open("w") as lines:
        for index, one in enumerate(arrivals):
            part = [last + index] * (ceil(one.prompt / BLOCK_TOKENS) - len(one.blocks))
            row = {"timestamp": round(one.at * 1000), "input_length": one.prompt, "output_length": one.output}
            lines.write(json.dumps(row | {"hash_ids": [*one.blocks, *part]}) + "\n")
