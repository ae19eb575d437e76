"""Endpoints, pools and demands for the scheduler's tests."""

from __future__ import annotations

from typing import Any

from tandem_api.names import Role
from tandem_gateway.scheduling import Choice, Demand, Endpoint, Scheduler, Worker
from tandem_gateway.scheduling.prefix import PrefixIndex
from xxhash import xxh3_64_intdigest

D, P = Role.DECODE, Role.PREFILL


def make_worker(name: str, role: Role = D, revision: str = "r1", **fields: Any) -> Worker:
    return Worker(name=name, address=f"{name}:1", role=role, revision=revision, **fields)


def make_endpoint(name: str = "a", role: Role = D) -> Endpoint:
    return Endpoint(make_worker(name, role))


def make_scheduler(*workers: Worker) -> Scheduler:
    scheduler = Scheduler()
    scheduler.apply_workers(workers)
    return scheduler


def make_demand(prompt: int = 100, *, output: int = 50, affinity: int = 7, prefix: list[int] | None = None) -> Demand:
    return Demand(prompt_tokens=prompt, output_tokens=output, prefix=prefix or [], affinity=affinity)


def make_chain(session: int, chunks: int, *, shared: int = 0) -> list[int]:
    """Entries of a prompt whose first `shared` chunks are everybody's."""
    return [
        xxh3_64_intdigest(f"{index}".encode() if index < shared else f"{session} {shared} {index}".encode())
        for index in range(chunks)
    ]


CHAIN = make_chain(1, 16)
"""4,096 tokens."""


def count_shared(index: PrefixIndex, chain: list[int]) -> int:
    """How many leading entries many prompts share."""
    shared = index.locate(chain)[1]
    return 0 if shared is None else shared.depth


def serve(scheduler: Scheduler, demand: Demand, now: float = 0.0) -> tuple[str, ...]:
    """A request from beginning to end; who served it, decode worker first."""
    choice = scheduler.choose(demand, now)
    assert choice is not None
    reservation = scheduler.reserve(choice, demand, now)
    scheduler.accept(choice, demand, reservation, now)
    reservation.first_token(now + 0.1)
    reservation.release()
    return choice.decode.worker.name, *(endpoint.worker.name for endpoint in choice.prefill)


def ask(scheduler: Scheduler, demand: Demand | None = None, excluded: frozenset[str] = frozenset()) -> Choice:
    """Who would serve a prompt, that of `CHAIN` where nothing is said: each token of it is computed or is cached."""
    demand = demand or make_demand(4200, prefix=CHAIN)
    choice = scheduler.choose(demand, 1.0, excluded)
    assert choice is not None
    assert choice.uncached_tokens + choice.cached_tokens == demand.prompt_tokens
    return choice


def queue_prompt(scheduler: Scheduler, name: str, tokens: int) -> None:
    """A worker has so many tokens to compute."""
    scheduler.endpoints[name].charge(tokens, 0)
