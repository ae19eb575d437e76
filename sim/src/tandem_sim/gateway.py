"""The gateway before a fleet: it gives requests to workers that take some, and keeps the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from tandem_api.names import Role

from tandem_sim.fleet import AnyWorker, RolePool
from tandem_sim.routing import Routing
from tandem_sim.setting import Setting
from tandem_sim.workers import NEVER, DecodeWorker, Flight, PrefillWorker, demote


class Gateway:
    """Its queue, and who may get what is at its head."""

    def __init__(
        self,
        setting: Setting,
        routing: Routing,
        pools: Mapping[Role, RolePool],
        submit: Callable[[Flight, AnyWorker], None],
    ) -> None:
        """`submit` hands a request to the worker that computes its prompt."""
        self._setting = setting
        self._routing = routing
        self._pools = pools
        self._submit = submit
        self._waiting: list[tuple[float, int, Flight]] = []
        """Requests that it keeps, by deadline or arrival, and some that it has turned away since."""
        self._order = 0
        self._prefill_seconds = (setting.prefill or setting.decode).prefill_token_seconds
        self.held = self.held_tokens = 0

    def apply(self) -> None:
        """Those workers are there that are ready now."""
        self._routing.apply(worker for pool in self._pools.values() for worker in pool.ready)

    def offer(self, flight: Flight, now: float) -> bool:
        """A request comes. False: it is kept, until `held_until` at most."""
        if not (self.held and self._setting.hold_seconds is not None) and self._dispatch(flight, now):
            return True
        self.held += 1
        self.held_tokens += flight.prompt
        self._push(flight, flight.due if self._setting.deadlines else flight.arrived)
        flight.held_until = now + self._setting.queue_seconds
        return False

    def expire(self, flight: Flight, now: float) -> bool:
        """Turn a request away that nobody took in time; False: somebody did."""
        if flight.held_until > now:
            return False
        self._let_go(flight)
        if not self.held:
            self._waiting.clear()
        return True

    def drain(self, now: float) -> None:
        """Give away what can be, in order."""
        waiting = self._waiting
        while waiting:
            flight = waiting[0][2]
            if flight.end < NEVER:
                heappop(waiting)
                continue
            if self._setting.deadlines and demote(flight, now + self._prefill_seconds * flight.prompt):
                heappop(waiting)
                self._push(flight, flight.due)
                continue
            if not self._dispatch(flight, now):
                return
            heappop(waiting)
            self._let_go(flight)

    def update_closed(self, worker: AnyWorker) -> None:
        """Whether a worker takes requests, after what happened to it."""
        hold = self._setting.hold_seconds
        if isinstance(worker, PrefillWorker):
            full = hold is not None and worker.backlog > hold
        else:
            full = worker.kv_reserved > 0.95 * worker.profile.kv_tokens or (
                hold is not None and worker.prompt_backlog > hold
            )
        if full:
            self._routing.closed.add(worker.name)
        else:
            self._routing.closed.discard(worker.name)

    def _push(self, flight: Flight, rank: float) -> None:
        self._order += 1
        heappush(self._waiting, (rank, self._order, flight))

    def _let_go(self, flight: Flight) -> None:
        flight.held_until = NEVER
        self.held -= 1
        self.held_tokens -= flight.prompt

    def _dispatch(self, flight: Flight, now: float) -> bool:
        if self._setting.prefill is not None and self._prefills_closed():
            if flight.prompt > self._setting.local_tokens or not self._choose(flight, now, local=True):
                return False
        elif not self._choose(flight, now, local=False):
            return False
        decode, prefill = flight.decode, flight.prefill
        assert decode is not None
        assert prefill is not None
        decode.kv_reserved += flight.prompt + flight.output
        self._submit(flight, prefill)
        self.update_closed(decode)
        if prefill is not decode:
            self.update_closed(prefill)
        return True

    def _choose(self, flight: Flight, now: float, *, local: bool) -> bool:
        if self._setting.convert_step_seconds is not None:
            for worker in self._pools[Role.DECODE].members:
                assert isinstance(worker, DecodeWorker)
                self._routing.tell(worker)
        return self._routing.choose(flight, now, local=local)

    def _prefills_closed(self) -> bool:
        """Whether no prefill worker takes a request now."""
        closed = self._routing.closed
        return all(w.name in closed for w in self._pools[Role.PREFILL].members if w.state == "ready")
