"""What the gateway knows of one worker: its load, its speed and what its cache has taken in.

Invariant: the counters are the sums over the open reservations of `ledger`, so they return to zero when the last
request ends, however it ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from tandem_api.engines import EngineKind
from tandem_api.fleet import TTFT_BOUNDS
from tandem_api.names import Role

from tandem_gateway.scheduling.health import WANTED, Health
from tandem_gateway.scheduling.own_prompts import OwnPrompts
from tandem_gateway.scheduling.speed import Speed
from tandem_gateway.scheduling.storing import Store

DECODE_WEIGHT = 0.25
"""Cost of one outstanding output token in prefill tokens: decoding is batched with the prompt chunks and slows them,
but each token only a little. A power of two, so that sums stay exact."""
DEFAULT_KV_TOKENS = 1 << 20
"""Assumed for a worker that nobody told about."""
LONGEST_GAP = 15.0
_GAP_DECAY = 0.9
"""With every sign of life."""
_MOST_DONE = 0.9
"""The most of the outstanding prompts that can be taken for computed: the first token alone tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One worker as discovery reports it. Equal workers are the same worker; a restarted pod keeps its name."""

    name: str
    address: str
    """`host:port` of its HTTP API; an IPv6 host stands in brackets."""
    role: Role
    revision: str
    kv_address: str = ""
    """`host:port` that decode workers ask for prefills; empty: its HTTP address."""
    status_address: str = ""
    """`host:port` of its metrics port; empty: nobody reads its telemetry."""
    kv_tokens: int = DEFAULT_KV_TOKENS
    """Tokens whose key-value blocks fit into it."""
    engine: EngineKind = "Tandem"
    """What it runs, and so how it is asked."""
    needs_prefill: bool = False
    """It decodes, and computes no prompt itself."""


_serials = count(1)


class Candidates(Protocol):
    """Endpoints among which one is chosen, as an endpoint that belongs to them sees them."""

    load: float
    """Sum over those that may be chosen."""
    moved: dict[Endpoint, None]
    """Those that may be chosen whose load has left the range of their level."""

    @property
    def available(self) -> int:
        """How many may be chosen now."""
        ...

    @property
    def members(self) -> Mapping[int, Endpoint]:
        """Endpoints by serial, also those that may not be chosen now."""
        ...

    def admit(self, endpoint: Endpoint) -> None:
        """It may be chosen."""
        ...

    def bar(self, endpoint: Endpoint) -> None:
        """It may not be chosen."""
        ...

    def remove(self, endpoint: Endpoint) -> None: ...


class Wait(Protocol):
    """A request that waits for a sign of life."""

    @property
    def since(self) -> float:
        """When it was sent."""
        ...

    @property
    def patience(self) -> float:
        """Seconds that its first sign should take."""
        ...

    @property
    def holder(self) -> object:
        """The request that it belongs to."""
        ...


class Endpoint:
    """A worker with its load and health as seen from this gateway."""

    __slots__ = (
        "decode_tokens", "deserted", "ended", "evicted_until", "failed", "gap", "gone", "health", "heard_at", "host",
        "kv_tokens", "kv_written", "level", "level_below", "level_from", "load", "others", "owing", "own", "pool",
        "prefill_address", "prefill_tokens", "pull_rate", "quiet_since", "requests", "serial", "speed", "store",
        "tokens_per_event", "told", "told_at", "ttft_counts", "worker", "working_since",
    )  # fmt: skip

    def __init__(self, worker: Worker) -> None:
        self.worker, self.host = worker, worker.address.encode()
        self.serial = next(_serials)
        """Names this incarnation: a worker that left and came back has an empty cache."""
        self.prefill_address = (worker.kv_address or worker.address).encode()
        self.health = Health()
        self.requests = 0
        self.prefill_tokens = 0
        """Uncached prompt tokens sent here and not yet computed."""
        self.decode_tokens = 0
        """Output tokens expected from here and not yet seen."""
        self.tokens_per_event = 1.0
        """What an event of a stream from here carries, as it told last: more than one token where it checks guesses."""
        self.load = 0.0
        """Both and `others`, in prefill tokens."""
        self.others = 0
        """What other gateways have there, as the worker told last."""
        self.told = self.told_at = 0.0
        """Prompt tokens in its queue at `told_at`, whoever sent them: as it told last, and what was sent since from
        here."""
        self.kv_tokens = worker.kv_tokens
        self.kv_written = 0
        """Tokens its cache has taken in so far: what was written before the last `kv_tokens` of them is evicted."""
        self.evicted_until = 0.0
        """Its cache has forgotten what was last used before, as the worker told."""
        self.pull_rate: float | None = None
        """Tokens per second at which it brings blocks that other workers have, and it gives them its own; 0: not known
        yet. None: it does neither."""
        self.store: Store | None = None
        """What it shares with the other workers of its build; None: it uses none, or not now."""
        self.speed = Speed()
        self.own = OwnPrompts()
        self.working_since = 0.0
        """When it began with the oldest prompt that is not yet computed."""
        self.owing: dict[Wait, None] = {}
        """Requests that wait for the first sign of an answer that it has a part in, the oldest first."""
        self.heard_at = self.quiet_since = 0.0
        """When it last showed a sign of life, to anybody; and from when on its silence counts: that time, or when it
        was last left out for it, or is probed again."""
        self.gap = 0.0
        """Seconds: the longest that it was lately silent while it owed something, and alive all the same."""
        self.deserted = 0
        """Clients that had waited for long enough, and left, since it was last heard."""
        self.ended = self.failed = 0
        """Requests that it was sent, or prompts that it was named for, and that have ended otherwise than by their
        client's leaving; how many of them it failed.
        """
        self.ttft_counts = [0] * (len(TTFT_BOUNDS) + 1)
        """First tokens of streams, by the seconds they took."""
        self.gone = False
        """Discovery no longer reports it. Its requests may still finish."""
        self.pool: Candidates | None = None
        self.level = -1
        """Level of its load in the pool; -1: it may not be chosen now."""
        self.level_from = self.level_below = 0
        """The loads of that level."""

    def charge(self, prefill: int, decode: int, others: int = 0) -> None:
        """Change what is outstanding."""
        change = DECODE_WEIGHT * decode + prefill + others
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.others += others
        self.load = load = self.load + change
        pool = self.pool
        if pool is not None and self.level >= 0:
            pool.load += change
            if load >= self.level_below or load < self.level_from:
                pool.moved[self] = None

    def count_end(self, *, failed: bool) -> None:
        self.ended += 1
        self.failed += failed

    def count_first_token(self, seconds: float) -> None:
        self.ttft_counts[bisect_left(TTFT_BOUNDS, seconds)] += 1

    def hear(self, now: float) -> None:
        """A sign of life: a token, or an answer, of whichever request."""
        if now == self.heard_at:
            return
        if self.owing:
            since = next(iter(self.owing)).since
            gap = now - (since if since > self.heard_at else self.heard_at)
            decayed = self.gap * _GAP_DECAY
            self.gap = decayed if decayed > gap else gap if gap < LONGEST_GAP else LONGEST_GAP
        self.heard_at = self.quiet_since = now
        self.deserted = 0

    def find_queue(self, now: float) -> float:
        """Prompt tokens here that are probably not yet computed, whoever sent them: what it told, less what it has
        computed since, and at least what this gateway waits for."""
        tokens = self.prefill_tokens
        speed = self.speed.value
        if not speed:
            return tokens + self.others
        told = self.told
        if told:
            told -= speed * (now - self.told_at)
        if not tokens:
            return told if told > 0 else 0.0
        done = speed * (now - self.working_since)
        most = _MOST_DONE * tokens
        own = tokens - (done if done < most else most)
        return told if told > own else own

    def tell(self, queued: float, now: float) -> None:
        """The worker says how many prompt tokens are in its queue."""
        others = int(queued - self.prefill_tokens)
        self.charge(0, 0, (others if others > 0 else 0) - self.others)
        self.told, self.told_at = queued, now

    def add_told(self, tokens: int, now: float) -> None:
        """This gateway sends so many more."""
        told = self.told - self.speed.value * (now - self.told_at)
        self.told, self.told_at = (told if told > 0 else 0.0) + tokens, now

    @property
    def state(self) -> str:
        """For people and metrics."""
        if self.health.probe is not None:
            return "half-open"
        return "available" if self.level >= 0 else "ejected"

    def retry_probe(self) -> None:
        """The request that probed it ended without a word about it: the next one probes."""
        self.health.probe = WANTED
        if self.pool is not None:
            self.pool.admit(self)
