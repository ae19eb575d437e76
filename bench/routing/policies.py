"""Who decides where a request goes: the gateway's own scheduling code, and what it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Protocol

import numpy as np
from tandem_api.names import Role
from tandem_gateway.scheduling import Choice, Demand, Scheduler, Worker
from tandem_gateway.scheduling.prefix import CHUNK_BYTES
from tandem_sim.traces import BLOCK_TOKENS, Arrival
from xxhash import xxh3_64_intdigest

from bench.routing.fleet import Fleet, Served

TELEMETRY_SECONDS = 0.25
_CHUNKS = BLOCK_TOKENS * 4 // CHUNK_BYTES


class Policy(Protocol):
    def choose(self, arrival: Arrival) -> int: ...

    def served(self, arrival: Arrival, worker: int, result: Served) -> None:
        """The request was given to the worker; `result` lies in the future, and a policy may use it as it comes."""
        ...

    def lose(self, workers: set[int]) -> None: ...


class _Simple:
    """Of a baseline: who is alive, and nothing to learn."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.alive = list(range(fleet.count))
        self.chance = random.Random(7)

    def served(self, arrival: Arrival, worker: int, result: Served) -> None:
        pass

    def lose(self, workers: set[int]) -> None:
        self.alive = [worker for worker in self.alive if worker not in workers]


class RoundRobin(_Simple):
    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self._turns = count()

    def choose(self, arrival: Arrival) -> int:
        return self.alive[next(self._turns) % len(self.alive)]


class SessionHash(_Simple):
    def choose(self, arrival: Arrival) -> int:
        return self.alive[xxh3_64_intdigest(arrival.session.to_bytes(8, "little")) % len(self.alive)]


class LeastTokens(_Simple):
    """The shortest queue, known exactly."""

    def choose(self, arrival: Arrival) -> int:
        return _first_of_least(np.maximum(self.fleet.free_at, arrival.at), self.chance)


class PowerOfTwo(_Simple):
    def choose(self, arrival: Arrival) -> int:
        pair = [self.chance.choice(self.alive) for _ in range(2)]
        return min(pair, key=lambda worker: self.fleet.free_at[worker])


class PrefixOnly(_Simple):
    """The longest cached prefix, known exactly; queues do not matter."""

    def choose(self, arrival: Arrival) -> int:
        hits = self.fleet.count_hits(arrival)
        hits[np.isinf(self.fleet.free_at)] = -1
        return _first_of_least(-hits, self.chance)


class PerfectGreedy(_Simple):
    """The earliest first token, with exact knowledge of every queue and every cache."""

    def choose(self, arrival: Arrival) -> int:
        fleet = self.fleet
        hits = fleet.count_hits(arrival)
        return _first_of_least(
            np.maximum(fleet.free_at, arrival.at) + (arrival.prompt - hits) / fleet.rate, self.chance
        )


def _first_of_least(scores: np.ndarray, chance: random.Random) -> int:
    """The smallest; among equals, anyone."""
    best = np.flatnonzero(scores <= scores.min() + 1e-9)
    return int(best[chance.randrange(len(best))])


class Tandem:
    """The gateway's scheduling code as it is, in one or several gateways that do not talk to each other."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        kv_tokens: int,
        gateways: int = 1,
        naming: float = 1.0,
        telemetry: bool = False,
        prompts: bool = True,
    ) -> None:
        """`naming`: the share of sessions whose client sends `x-session-affinity`. `telemetry`: workers tell their
        queue and eviction horizon four times a second, and with `prompts` the names of prompts that they have begun.
        """
        self._fleet = fleet
        self._telemetry = telemetry
        self._begun: dict[int, list[str]] | None = {} if telemetry and prompts else None
        """Names of prompts, by worker, since workers last told."""
        self.predictions: list[tuple[float | None, float]] = []
        """Seconds to the first token, as predicted (None: too little was known) and as they came."""
        self._told_at = 0.0
        self._told = np.zeros(fleet.count), np.zeros(fleet.count)
        self._workers = [
            Worker(name=f"w-{number}", address=f"w-{number}:1", role=Role.DECODE, revision="r", kv_tokens=kv_tokens)
            for number in range(fleet.count)
        ]
        self._numbers = {worker.name: number for number, worker in enumerate(self._workers)}
        self._schedulers = [Scheduler() for _ in range(gateways)]
        self._naming = naming
        self._chance = random.Random(3)
        self._later: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._pending: tuple[Scheduler, Choice, Demand] | None = None
        self.decide: Callable[[], None] = lambda: None
        for scheduler in self._schedulers:
            scheduler.apply_workers(self._workers)

    def choose(self, arrival: Arrival) -> int:
        later = self._later
        while later and later[0][0] <= arrival.at:
            at, _, act = heappop(later)
            act(at)
        if self._telemetry and arrival.at - self._told_at >= TELEMETRY_SECONDS:
            self._told_at = arrival.at
            self._tell(arrival.at)
        scheduler = self._chance.choice(self._schedulers)
        scheduler.tick(arrival.at)
        demand = self._build_demand(scheduler, arrival)
        choice = scheduler.choose(demand, arrival.at)
        assert choice is not None
        self._pending = scheduler, choice, demand
        return self._numbers[choice.decode.worker.name]

    def served(self, arrival: Arrival, worker: int, result: Served) -> None:
        assert self._pending is not None
        scheduler, choice, demand = self._pending
        reservation = scheduler.reserve(choice, demand, arrival.at)
        self.predictions.append((reservation.expected, result.first_token - arrival.at))
        if self._begun is not None and (name := scheduler.name_prompt(choice, demand)):
            self._begun.setdefault(worker, []).append(name)

        def begin(now: float) -> None:
            scheduler.accept(choice, demand, reservation, now)
            reservation.first_token(now)
            scheduler.estimator.learn_cached(
                prompt_tokens=arrival.prompt, expected=choice.known_tokens, cached=result.hit_tokens
            )
            choice.learn_stored(result.hit_tokens)

        def end(now: float) -> None:
            reservation.release()
            scheduler.estimator.learn_output(arrival.output)

        self._plan(result.first_token, begin)
        seconds = result.end - result.first_token
        for part in (0.25, 0.5, 0.75):
            self._plan(result.first_token + part * seconds, lambda now: reservation.progress(arrival.output // 4, now))
        self._plan(result.end, end)

    def predicted_share(self) -> float:
        """Share of the first tokens that came within a fifth of what was predicted."""
        right = sum(told is not None and 0.8 * seen <= told <= 1.25 * seen for told, seen in self.predictions)
        return right / max(1, len(self.predictions))

    def lose(self, workers: set[int]) -> None:
        self._workers = [worker for worker in self._workers if self._numbers[worker.name] not in workers]
        for scheduler in self._schedulers:
            scheduler.apply_workers(self._workers)

    def _tell(self, now: float) -> None:
        """Only what changed, as workers do."""
        fleet = self._fleet
        queued = np.where(np.isinf(fleet.free_at), 0.0, np.maximum(fleet.free_at - now, 0.0) * fleet.rate)
        evicted = fleet.evicted_until.copy()
        begun: dict[int, list[str]] = self._begun or {}
        changed = {int(number) for number in np.flatnonzero((queued != self._told[0]) | (evicted != self._told[1]))}
        for number in sorted(changed | begun.keys()):
            for scheduler in self._schedulers:
                endpoint = scheduler.endpoints.get(f"w-{number}")
                if endpoint is not None:
                    scheduler.observe(
                        endpoint,
                        now,
                        queued_tokens=float(queued[number]),
                        evicted_until=float(evicted[number]),
                        prompts=begun.get(number, ()),
                    )
        begun.clear()
        self._told = queued, evicted

    def _plan(self, at: float, act: Callable[[float], None]) -> None:
        heappush(self._later, (at, next(self._order), act))

    def _build_demand(self, scheduler: Scheduler, arrival: Arrival) -> Demand:
        session = xxh3_64_intdigest(arrival.session.to_bytes(8, "little"))
        named = session % 1000 < self._naming * 1000
        return Demand(
            prompt_tokens=arrival.prompt,
            output_tokens=scheduler.estimator.expected_output(None),
            prefix=[
                block * 0x9E3779B97F4A7C15 + part & 0xFFFFFFFFFFFFFFFF
                for block in arrival.blocks
                for part in range(_CHUNKS)
            ],
            affinity=xxh3_64_intdigest(b"header", session) if named else 0,
        )
