"""What is replayed: requests with a time, a length and the blocks of their prompts.

A trace in the format of Mooncake's (one JSON object per line: `timestamp` in ms, `input_length`, `output_length`,
`hash_ids`, one per 512 tokens; equal leading ids are a shared prefix), one in the format of Azure's (CSV with
`TIMESTAMP`, `ContextTokens`, `GeneratedTokens`), or conversations and single requests made up here.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from math import log
from pathlib import Path

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    """Seconds."""
    prompt: int
    output: int
    """Tokens."""
    blocks: tuple[int, ...]
    """One id per full block; equal ids have equal prefixes."""
    session: int


def read_trace(path: Path) -> list[Arrival]:
    """Requests of a trace, by time. A conversation is what shares more than its first block."""
    arrivals: list[Arrival] = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            blocks = tuple(row["hash_ids"][: row["input_length"] // BLOCK_TOKENS])
            session = row["hash_ids"][min(1, len(row["hash_ids"]) - 1)]
            arrivals.append(
                Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], blocks, session)
            )
    return sorted(arrivals, key=lambda arrival: arrival.at)


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


def multiply(arrivals: list[Arrival], copies: int, speed: float) -> list[Arrival]:
    """As many independent copies, each begun elsewhere in the recording, at `speed` times its pace."""
    span = arrivals[-1].at + 1
    width = 1 + max(max(arrival.blocks, default=0) for arrival in arrivals)
    sessions = 1 + max(arrival.session for arrival in arrivals)
    spread = [
        Arrival(
            ((arrival.at + span * copy / copies) % span) / speed,
            arrival.prompt,
            arrival.output,
            arrival.blocks if not copy else tuple([block + copy * width for block in arrival.blocks]),
            arrival.session + copy * sessions,
        )
        for copy in range(copies)
        for arrival in arrivals
    ]
    return sorted(spread, key=lambda arrival: arrival.at)


def offered_tokens(arrivals: Iterable[Arrival]) -> float:
    """Prompt tokens per second."""
    listed = list(arrivals)
    return sum(arrival.prompt for arrival in listed) / max(1e-9, listed[-1].at - listed[0].at)


def read_azure(path: Path) -> list[Arrival]:
    """Requests of a trace of the Azure LLM inference dataset, which tells no prefixes."""
    arrivals: list[Arrival] = []
    first: datetime | None = None
    with path.open(newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            first = first or at
            seconds = (at - first).total_seconds()
            arrivals.append(Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"]), (), number))
    return sorted(arrivals, key=lambda arrival: arrival.at)


def read(path: Path) -> list[Arrival]:
    """A trace in either format, by its suffix: .csv is Azure's, .jsonl Mooncake's."""
    if path.suffix == ".csv":
        return read_azure(path)
    if path.suffix in {".jsonl", ".json"}:
        return spread(read_trace(path), 3.0)
    raise ValueError(f"{path.name} is no trace that can be read: name it .jsonl (Mooncake's format) or .csv (Azure's)")


def spread(arrivals: list[Arrival], seconds: float, seed: int = 1) -> list[Arrival]:
    """Arrivals at random moments of the interval to which they were rounded.

    Mooncake's timestamps are multiples of 3 s: as they stand, ten requests would come at once and then none.
    """
    chance = random.Random(seed)
    moved = [
        replace(arrival, at=round(arrival.at / seconds) * seconds + chance.random() * seconds) for arrival in arrivals
    ]
    return sorted(moved, key=lambda arrival: arrival.at)


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
