"""What a fleet tells about itself: the planner's snapshot, measured as workers and gateways measure it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Counters, RoleState, Snapshot
from tandem_operator.autoscale.plan.peers import agree

from tandem_sim.fleet import AnyWorker, RolePool
from tandem_sim.workers import DecodeWorker, Flight, PrefillWorker

LAST_STARTS = 8
MEMORY_SECONDS = 60.0
"""A velocity is the mean over about so long."""


class Telemetry:
    """Counts as requests pass, and reads the workers when somebody asks."""

    def __init__(self, pools: Mapping[Role, RolePool]) -> None:
        self._pools = pools
        self._requests = self._prompt = self._finished = self._output = 0
        self._squares = 0.0
        self._computed = self._computed_prompt = 0
        self._fresh_tokens = 0
        """Computed by prefill workers since the last look."""
        self._tokens = self._seconds = 0.0
        """Computed by prefill workers and the time they took, older ones fading."""
        self._at = 0.0
        self._busy: dict[Role, dict[str, float]] = {}
        self._links: dict[str, float] = {}
        self._prompts: dict[str, tuple[float, float, float, float]] = {}
        """What decode workers had computed of prompts at the last look."""
        self._mixed_steps = self._mixed_seconds = 0.0

    def arrive(self, flight: Flight) -> None:
        self._requests += 1
        self._prompt += flight.prompt
        self._squares += float(flight.prompt) * flight.prompt

    def compute(self, flight: Flight, *, local: bool) -> None:
        """A prompt is computed, `local`: by a decode worker."""
        self._computed += flight.uncached
        self._computed_prompt += flight.prompt
        if not local:
            self._fresh_tokens += flight.uncached

    def finish(self, flight: Flight) -> None:
        self._finished += 1
        self._output += flight.output

    def observe(self, now: float, held_tokens: int, held_requests: int) -> Snapshot:
        """The fleet now; rates are those since the last call."""
        counters = Counters(
            requests=self._requests,
            prompt_tokens=self._prompt,
            prompt_squares=self._squares,
            computed_prompt_tokens=self._computed_prompt,
            computed_tokens=self._computed,
            finished=self._finished,
            output_tokens=self._output,
        )
        passed = max(1e-9, now - self._at)
        self._at = now
        share = self._computed / self._computed_prompt if self._computed_prompt else 1.0
        roles: dict[Role, RoleState] = {}
        for role, pool in self._pools.items():
            ready = pool.ready
            busy = self._read_busy(role, ready, now)
            if role is Role.PREFILL:
                roles[role] = self._observe_prefill(pool, ready, busy, passed, held_requests, int(held_tokens * share))
            else:
                roles[role] = self._observe_decode(pool, ready, busy, passed)
        if Role.PREFILL not in roles:
            roles[Role.DECODE] = self._observe_shared(
                roles[Role.DECODE], passed, held_requests, int(held_tokens * share)
            )
        return Snapshot(at=now, roles=roles, counters=counters)

    def _read_busy(self, role: Role, ready: list[AnyWorker], now: float) -> float:
        """Seconds that the ready workers have computed since the last look, together."""
        before = self._busy.get(role, {})
        self._busy[role] = {worker.name: worker.busy(now) for worker in ready}
        return sum(seconds - before.get(name, 0.0) for name, seconds in self._busy[role].items())

    def _observe_prefill(
        self, pool: RolePool, ready: list[AnyWorker], busy: float, passed: float, held_requests: int, held_tokens: int
    ) -> RoleState:
        kept = max(0.0, 1 - passed / MEMORY_SECONDS)
        self._tokens = self._tokens * kept + self._fresh_tokens
        self._seconds = self._seconds * kept + busy
        self._fresh_tokens = 0
        workers = [worker for worker in ready if isinstance(worker, PrefillWorker)]
        return RoleState(
            replicas=len(pool.members),
            ready=len(ready),
            warming=len(pool.members) - len(ready),
            queued_requests=held_requests + sum(len(worker) for worker in workers),
            queued_tokens=held_tokens + sum(worker.queued_tokens for worker in workers),
            waiting_tokens=held_tokens,
            running_requests=sum(worker.current is not None for worker in workers),
            busy=busy / passed / len(ready) if ready else None,
            tokens_per_second=self._tokens / self._seconds if self._seconds > 1.0 else None,
            starts=tuple(pool.starts[-LAST_STARTS:]),
        )

    def _observe_decode(self, pool: RolePool, ready: list[AnyWorker], busy: float, passed: float) -> RoleState:
        workers = [worker for worker in ready if isinstance(worker, DecodeWorker)]
        for worker in workers:
            worker.advance(self._at)
        active = [worker for worker in workers if worker.sequences]
        before, self._links = self._links, {worker.name: worker.link_busy for worker in workers}
        links = [seconds - before.get(name, 0.0) for name, seconds in self._links.items()]
        steps = agree({worker.name: worker.decode_seconds for worker in active})
        return RoleState(
            replicas=len(pool.members),
            ready=len(ready),
            warming=len(pool.members) - len(ready),
            queued_tokens=sum(worker.queued_tokens for worker in workers),
            running_requests=sum(worker.sequences for worker in workers),
            kv_tokens_used=int(sum(worker.context for worker in workers)),
            kv_tokens_total=sum(worker.profile.kv_tokens for worker in workers),
            busy=busy / passed / len(ready) if ready else None,
            step_seconds=steps.value,
            mean_step_seconds=steps.mean,
            odd=tuple(sorted(steps.odd)),
            transfer_share=max(links) / passed if links else None,
            starts=tuple(pool.starts[-LAST_STARTS:]),
        )

    def _observe_shared(self, state: RoleState, passed: float, held_requests: int, held_tokens: int) -> RoleState:
        """With what decode workers tell that compute prompts too."""
        before = self._prompts
        self._prompts = {
            worker.name: (worker.computed, worker.prefill_seconds, worker.mixed_steps, worker.mixed_seconds)
            for worker in self._pools[Role.DECODE].ready
            if isinstance(worker, DecodeWorker)
        }
        grown = [
            [new - old for new, old in zip(totals, before.get(name, (0.0,) * 4), strict=True)]
            for name, totals in self._prompts.items()
        ]
        tokens, seconds, steps, mixed = (sum(part) for part in zip(*grown, strict=True)) if grown else (0.0,) * 4
        kept = max(0.0, 1 - passed / MEMORY_SECONDS)
        self._tokens, self._seconds = self._tokens * kept + tokens, self._seconds * kept + seconds
        self._mixed_steps, self._mixed_seconds = self._mixed_steps * kept + steps, self._mixed_seconds * kept + mixed
        return replace(
            state,
            queued_requests=held_requests,
            queued_tokens=state.queued_tokens + held_tokens,
            waiting_tokens=held_tokens,
            tokens_per_second=self._tokens / self._seconds if self._seconds > 1.0 else None,
            mixed_step_seconds=self._mixed_seconds / self._mixed_steps if self._mixed_steps > 1.0 else None,
        )
