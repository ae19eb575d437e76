"""What one decision costs: CPU time of `Scheduler.choose`, with back-offs, sessions and pairs."""

from __future__ import annotations

import random
from statistics import median
from time import thread_time_ns

from tandem_api.names import Role
from tandem_gateway.scheduling import Demand, Outcome, Reservation, Scheduler, Worker
from xxhash import xxh3_64_intdigest

DECISIONS = 4000
SESSIONS = 500


def measure(endpoints: int, *, disaggregated: bool) -> dict[str, float]:
    """Medians in microseconds: of choosing, and of counting and recording the request afterwards."""
    chance = random.Random(1)
    scheduler = Scheduler()
    scheduler.apply_workers(
        Worker(
            name=f"w-{number}",
            address=f"w-{number}:1",
            role=Role.PREFILL if disaggregated and number % 2 else Role.DECODE,
            revision="r",
        )
        for number in range(endpoints)
    )
    demands = [_build_demand(chance) for _ in range(DECISIONS)]
    running: list[Reservation] = []
    choosing: list[int] = []
    keeping: list[int] = []
    for number, demand in enumerate(demands):
        now = number / 100
        began = thread_time_ns()
        choice = scheduler.choose(demand, now)
        chosen = thread_time_ns()
        assert choice is not None
        running.append(scheduler.reserve(choice, demand, now))
        scheduler.accept(choice, demand, running[-1], now)
        kept = thread_time_ns()
        choosing.append(chosen - began)
        keeping.append(kept - chosen)
        if len(running) > endpoints:
            ended = running.pop(0)
            ended.first_token(now)
            ended.release()
        # One in twenty attempts fails: several endpoints are out at any time.
        scheduler.report(choice.decode, Outcome.RESET if chance.random() < 0.05 else Outcome.ANSWERED, now)
    empty = median(_time_nothing() for _ in range(1000))
    return {
        "choose_us": round((median(choosing) - empty) / 1000, 1),
        "record_us": round((median(keeping) - empty) / 1000, 1),
    }


def _time_nothing() -> int:
    began = thread_time_ns()
    return thread_time_ns() - began


def _build_demand(chance: random.Random) -> Demand:
    """Some turn of some conversation: 1 to 16 thousand tokens of which the first thousand are everybody's."""
    session, chunks = chance.randrange(SESSIONS), chance.randrange(4, 64)
    return Demand(
        prompt_tokens=chunks * 256,
        output_tokens=100,
        prefix=[xxh3_64_intdigest(f"{index if index < 4 else (session, index)}".encode()) for index in range(chunks)],
        affinity=xxh3_64_intdigest(f"{session}".encode()),
    )
