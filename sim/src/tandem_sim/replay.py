"""One replay: requests of a trace through gateway, fleet and a scaling policy, event by event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from tandem_api.names import Role
from tandem_gateway.scheduling import Terms
from tandem_operator.autoscale.plan.contract import Snapshot

from tandem_sim.events import Events
from tandem_sim.fleet import AnyWorker, RolePool
from tandem_sim.gateway import Gateway
from tandem_sim.load import Load, Recorded
from tandem_sim.result import Replay
from tandem_sim.routing import Router, Routing
from tandem_sim.setting import Failure, Setting
from tandem_sim.telemetry import Telemetry
from tandem_sim.traces import Arrival
from tandem_sim.workers import NEVER, DecodeWorker, Flight, PrefillWorker

GATEWAY_SECONDS = 0.002
"""From a request's arrival to its worker, and back."""

LONGEST_TAIL = 24 * 3600.0
"""Seconds after the last arrival in which all answers must have ended."""


class Policy(Protocol):
    """The adapter's contract: whatever decides about replicas, here or in another simulator."""

    @property
    def period(self) -> float:
        """Seconds between two calls of `decide`."""
        ...

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int] | None:
        """Replicas per role; None, or a role that is missing, leaves what there is."""
        ...


_READY, _WORKER, _JOIN, _DECIDE, _FAIL, _EXPIRE = range(6)


class Simulation:
    """The state of one replay."""

    def __init__(
        self,
        arrivals: Sequence[Arrival] | Load,
        setting: Setting,
        policy: Policy | None = None,
        *,
        routing: Routing | None = None,
        tell: Callable[[float], None] | None = None,
    ) -> None:
        """`policy` decides about replicas, `routing` who gets a request: the gateway's scheduling code where nobody is
        given. `tell` hears now and then which share of the requests has come.
        """
        self.setting = setting
        self._tell = tell
        self.policy = policy
        self.now = 0.0
        seconds = setting.convert_step_seconds
        self.routing = routing or Router(None if seconds is None else Terms(step_seconds=seconds))
        roles = (Role.DECODE,) if setting.prefill is None else (Role.PREFILL, Role.DECODE)
        seeds = {Role.PREFILL: setting.seed, Role.DECODE: setting.seed + 1}
        self.pools = {
            role: RolePool(partial(self._build, role), role.value, setting.start_up, seeds[role]) for role in roles
        }
        self.telemetry = Telemetry(self.pools)
        self.gateway = Gateway(setting, self.routing, self.pools, self._submit)
        self._load = Recorded(arrivals) if isinstance(arrivals, Sequence) else arrivals
        self._events = Events()
        self._came = self._open = 0
        self.done: list[Flight] = []

    def run(self) -> Replay:
        """Until the last answer has ended."""
        setting = self.setting
        for role, pool in self.pools.items():
            for worker in pool.set_replicas(setting.replicas[role], 0.0, warm=True)[0]:
                pool.admit(worker, 0.0)
            pool.recall_starts(setting.replicas[role])
        self.gateway.apply()
        for failure in setting.failures:
            self._events.plan(failure.at, _FAIL, failure)
        if self.policy is not None:
            self._events.plan(self.policy.period, _DECIDE, None)
        last, load, events = 0.0, self._load, self._events
        while (at := load.next_at) < NEVER or self._open:
            if at < NEVER and at <= events.next_at:
                self.now = last = at
                self._arrive(load.pop())
                continue
            if events.next_at == NEVER:
                raise RuntimeError(f"{self._open} requests wait for workers that never come, from {self.now:.0f} s on")
            if self.now > last + LONGEST_TAIL:
                raise RuntimeError(f"{self._open} requests have not ended {LONGEST_TAIL:.0f} s after the last arrival")
            self.now, kind, subject, version = events.pop()
            self._handle(kind, subject, version)
        return Replay.build(self.done, self.pools, setting, until=max(last, 1e-9))

    # events

    def _arrive(self, arrival: Arrival) -> None:
        due = arrival.at + self.setting.ttft.limit(arrival.prompt)
        flight = Flight(self._came, arrival.at, arrival.prompt, arrival.output, arrival.blocks, arrival.session, due)
        self._came += 1
        if self._tell is not None and not self._came & 0x7FF:
            self._tell(self._came / self._load.total)
        self._open += 1
        self.telemetry.arrive(flight)
        self._offer(flight)

    def _handle(self, kind: int, subject: object, version: int) -> None:
        if kind == _WORKER:
            assert isinstance(subject, PrefillWorker | DecodeWorker)
            if subject.version == version:
                self._work(subject)
        elif kind == _JOIN:
            assert isinstance(subject, Flight)
            self._join(subject, version)
        elif kind == _DECIDE:
            self._decide()
        elif kind == _READY:
            assert isinstance(subject, PrefillWorker | DecodeWorker)
            if subject.state == "warming":
                self.pools[subject.role].admit(subject, self.now)
                self.gateway.apply()
                self.gateway.drain(self.now)
        elif kind == _EXPIRE:
            assert isinstance(subject, Flight)
            if self.gateway.expire(subject, self.now):
                subject.end = self.now
                self._conclude(subject)
        else:
            assert isinstance(subject, Failure)
            self._fail(subject)

    def _schedule(self, worker: AnyWorker) -> None:
        at = worker.next_event()
        if at < NEVER:
            self._events.plan(max(at, self.now), _WORKER, worker, worker.version)

    def _work(self, worker: AnyWorker) -> None:
        now = self.now
        if isinstance(worker, PrefillWorker):
            flight = worker.finish(now)
            self.gateway.update_closed(worker)
            self._schedule(worker)
            self._events.plan(send(worker, flight, now), _JOIN, flight, flight.restarts)
            self.telemetry.compute(flight, local=False)
        else:
            ended, computed = worker.finish(now)
            for flight in ended:
                self._end(flight)
            if computed is not None:
                self.telemetry.compute(computed, local=True)
                self._join(computed, computed.restarts)
            else:
                self._schedule(worker)
            self.gateway.update_closed(worker)
        self.pools[worker.role].retire_drained(worker, self.now)
        if self.gateway.held:
            self.gateway.drain(self.now)

    def _join(self, flight: Flight, restarts: int) -> None:
        """Its first token is there."""
        decode = flight.decode
        if decode is None or flight.restarts != restarts:
            return
        if decode.state == "gone":  # lost while another worker computed the prompt
            self._restart(flight)
            return
        if flight.first == NEVER:
            flight.first = self.now
        self.routing.first_token(flight, self.now)
        decode.join(flight, self.now)
        self._schedule(decode)

    def _end(self, flight: Flight) -> None:
        flight.end = self.now
        decode = flight.decode
        assert decode is not None
        decode.kv_reserved -= flight.prompt + flight.output
        self.routing.end(flight)
        self.telemetry.finish(flight)
        self._conclude(flight)

    def _offer(self, flight: Flight) -> None:
        if not self.gateway.offer(flight, self.now) and flight.held_until < NEVER:
            self._events.plan(flight.held_until, _EXPIRE, flight)

    def _submit(self, flight: Flight, prefill: AnyWorker) -> None:
        prefill.submit(flight, self.now + GATEWAY_SECONDS)
        self._schedule(prefill)

    def _conclude(self, flight: Flight) -> None:
        self.done.append(flight)
        self._open -= 1
        self._load.end(flight.session, self.now)

    # the fleet

    def _build(self, role: Role, name: str, now: float) -> AnyWorker:
        setting = self.setting
        if role is Role.DECODE:
            return DecodeWorker(name, setting.decode, now, deadlines=setting.deadlines)
        assert setting.prefill is not None
        return PrefillWorker(name, setting.prefill, now, deadlines=setting.deadlines)

    def _decide(self) -> None:
        policy = self.policy
        assert policy is not None
        snapshot = self.telemetry.observe(self.now, self.gateway.held_tokens, self.gateway.held)
        wanted = policy.decide(self.now, snapshot)
        changed = False
        for role, count in (wanted or {}).items():
            pool = self.pools[role]
            if count == len(pool.members):
                continue
            ordered, leaving = pool.set_replicas(max(1, count), self.now)
            for worker in ordered:
                self._events.plan(worker.ready_at, _READY, worker)
            for worker in leaving:
                changed = True
                self.pools[worker.role].retire_drained(worker, self.now)
        if changed:
            self.gateway.apply()
        self._events.plan(self.now + policy.period, _DECIDE, None)

    def _fail(self, failure: Failure) -> None:
        pool = self.pools[failure.role]
        ready = pool.ready
        if failure.index >= len(ready):
            return
        worker = ready[failure.index]
        lost = worker.clear(self.now)
        fresh = pool.replace(worker, self.now)
        self._events.plan(fresh.ready_at, _READY, fresh)
        self.gateway.apply()
        for flight in lost:
            self._restart(flight)

    def _restart(self, flight: Flight) -> None:
        """From the beginning on other workers: a prompt, or a prompt and what was said."""
        if flight.decode is not None and flight.decode.state != "gone":
            flight.decode.kv_reserved -= flight.prompt + flight.output
        flight.restarts += 1
        flight.decode = flight.prefill = None
        self.routing.end(flight, finished=False)
        self._offer(flight)


def send(worker: PrefillWorker, flight: Flight, now: float) -> float:
    """When the blocks are there. Layers go while later ones are computed: a link that is free delays by little."""
    decode = flight.decode
    assert decode is not None
    busy = worker.profile.transfer(flight.prompt)
    began = max(now - flight.work, worker.link_free, decode.link_free)
    end = max(now + busy / 32, began + busy)
    worker.link_free = decode.link_free = max(decode.link_free, worker.link_free, began) + busy
    decode.link_busy += busy
    return end + worker.profile.first_token_seconds + GATEWAY_SECONDS
