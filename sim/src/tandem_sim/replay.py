"""One replay: requests of a trace through gateway, fleet and a scaling policy, event by event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from tandem_api.names import Role
from tandem_gateway.scheduling import Terms
from tandem_operator.autoscale.plan.contract import Snapshot, Target

from tandem_sim.fleet import AnyWorker, RolePool, StartUp
from tandem_sim.load import Load, Recorded
from tandem_sim.profiles import WorkerProfile
from tandem_sim.result import Replay
from tandem_sim.routing import Router, Routing
from tandem_sim.telemetry import Telemetry
from tandem_sim.traces import Arrival
from tandem_sim.workers import NEVER, DecodeWorker, Flight, PrefillWorker, demote

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker is lost with all that it has; a new one starts in its place."""

    at: float
    role: Role
    index: int = 0
    """Position among the ready replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a replay runs on."""

    prefill: WorkerProfile | None
    """None: decode workers compute prompts themselves, in chunks beside their answers (aggregated serving)."""
    decode: WorkerProfile
    replicas: Mapping[Role, int]
    """Ready at the beginning."""
    start_up: StartUp = field(default_factory=StartUp)
    ttft: Target
    tpot: Target
    deadlines: bool = True
    """Prompts are computed by their deadlines, late ones behind; else in the order in which they come."""
    hold_seconds: float | None = 1.0
    """The gateway keeps a request while every prefill worker has more work than this; None: it keeps none."""
    queue_seconds: float = NEVER
    """A request that the gateway has kept for so long is turned away (`gateway.queue.ttl`)."""
    local_tokens: int = 0
    """Prompts of at most so many tokens are computed by their decode worker while prefill workers are behind
    (convertible decoders, by a rule of thumb)."""
    convert_step_seconds: float | None = None
    """Decode workers compute prompts where the gateway decides so, as the product's does (`hold_seconds` is None then):
    a step with a part of such a prompt takes so long, and `decode.chunk_tokens` are what fits into it."""
    failures: Sequence[Failure] = ()
    seed: int = 1


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
        self.pools: dict[Role, RolePool] = {}
        if setting.prefill is not None:
            self.pools[Role.PREFILL] = RolePool(self._build_prefill, "prefill", setting.start_up, setting.seed)
        self.pools[Role.DECODE] = RolePool(self._build_decode, "decode", setting.start_up, setting.seed + 1)
        self.telemetry = Telemetry(self.pools)
        self.waiting: list[tuple[float, int, Flight]] = []
        """Requests that the gateway keeps, by deadline or arrival, and some that it has turned away since."""
        self.held = self.held_tokens = 0
        self._load = Recorded(arrivals) if isinstance(arrivals, Sequence) else arrivals
        self._events: list[tuple[float, int, int, object, int]] = []
        self._order = 0
        self._came = self._open = 0
        self.done: list[Flight] = []

    def run(self) -> Replay:
        """Until the last answer has ended."""
        setting = self.setting
        for role, pool in self.pools.items():
            for worker in pool.set_replicas(setting.replicas[role], 0.0, warm=True)[0]:
                pool.admit(worker, 0.0)
            pool.recall_starts(setting.replicas[role])
        self._apply()
        for failure in setting.failures:
            self._plan(failure.at, _FAIL, failure)
        if self.policy is not None:
            self._plan(self.policy.period, _DECIDE, None)
        last, load, events = 0.0, self._load, self._events
        while (at := load.next_at) < NEVER or self._open:
            if at < NEVER and (not events or at <= events[0][0]):
                self.now = last = at
                self._arrive(load.pop())
                continue
            if not events:
                raise RuntimeError(f"{self._open} requests wait for workers that never come, from {self.now:.0f} s on")
            if self.now > last + LONGEST_TAIL:
                raise RuntimeError(f"{self._open} requests have not ended {LONGEST_TAIL:.0f} s after the last arrival")
            self.now, _, kind, subject, version = heappop(events)
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

    def _plan(self, at: float, kind: int, subject: object, version: int = 0) -> None:
        self._order += 1
        heappush(self._events, (at, self._order, kind, subject, version))

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
                self._apply()
                self._drain_waiting()
        elif kind == _EXPIRE:
            assert isinstance(subject, Flight)
            self._expire(subject)
        else:
            assert isinstance(subject, Failure)
            self._fail(subject)

    def _schedule(self, worker: AnyWorker) -> None:
        at = worker.next_event()
        if at < NEVER:
            self._plan(max(at, self.now), _WORKER, worker, worker.version)

    def _work(self, worker: AnyWorker) -> None:
        now = self.now
        if isinstance(worker, PrefillWorker):
            flight = worker.finish(now)
            self._update_closed(worker)
            self._schedule(worker)
            self._plan(self._send(worker, flight), _JOIN, flight, flight.restarts)
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
            self._update_closed(worker)
        self._retire_drained(worker)
        if self.held:
            self._drain_waiting()

    def _send(self, worker: PrefillWorker, flight: Flight) -> float:
        """When the blocks are there. Layers go while later ones are computed: a link that is free delays by little."""
        decode = flight.decode
        assert decode is not None
        busy = worker.profile.transfer(flight.prompt)
        began = max(self.now - flight.work, worker.link_free, decode.link_free)
        end = max(self.now + busy / 32, began + busy)
        worker.link_free = decode.link_free = max(decode.link_free, worker.link_free, began) + busy
        decode.link_busy += busy
        return end + worker.profile.first_token_seconds + GATEWAY_SECONDS

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

    def _conclude(self, flight: Flight) -> None:
        self.done.append(flight)
        self._open -= 1
        self._load.end(flight.session, self.now)

    # the gateway

    def _offer(self, flight: Flight) -> None:
        if (self.held and self.setting.hold_seconds is not None) or not self._dispatch(flight):
            self._hold(flight)

    def _hold(self, flight: Flight) -> None:
        self._order += 1
        self.held += 1
        self.held_tokens += flight.prompt
        heappush(self.waiting, (flight.due if self.setting.deadlines else flight.arrived, self._order, flight))
        if self.setting.queue_seconds < NEVER:
            flight.held_until = self.now + self.setting.queue_seconds
            self._plan(flight.held_until, _EXPIRE, flight)

    def _expire(self, flight: Flight) -> None:
        """Nobody took it in time: its client is told so."""
        if flight.held_until > self.now:
            return
        self._let_go(flight)
        if not self.held:
            self.waiting.clear()
        flight.end = self.now
        self._conclude(flight)

    def _let_go(self, flight: Flight) -> None:
        flight.held_until = NEVER
        self.held -= 1
        self.held_tokens -= flight.prompt

    def _drain_waiting(self) -> None:
        waiting = self.waiting
        rate = self._prefill_seconds
        while waiting:
            flight = waiting[0][2]
            if flight.end < NEVER:
                heappop(waiting)
                continue
            if self.setting.deadlines and demote(flight, self.now + rate * flight.prompt):
                heappop(waiting)
                self._order += 1
                heappush(waiting, (flight.due, self._order, flight))
                continue
            if not self._dispatch(flight):
                return
            heappop(waiting)
            self._let_go(flight)

    @property
    def _prefill_seconds(self) -> float:
        return (self.setting.prefill or self.setting.decode).prefill_token_seconds

    def _dispatch(self, flight: Flight) -> bool:
        setting = self.setting
        decodes_only = setting.prefill is None
        if not decodes_only and self._prefills_closed():
            if flight.prompt > setting.local_tokens or not self._choose(flight, local=True):
                return False
        elif not self._choose(flight, local=False):
            return False
        decode, prefill = flight.decode, flight.prefill
        assert decode is not None
        assert prefill is not None
        decode.kv_reserved += flight.prompt + flight.output
        self._submit(flight, prefill)
        self._update_closed(decode)
        if prefill is not decode:
            self._update_closed(prefill)
        return True

    def _submit(self, flight: Flight, prefill: AnyWorker) -> None:
        prefill.submit(flight, self.now + GATEWAY_SECONDS)
        self._schedule(prefill)

    def _choose(self, flight: Flight, *, local: bool) -> bool:
        if self.setting.convert_step_seconds is not None:
            for worker in self.pools[Role.DECODE].members:
                assert isinstance(worker, DecodeWorker)
                self.routing.tell(worker)
        return self.routing.choose(flight, self.now, local=local)

    def _prefills_closed(self) -> bool:
        """Whether no prefill worker takes a request now."""
        closed = self.routing.closed
        return all(w.name in closed for w in self.pools[Role.PREFILL].members if w.state == "ready")

    def _update_closed(self, worker: AnyWorker) -> None:
        hold = self.setting.hold_seconds
        if isinstance(worker, PrefillWorker):
            full = hold is not None and worker.backlog > hold
        else:
            full = worker.kv_reserved > 0.95 * worker.profile.kv_tokens or (
                hold is not None and worker.prompt_backlog > hold
            )
        if full:
            self.routing.closed.add(worker.name)
        else:
            self.routing.closed.discard(worker.name)

    # the fleet

    def _build_prefill(self, name: str, now: float) -> AnyWorker:
        assert self.setting.prefill is not None
        return PrefillWorker(name, self.setting.prefill, now, deadlines=self.setting.deadlines)

    def _build_decode(self, name: str, now: float) -> AnyWorker:
        return DecodeWorker(name, self.setting.decode, now, deadlines=self.setting.deadlines)

    def _apply(self) -> None:
        self.routing.apply(worker for pool in self.pools.values() for worker in pool.ready)

    def _decide(self) -> None:
        policy = self.policy
        assert policy is not None
        snapshot = self.telemetry.observe(self.now, self.held_tokens, self.held)
        wanted = policy.decide(self.now, snapshot)
        changed = False
        for role, count in (wanted or {}).items():
            pool = self.pools[role]
            if count == len(pool.members):
                continue
            ordered, leaving = pool.set_replicas(max(1, count), self.now)
            for worker in ordered:
                self._plan(worker.ready_at, _READY, worker)
            for worker in leaving:
                changed = True
                self._retire_drained(worker)
        if changed:
            self._apply()
        self._plan(self.now + policy.period, _DECIDE, None)

    def _retire_drained(self, worker: AnyWorker) -> None:
        if worker.state != "draining":
            return
        idle = len(worker) == 0 if isinstance(worker, PrefillWorker) else worker.kv_reserved == 0
        if idle:
            self.pools[worker.role].retire(worker, self.now)

    def _fail(self, failure: Failure) -> None:
        pool = self.pools[failure.role]
        ready = pool.ready
        if failure.index >= len(ready):
            return
        worker = ready[failure.index]
        lost = worker.clear(self.now)
        fresh = pool.replace(worker, self.now)
        self._plan(fresh.ready_at, _READY, fresh)
        self._apply()
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
