"""Models of workers: a prefill worker computes one prompt at a time, a decode worker steps a batch.

Both are advanced from event to event and never step by step: between two events the batch is the same, so the time of
n steps is a quadratic in n, because every step adds a token of context for every sequence.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import sqrt

from tandem_api.names import Role
from tandem_gateway.scheduling import Choice, Demand, Reservation

from tandem_sim.cache import PrefixCache
from tandem_sim.profiles import WorkerProfile

NEVER = float("inf")
LATE_SECONDS = 30.0
"""A prompt that can no longer be in time counts as due so long after it came: others go first, and it never starves."""


class Flight:
    """A request on its way through the fleet."""

    __slots__ = (
        "arrived", "blocks", "choice", "chunks_end", "decode", "demand", "demoted", "due", "end", "first", "hit",
        "index", "output", "prefill", "prompt", "reservation", "restarts", "session", "uncached", "work",
    )  # fmt: skip

    def __init__(
        self, index: int, arrived: float, prompt: int, output: int, blocks: tuple[int, ...], session: int, due: float
    ) -> None:
        self.index = index
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.blocks = blocks
        self.session = session
        self.due = due
        """When its first token must be there."""
        self.hit = self.uncached = 0
        self.work = 0.0
        """Seconds of computing its prompt that are left."""
        self.first = self.end = NEVER
        self.demoted = False
        self.restarts = 0
        """Times that it began again because a worker was lost."""
        self.chunks_end = 0.0
        """The step of its decode worker with which its prompt is computed, where that worker computes it."""
        self.prefill: PrefillWorker | DecodeWorker | None = None
        self.decode: DecodeWorker | None = None
        self.reservation: Reservation | None = None
        self.choice: Choice | None = None
        self.demand: Demand | None = None


class Worker:
    """What both kinds have: a life, and figures for telemetry."""

    role: Role

    __slots__ = ("busy_seconds", "cache", "gone_at", "name", "ordered_at", "profile", "ready_at", "state", "version")

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float) -> None:
        self.name = name
        self.profile = profile
        self.cache = PrefixCache(profile.kv_tokens)
        self.ordered_at = ordered_at
        self.ready_at = NEVER
        self.gone_at = NEVER
        self.state = "warming"
        """warming, ready, draining or gone."""
        self.busy_seconds: float = 0.0
        self.version: int = 0
        """Of its next event; older ones are void."""


class PrefillWorker(Worker):
    """Prompts in the order of arrival or of deadlines; `deadlines` also lets a tighter one interrupt a prompt."""

    role = Role.PREFILL

    __slots__ = ("_began", "_order", "_queue", "backlog", "current", "deadlines", "link_free", "queued_tokens")

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float, *, deadlines: bool) -> None:
        super().__init__(name, profile, ordered_at)
        self.deadlines = deadlines
        self.current: Flight | None = None
        self.backlog = 0.0
        """Seconds of work, of which the prompt under way counts in full until it is done."""
        self.queued_tokens = 0
        self.link_free = 0.0
        self._queue: list[tuple[float, int, Flight]] = []
        self._order = 0
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._queue) + (self.current is not None)

    def submit(self, flight: Flight, now: float) -> None:
        flight.hit = self.cache.match(flight.blocks, flight.prompt)
        self.cache.keep(flight.blocks)
        flight.uncached = flight.prompt - flight.hit
        flight.work = self.profile.prefill(flight.uncached, flight.hit)
        self.backlog += flight.work
        self.queued_tokens += flight.uncached
        current = self.current
        if current is None:
            self._begin(flight, now)
        elif self.deadlines and flight.due < current.due:
            self._stop(now)
            self._push(current)
            self._begin(flight, now)
        else:
            self._push(flight)

    def next_event(self) -> float:
        return self._began + self.current.work if self.current is not None else NEVER

    def finish(self, now: float) -> Flight:
        """The prompt under way is computed."""
        flight = self.current
        assert flight is not None
        self._stop(now)
        self.queued_tokens -= flight.uncached
        if not self._queue:
            self.backlog = 0.0
        else:
            self._begin(self._pop(now), now)
        return flight

    def clear(self, now: float) -> list[Flight]:
        """It is lost: what it had."""
        lost = [flight for _, _, flight in self._queue]
        if self.current is not None:
            lost.append(self.current)
            self._stop(now)
        self._queue.clear()
        self.backlog = 0.0
        self.queued_tokens = 0
        return lost

    def busy(self, now: float) -> float:
        return self.busy_seconds + (now - self._began if self.current is not None else 0.0)

    def _begin(self, flight: Flight, now: float) -> None:
        self.current = flight
        self._began = now
        self.version += 1

    def _stop(self, now: float) -> None:
        assert self.current is not None
        done = now - self._began
        self.current.work = max(0.0, self.current.work - done)
        self.backlog = max(0.0, self.backlog - done)
        self.busy_seconds += done
        self.current = None
        self.version += 1

    def _push(self, flight: Flight) -> None:
        self._order += 1
        heappush(self._queue, (flight.due if self.deadlines else self._order, self._order, flight))

    def _pop(self, now: float) -> Flight:
        while True:
            flight = heappop(self._queue)[2]
            if not self.deadlines or not self._queue or not demote(flight, now + flight.work):
                return flight
            self._push(flight)


def demote(flight: Flight, earliest: float) -> bool:
    """Whether a request that is late whatever happens has just been put behind those that are not. Once each."""
    if flight.demoted or earliest <= flight.due:
        return False
    flight.demoted = True
    flight.due = max(flight.due, flight.arrived + LATE_SECONDS)
    return True


class DecodeWorker(Worker):
    """A batch of sequences, each one token per step; prompts that it computes itself go in chunks beside them."""

    role = Role.DECODE

    __slots__ = (
        "_chunk_seconds", "_finishing", "_last", "_order", "_prompts", "context", "kv_reserved", "link_busy",
        "link_free", "prompt_backlog", "queued_tokens", "sequences", "steps",
    )  # fmt: skip

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float) -> None:
        super().__init__(name, profile, ordered_at)
        self.sequences = 0
        self.context = 0.0
        """Tokens of all sequences together."""
        self.kv_reserved = 0
        self.steps = 0.0
        """Done since it began."""
        self.link_free = self.link_busy = 0.0
        self.queued_tokens = 0
        self.prompt_backlog = 0.0
        """Seconds of prompts that it computes itself."""
        self._last = 0.0
        self._order = 0
        self._finishing: list[tuple[float, int, Flight]] = []
        self._prompts: deque[Flight] = deque()
        self._chunk_seconds = 0.0

    @property
    def step_seconds(self) -> float:
        """Of a step now."""
        return self.profile.step(self.sequences, self.context) + self._chunk_seconds

    def has_room(self, tokens: int) -> bool:
        return self.kv_reserved + tokens <= self.profile.kv_tokens

    def advance(self, now: float) -> None:
        """Do the steps since the last event."""
        passed = now - self._last
        self._last = now
        if passed <= 0 or (not self.sequences and not self._prompts):
            return
        self.busy_seconds += passed
        growth = self.profile.step_context_seconds * self.sequences
        seconds = self.step_seconds
        steps = passed / seconds
        if growth > 1e-15:
            steps = (sqrt(seconds * seconds + 2 * growth * passed) - seconds) / growth
        self.steps += steps
        self.context += steps * self.sequences

    def next_event(self) -> float:
        """When the next sequence or prompt is complete, if nothing else happens."""
        until = self._finishing[0][0] if self._finishing else NEVER
        if self._prompts:
            until = min(until, self._prompts[0].chunks_end)
        if until == NEVER:
            return NEVER
        steps = max(0.0, until - self.steps)
        growth = self.profile.step_context_seconds * self.sequences
        return self._last + steps * self.step_seconds + growth * steps * steps / 2

    def join(self, flight: Flight, now: float) -> None:
        """A sequence whose first token is there."""
        self.advance(now)
        self.sequences += 1
        self.context += flight.prompt
        self._order += 1
        heappush(self._finishing, (self.steps + max(0, flight.output - 1), self._order, flight))
        self.version += 1

    def submit(self, flight: Flight, now: float) -> None:
        """Compute a prompt here."""
        self.advance(now)
        flight.hit = self.cache.match(flight.blocks, flight.prompt)
        self.cache.keep(flight.blocks)
        flight.uncached = flight.prompt - flight.hit
        flight.work = self.profile.prefill(flight.uncached, flight.hit)
        self.queued_tokens += flight.uncached
        self.prompt_backlog += flight.work
        self._prompts.append(flight)
        if len(self._prompts) == 1:
            self._begin_prompt()
        self.version += 1

    def finish(self, now: float) -> tuple[list[Flight], Flight | None]:
        """Sequences that have ended, and the prompt that is computed, if it is one."""
        self.advance(now)
        self.version += 1
        ended: list[Flight] = []
        while self._finishing and self._finishing[0][0] <= self.steps + 1e-6:
            flight = heappop(self._finishing)[2]
            self._leave(flight)
            ended.append(flight)
        computed = None
        if self._prompts and self._prompts[0].chunks_end <= self.steps + 1e-6:
            computed = self._prompts.popleft()
            self.queued_tokens -= computed.uncached
            self.prompt_backlog = max(0.0, self.prompt_backlog - computed.work)
            self._begin_prompt()
        if not self.sequences:
            self.context = 0.0
        return ended, computed

    def clear(self, now: float) -> list[Flight]:
        """It is lost: what it had. What was already said is not said again."""
        self.advance(now)
        lost: list[Flight] = []
        for until, _, flight in self._finishing:
            left = max(1, round(until - self.steps) + 1)
            flight.prompt += flight.output - left
            flight.output = left
            lost.append(flight)
        lost += self._prompts
        self._finishing.clear()
        self._prompts.clear()
        self.sequences = self.kv_reserved = self.queued_tokens = 0
        self.context = self.prompt_backlog = self._chunk_seconds = 0.0
        self.version += 1
        return lost

    def busy(self, now: float) -> float:
        idle = not self.sequences and not self._prompts
        return self.busy_seconds + (0.0 if idle else now - self._last)

    def _begin_prompt(self) -> None:
        if not self._prompts:
            self._chunk_seconds = 0.0
            return
        flight = self._prompts[0]
        chunks = -(-flight.uncached // self.profile.chunk_tokens)
        flight.chunks_end = self.steps + chunks
        # a step with a chunk reads the weights once for both: the longer of the two bounds counts
        alone = flight.work / chunks
        self._chunk_seconds = max(0.0, alone - 0.5 * self.profile.step_seconds)

    def _leave(self, flight: Flight) -> None:
        self.sequences -= 1
        self.context = max(0.0, self.context - flight.prompt - max(0, flight.output - 1))
