"""The gateway's scheduling code at work in the simulator: which pair a request goes to.

It learns what a gateway does: when it chose, when the first token came, what was cached and when the answer ended. Not
simulated: progress within an answer, health checks (`Scheduler.tick`) and several gateways.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from tandem_gateway.scheduling import Demand, Scheduler, Terms, Worker
from tandem_gateway.scheduling.prefix import CHUNK_BYTES

from tandem_sim.traces import BLOCK_TOKENS
from tandem_sim.workers import DecodeWorker, Flight, PrefillWorker

BYTES_PER_TOKEN = 4
_CHUNKS = BLOCK_TOKENS * BYTES_PER_TOKEN // CHUNK_BYTES
_ODD = 0x9E3779B97F4A7C15
"""The golden ratio in 64 bits: spreads small numbers over the hash's range (Knuth, volume 3, section 6.4)."""
_MASK = 0xFFFFFFFFFFFFFFFF


def build_chain(blocks: tuple[int, ...]) -> list[int]:
    """The gateway's hash chain of a prompt whose blocks have these ids."""
    return [block * _ODD + part & _MASK for block in blocks for part in range(_CHUNKS)]


class Routing(Protocol):
    """Who gets a request."""

    @property
    def closed(self) -> set[str]:
        """Workers that take nothing at present: their queue or their memory is full."""
        ...

    def apply(self, workers: Iterable[PrefillWorker | DecodeWorker]) -> None:
        """These are there from now on."""
        ...

    def tell(self, worker: DecodeWorker) -> None:
        """What its telemetry says of its steps, without delay."""
        ...

    def choose(self, flight: Flight, now: float, *, local: bool = False) -> bool:
        """Give a request its pair; `local`: without a prefill worker. False: no pair may take it now."""
        ...

    def first_token(self, flight: Flight, now: float) -> None: ...

    def end(self, flight: Flight, *, finished: bool = True) -> None:
        """It has left its workers; not `finished`: they are lost, and it begins again."""
        ...


class Router:
    """One gateway, with what `Routing` says."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.scheduler = Scheduler(terms)
        self.workers: dict[str, PrefillWorker | DecodeWorker] = {}
        self.closed: set[str] = set()
        """Workers that take nothing at present: their queue or their memory is full."""

    def apply(self, workers: Iterable[PrefillWorker | DecodeWorker]) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.closed &= self.workers.keys()
        self.scheduler.apply_workers(map(self.describe, self.workers.values()))

    def describe(self, worker: PrefillWorker | DecodeWorker) -> Worker:
        """What the gateway knows of it before it has told anything."""
        return Worker(
            name=worker.name,
            address=f"{worker.name}:1",
            role=worker.role,
            revision="r",
            kv_tokens=worker.profile.kv_tokens,
        )

    def name(self, flight: Flight) -> int:
        """The conversation, as its client names it in a hash; 0: it does not."""
        return (flight.session + 1) * _ODD & _MASK if flight.blocks else 0

    def tell(self, worker: DecodeWorker) -> None:
        endpoint = self.scheduler.endpoints.get(worker.name)
        if endpoint is not None:
            seconds = worker.decode_seconds if worker.sequences else None
            endpoint.own.tell(keeps_steps=True, decode_seconds=seconds, running=worker.sequences)

    def choose(self, flight: Flight, now: float, *, local: bool = False) -> bool:
        scheduler = self.scheduler
        demand = flight.demand
        if demand is None:
            demand = flight.demand = Demand(
                prompt_tokens=flight.prompt,
                output_tokens=scheduler.estimator.expected_output(None),
                prefix=build_chain(flight.blocks),
                affinity=self.name(flight),
            )
        demand.local = local
        choice = scheduler.choose(demand, now, self.closed)
        if choice is None:
            return False
        decode = self.workers[choice.decode.worker.name]
        assert isinstance(decode, DecodeWorker)
        if not decode.has_room(flight.prompt + flight.output):
            return False
        flight.decode = decode
        flight.prefill = self.workers[choice.prefill[0].worker.name] if choice.prefill else decode
        flight.choice = choice
        flight.reservation = scheduler.reserve(choice, demand, now)
        return True

    def first_token(self, flight: Flight, now: float) -> None:
        if flight.reservation is None or flight.choice is None or flight.demand is None:
            return
        self.scheduler.accept(flight.choice, flight.demand, flight.reservation, now)
        flight.reservation.first_token(now)
        self.scheduler.estimator.learn_cached(
            prompt_tokens=flight.prompt, expected=flight.choice.known_tokens, cached=flight.hit
        )
        flight.choice.learn_stored(flight.hit)

    def end(self, flight: Flight, *, finished: bool = True) -> None:
        if flight.reservation is not None:
            flight.reservation.release()
            flight.reservation = None
        if finished:
            self.scheduler.estimator.learn_output(flight.output)
        flight.demand = flight.choice = None
