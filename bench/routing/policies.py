"""Who decides where a request goes: the gateway's own scheduling code, and what it is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

from tandem_gateway.scheduling import Outcome, Worker
from tandem_sim.fleet import AnyWorker
from tandem_sim.routing import Router
from tandem_sim.workers import DecodeWorker, Flight
from xxhash import xxh3_64_intdigest

TELEMETRY_SECONDS = 1.0
"""As gateways read it."""
PROGRESS_SECONDS = 0.25
"""Tokens of answers are counted so often."""


class _Simple:
    """A baseline: who is there, and nothing to learn."""

    def __init__(self) -> None:
        self.closed: set[str] = set()
        self.workers: list[DecodeWorker] = []
        self.chance = random.Random(7)

    def apply(self, workers: Iterable[AnyWorker]) -> None:
        self.workers = [worker for worker in workers if isinstance(worker, DecodeWorker)]

    def tell(self, worker: DecodeWorker) -> None: ...

    def choose(self, flight: Flight, now: float, *, local: bool = False) -> bool:
        worker = self.pick(flight, now)
        if not worker.has_room(flight.prompt + flight.output):
            return False
        flight.decode = flight.prefill = worker
        return True

    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        raise NotImplementedError

    def first_token(self, flight: Flight, now: float) -> None: ...

    def end(self, flight: Flight, *, finished: bool = True) -> None: ...

    def _least(self, score: Callable[[DecodeWorker], float]) -> DecodeWorker:
        """The smallest; among equals, anyone."""
        scores = [score(worker) for worker in self.workers]
        least = min(scores) + 1e-9
        return self.chance.choice([w for w, its in zip(self.workers, scores, strict=True) if its <= least])


class RoundRobin(_Simple):
    def __init__(self) -> None:
        super().__init__()
        self._turns = count()

    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        return self.workers[next(self._turns) % len(self.workers)]


class SessionHash(_Simple):
    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        return self.workers[xxh3_64_intdigest(flight.session.to_bytes(8, "little")) % len(self.workers)]


class LeastTokens(_Simple):
    """The shortest queue, known exactly."""

    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        return self._least(lambda worker: worker.count_uncomputed(now))


class PowerOfTwo(_Simple):
    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        pair = [self.chance.choice(self.workers) for _ in range(2)]
        return min(pair, key=lambda worker: worker.count_uncomputed(now))


class PrefixOnly(_Simple):
    """The longest cached prefix, known exactly; queues do not matter."""

    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        return self._least(lambda worker: -worker.cache.match(flight.blocks, flight.prompt))


class PerfectGreedy(_Simple):
    """The fewest tokens before the first token, with exact knowledge of every queue and every cache."""

    def pick(self, flight: Flight, now: float) -> DecodeWorker:
        return self._least(
            lambda worker: worker.count_uncomputed(now) - worker.cache.match(flight.blocks, flight.prompt)
        )


class Gateway(Router):
    """One of several gateways. `naming`: the share of sessions whose client sends `x-session-affinity`. `kv_tokens`:
    what each worker keeps; None: what its profile says."""

    def __init__(self, naming: float, kv_tokens: int | None) -> None:
        super().__init__()
        self._naming = naming
        self._kv_tokens = kv_tokens

    def describe(self, worker: AnyWorker) -> Worker:
        known = super().describe(worker)
        return known if self._kv_tokens is None else replace(known, kv_tokens=self._kv_tokens)

    def name(self, flight: Flight) -> int:
        session = xxh3_64_intdigest(flight.session.to_bytes(8, "little"))
        return xxh3_64_intdigest(b"header", session) if session % 1000 < self._naming * 1000 else 0


class Tandem:
    """The gateway's scheduling code as it is, in one or several gateways that do not talk to each other."""

    def __init__(
        self,
        *,
        gateways: int = 1,
        naming: float = 1.0,
        telemetry: bool = False,
        prompts: bool = True,
        kv_tokens: int | None = None,
    ) -> None:
        """`telemetry`: workers tell their queue and eviction horizon once a second, and with `prompts` the names
        of prompts that they have begun.
        """
        self.closed: set[str] = set()
        self.predictions: list[tuple[float | None, float]] = []
        """Seconds to the first token, as predicted (None: too little was known) and as they came."""
        self.gateways = [Gateway(naming, kv_tokens) for _ in range(gateways)]
        for gateway in self.gateways:
            gateway.closed = self.closed
        self._telemetry, self._prompts = telemetry, prompts
        self._begun: dict[str, list[str]] = {}
        """Names of prompts, by worker, since workers last told."""
        self._told: dict[str, tuple[float, float]] = {}
        self._told_at = self._progressed_at = 0.0
        self._chance = random.Random(3)
        self._taken: dict[int, Gateway] = {}
        self._expected: dict[int, float | None] = {}
        self._streams: dict[Flight, float] = {}
        """Answers under way, and the steps of their workers up to which their tokens are counted."""

    def apply(self, workers: Iterable[AnyWorker]) -> None:
        workers = list(workers)
        for gateway in self.gateways:
            gateway.apply(workers)

    def tell(self, worker: DecodeWorker) -> None:
        for gateway in self.gateways:
            gateway.tell(worker)

    def choose(self, flight: Flight, now: float, *, local: bool = False) -> bool:
        if now - self._progressed_at >= PROGRESS_SECONDS:
            self._progressed_at = now
            self._progress(now)
        if self._telemetry and now - self._told_at >= TELEMETRY_SECONDS:
            self._told_at = now
            self._tell(now)
        gateway = self._chance.choice(self.gateways)
        gateway.scheduler.tick(now)
        if not gateway.choose(flight, now, local=local):
            return False
        assert flight.choice is not None
        assert flight.demand is not None
        assert flight.reservation is not None
        assert flight.decode is not None
        self._taken[flight.index], self._expected[flight.index] = gateway, flight.reservation.expected
        if self._telemetry and self._prompts and (name := gateway.scheduler.name_prompt(flight.choice, flight.demand)):
            self._begun.setdefault(flight.decode.name, []).append(name)
        return True

    def first_token(self, flight: Flight, now: float) -> None:
        assert flight.decode is not None
        gateway = self._taken[flight.index]
        gateway.first_token(flight, now)
        if flight.choice is not None:
            gateway.scheduler.report(flight.choice.decode, Outcome.ANSWERED, now)
        expected = self._expected.pop(flight.index)
        if not flight.restarts:
            self.predictions.append((expected, now - flight.arrived))
        self._streams[flight] = flight.decode.steps

    def end(self, flight: Flight, *, finished: bool = True) -> None:
        self._streams.pop(flight, None)
        self._taken.pop(flight.index).end(flight, finished=finished)

    def predicted_share(self) -> float:
        """Share of the first tokens that came within a fifth of what was predicted."""
        right = sum(told is not None and 0.8 * seen <= told <= 1.25 * seen for told, seen in self.predictions)
        return right / max(1, len(self.predictions))

    def _progress(self, now: float) -> None:
        """Tokens of answers, as they have come."""
        for flight, counted in self._streams.items():
            assert flight.decode is not None
            assert flight.reservation is not None
            flight.decode.advance(now)
            if (tokens := int(flight.decode.steps - counted)) > 0:
                self._streams[flight] = counted + tokens
                flight.reservation.progress(tokens, now)

    def _tell(self, now: float) -> None:
        """Only what changed, as workers do."""
        begun, self._begun = self._begun, {}
        for name, worker in self.gateways[0].workers.items():
            assert isinstance(worker, DecodeWorker)
            told = worker.count_uncomputed(now), worker.cache.evicted_until
            if told == self._told.get(name, (0.0, 0.0)) and name not in begun:
                continue
            self._told[name] = told
            for gateway in self.gateways:
                gateway.scheduler.observe(
                    gateway.scheduler.endpoints[name],
                    now,
                    queued_tokens=told[0],
                    evicted_until=told[1],
                    prompts=begun.get(name, ()),
                )
