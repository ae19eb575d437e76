"""Models of workers: a prefill worker computes one prompt at a time, a decode worker steps a batch.

Both are advanced from event to event and never step by step: between two events the batch is the same, so the time of
n steps is a quadratic in n, because every step adds a token of context for every sequence, and a chunk of context for
a prompt beside them.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import ceil, sqrt

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
        "arrived", "blocks", "choice", "chunks_end", "decode", "demand", "demoted", "due", "end", "first", "held_until",
        "hit", "index", "left", "output", "prefill", "prompt", "reservation", "restarts", "session", "uncached", "work",
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
        self.left = 0.0
        """Tokens of its prompt that are left, where a decode worker computes it."""
        self.first = self.end = NEVER
        self.held_until = NEVER
        """When the gateway turns it away, while it keeps it."""
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
        """Version of its next event; older ones are void."""

    def find(self, flight: Flight, now: float) -> int:
        """Tokens of a prompt that it has, when all of it is kept from now on."""
        hit = self.cache.match(flight.blocks, flight.prompt)
        self.cache.keep(flight.blocks, now)
        return hit

    def _read(self, flight: Flight, now: float) -> None:
        """What is to be computed of a prompt, and how long that takes alone."""
        flight.hit = self.find(flight, now)
        flight.uncached = flight.prompt - flight.hit
        flight.work = self.profile.prefill(flight.uncached, flight.hit)


class PromptQueue:
    """Prompts that wait, by arrival or by deadline."""

    __slots__ = ("_deadlines", "_heap", "_order")

    def __init__(self, *, deadlines: bool) -> None:
        self._deadlines = deadlines
        self._heap: list[tuple[float, int, Flight]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, flight: Flight) -> None:
        self._order += 1
        heappush(self._heap, (flight.due if self._deadlines else self._order, self._order, flight))

    def pop(self, now: float) -> Flight:
        while True:
            flight = heappop(self._heap)[2]
            if not self._deadlines or not self._heap or not demote(flight, now + flight.work):
                return flight
            self.push(flight)

    def interrupts(self, flight: Flight, current: Flight) -> bool:
        """Whether a prompt that comes goes before the one under way."""
        return self._deadlines and flight.due < current.due

    def clear(self) -> list[Flight]:
        """Empty it: what was in it."""
        held = [flight for _, _, flight in self._heap]
        self._heap.clear()
        return held


class PrefillWorker(Worker):
    """Prompts in the order of arrival or of deadlines; `deadlines` also lets a tighter one interrupt a prompt."""

    role = Role.PREFILL

    __slots__ = ("_began", "_queue", "backlog", "current", "link_free", "queued_tokens")

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float, *, deadlines: bool) -> None:
        super().__init__(name, profile, ordered_at)
        self.current: Flight | None = None
        self.backlog = 0.0
        """Seconds of work, of which the prompt under way counts in full until it is done."""
        self.queued_tokens = 0
        self.link_free = 0.0
        self._queue = PromptQueue(deadlines=deadlines)
        self._began = 0.0

    def __len__(self) -> int:
        return len(self._queue) + (self.current is not None)

    def submit(self, flight: Flight, now: float) -> None:
        self._read(flight, now)
        self.backlog += flight.work
        self.queued_tokens += flight.uncached
        current = self.current
        if current is None:
            self._begin(flight, now)
        elif self._queue.interrupts(flight, current):
            self._stop(now)
            self._queue.push(current)
            self._begin(flight, now)
        else:
            self._queue.push(flight)

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
            self._begin(self._queue.pop(now), now)
        return flight

    def clear(self, now: float) -> list[Flight]:
        """It is lost: what it had."""
        lost = self._queue.clear()
        if self.current is not None:
            lost.append(self.current)
            self._stop(now)
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


def demote(flight: Flight, earliest: float) -> bool:
    """Whether a request that is late whatever happens has just been put behind those that are not. Once each."""
    if flight.demoted or earliest <= flight.due:
        return False
    flight.demoted = True
    flight.due = max(flight.due, flight.arrived + LATE_SECONDS)
    return True


class DecodeWorker(Worker):
    """A batch of sequences, each one token per step; prompts that it computes itself go in chunks beside them.

    A step has at most `chunk_tokens` tokens: one of each sequence, the rest of the prompt under way. Where more prompts
    wait, the next one takes what is left of a step; a prompt that is alone takes whole steps.
    """

    role = Role.DECODE

    __slots__ = (
        "_chunk", "_chunk_overhead", "_current", "_finishing", "_last", "_order", "_queue", "computed", "context",
        "kv_reserved", "link_busy", "link_free", "mixed_seconds", "mixed_steps", "prefill_seconds", "prompt_backlog",
        "queued_tokens", "sequences", "steps",
    )  # fmt: skip

    def __init__(self, name: str, profile: WorkerProfile, ordered_at: float, *, deadlines: bool = False) -> None:
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
        self.computed = self.prefill_seconds = 0.0
        """Prompt tokens computed here, and the time of steps by their share of a step's tokens."""
        self.mixed_steps = self.mixed_seconds = 0.0
        """Steps that computed prompts and decoded."""
        self._last = 0.0
        self._order = 0
        self._finishing: list[tuple[float, int, Flight]] = []
        self._queue = PromptQueue(deadlines=deadlines)
        self._current: Flight | None = None
        self._chunk = 0.0
        """Tokens of the prompt under way in a step."""
        self._chunk_overhead = 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds of a step now that only decodes."""
        return self.profile.step(self.sequences, self.context)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step now."""
        flight = self._current
        if flight is None:
            return self.decode_seconds
        before = flight.prompt - (flight.chunks_end - self.steps) * self._chunk
        mixed = self.profile.mixed_step(self.sequences, self.context, self._chunk, before)
        return mixed + self._chunk_overhead

    @property
    def _growth(self) -> float:
        """Seconds by which a step is longer than the one before."""
        profile, chunk = self.profile, self._chunk
        return profile.step_context_seconds * self.sequences + profile.prefill_pair_seconds * chunk * chunk

    def has_room(self, tokens: int) -> bool:
        return self.kv_reserved + tokens <= self.profile.kv_tokens

    def advance(self, now: float) -> None:
        """Do the steps since the last event."""
        passed = now - self._last
        if passed <= 0:
            return
        self._last = now
        if not self.sequences and self._current is None:
            return
        self.busy_seconds += passed
        growth = self._growth
        seconds = self.step_seconds
        steps = passed / seconds
        if growth > 1e-15:
            steps = (sqrt(seconds * seconds + 2 * growth * passed) - seconds) / growth
        self.steps += steps
        if self._current is not None:
            self.computed += steps * self._chunk
            self.prefill_seconds += passed * self._chunk / (self._chunk + self.sequences)
            if self.sequences:
                self.mixed_steps += steps
                self.mixed_seconds += passed
        self.context += steps * self.sequences

    def count_uncomputed(self, now: float) -> float:
        """Tokens of the prompts here that are not computed yet."""
        self.advance(now)
        current = self._current
        if current is None:
            return 0.0
        return self.queued_tokens - current.uncached + max(0.0, current.chunks_end - self.steps) * self._chunk

    def next_event(self) -> float:
        """When the next sequence or prompt is complete, if nothing else happens."""
        until = self._finishing[0][0] if self._finishing else NEVER
        if self._current is not None:
            until = min(until, self._current.chunks_end)
        if until == NEVER:
            return NEVER
        steps = max(0.0, until - self.steps)
        return self._last + steps * self.step_seconds + self._growth * steps * steps / 2

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
        self._read(flight, now)
        flight.left = float(flight.uncached)
        self.queued_tokens += flight.uncached
        self.prompt_backlog += flight.work
        current = self._current
        if current is None:
            self._begin(flight)
        elif self._queue.interrupts(flight, current):
            current.left = max(1.0, (current.chunks_end - self.steps) * self._chunk)
            self._queue.push(current)
            self._begin(flight)
        else:
            self._queue.push(flight)
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
        computed = self._current
        if computed is not None and computed.chunks_end <= self.steps + 1e-6:
            self.queued_tokens -= computed.uncached
            self.prompt_backlog = max(0.0, self.prompt_backlog - computed.work)
            self._begin(self._queue.pop(now) if self._queue else None)
        else:
            computed = None
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
        lost += self._queue.clear()
        if self._current is not None:
            lost.append(self._current)
        self._finishing.clear()
        self._begin(None)
        self.sequences = self.kv_reserved = self.queued_tokens = 0
        self.context = self.prompt_backlog = 0.0
        self.version += 1
        return lost

    def busy(self, now: float) -> float:
        idle = not self.sequences and self._current is None
        return self.busy_seconds + (0.0 if idle else now - self._last)

    def _begin(self, flight: Flight | None) -> None:
        """Compute this prompt from now on, or go on with it."""
        self._current = flight
        self._chunk = self._chunk_overhead = 0.0
        if flight is None:
            return
        steps = flight.left / max(1, self.profile.chunk_tokens - self.sequences)
        if not self._queue:
            steps = ceil(steps - 1e-9)
        self._chunk = flight.left / steps
        self._chunk_overhead = self.profile.prefill_seconds * flight.left / flight.uncached / steps
        flight.chunks_end = self.steps + steps

    def _leave(self, flight: Flight) -> None:
        self.sequences -= 1
        self.context = max(0.0, self.context - flight.prompt - max(0, flight.output - 1))
