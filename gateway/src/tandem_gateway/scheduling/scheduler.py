"""The scheduler's state for one model: pools of endpoints, prefix index and learned ratios, and the choices made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from copy import copy
from heapq import heappop, heappush

from tandem_api.launch import CanaryTraffic
from tandem_api.names import Role

from tandem_gateway.scheduling.canary import Split
from tandem_gateway.scheduling.conversion import Terms, Verdict
from tandem_gateway.scheduling.demand import Demand, Estimator
from tandem_gateway.scheduling.endpoint import Candidates, Endpoint, Worker
from tandem_gateway.scheduling.health import RULES, SERVES_OLD, WANTED, Outcome
from tandem_gateway.scheduling.hearsay import Hearsay, name_prompt, parse_name
from tandem_gateway.scheduling.known import NOTHING, Known
from tandem_gateway.scheduling.ledger import Reservation
from tandem_gateway.scheduling.outliers import SILENT_SECONDS, check
from tandem_gateway.scheduling.picker import SLACK_TOKENS, Choice, Group, count_stored, name_source, pick
from tandem_gateway.scheduling.pool import Pool
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, PrefixIndex
from tandem_gateway.scheduling.reconsider import reconsider
from tandem_gateway.scheduling.shared import Holding, SharedPrefix
from tandem_gateway.scheduling.storing import Share, Store, Stores

CHECK_SECONDS = 1.0
"""Between two looks for workers that are silent or slow."""
PROBE_SECONDS = 5.0
"""A half-open worker is probed by another request where the one before has not told by then."""
SHORT_CHUNKS = 2
"""Prompts of fewer chunks leave no trace in the index: the last one of their session is remembered instead, unless it
is so short that nobody would notice."""
LONG_PROMPT = 4096
"""Uncached tokens that a decode worker would rather not compute itself."""
HOME_CREDIT = 3.0
"""A session's home is taken to have this many times the share of unseen hits that there lately were: where others send
to homes, so that all agree, they have nearly all, and prompts that nobody has seen lower the mean."""
RETRY_SHARE = 0.3
RETRY_BURST = 50.0
"""This share of all requests may be tried again because of 429 and 5xx, and so many at once: no storm of retries."""
MOST_OTHERS = 1 << 40
"""Tokens of others in a worker's queue: no worker means more, and sums of loads stay exact."""
_NOBODY: frozenset[str] = frozenset()
_ANSWERED = Outcome.ANSWERED


_Groups = dict[tuple[str, str], Group]


class Scheduler:
    """Owned by one event loop; nothing in it blocks or waits."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.endpoints: dict[str, Endpoint] = {}
        self.estimator = Estimator()
        self.index = PrefixIndex()
        self.hearsay = Hearsay()
        self.failures: Counter[Outcome] = Counter()
        self.ejections: Counter[Outcome] = Counter()
        self.canary: CanaryTraffic | None = None
        self.canary_requests: Counter[tuple[bool, bool]] = Counter()
        """Requests sent while there was a canary: whether to its workers, and whether they were meant for the others
        of the two sides, which could not serve."""
        self.terms = terms
        """Terms by which decode workers compute prompts while prefill workers are behind; None: they do not."""
        self.conversions: Counter[Verdict] = Counter()
        """Requests that were sent while there were terms, and could have gone to a prefill worker."""
        self._canary_names: frozenset[str] = frozenset()
        self._split = Split(0.0)
        self._turn = 0
        self._groups: tuple[_Groups, _Groups] = ({}, {})
        """Pools by revision and engine, so that no pair has workers of two: everybody's but the canary's, and the
        canary's."""
        self._stores = Stores()
        self._out: list[tuple[float, int, Endpoint]] = []
        """Who is left out, by the end of the pause. Entries of the past are skipped."""
        self._checked_at = 0.0
        self._retries = RETRY_BURST
        """Attempts beyond the first that may be made after answers of busy or failing workers."""

    # workers

    def apply_workers(self, workers: Iterable[Worker]) -> list[Endpoint]:
        """Make the endpoints those of `workers`; returns the endpoints that left.

        A worker that kept name and address keeps its load and health. One that came back under another address is a
        new endpoint: what was promised to the old one is released by its own requests.
        """
        wanted = {worker.name: worker for worker in workers}
        left = [endpoint for name, endpoint in self.endpoints.items() if wanted.get(name) != endpoint.worker]
        for endpoint in left:
            endpoint.gone = True
            self._stores.apply(endpoint, None)
            del self.endpoints[endpoint.worker.name]
            if endpoint.pool is not None:
                endpoint.pool.remove(endpoint)
        joined: dict[Pool, list[Endpoint]] = {}
        for name, worker in wanted.items():
            if name not in self.endpoints:
                endpoint = self.endpoints[name] = Endpoint(worker)
                joined.setdefault(self._find_pool(worker), []).append(endpoint)
        for pool, endpoints in joined.items():
            pool.add(endpoints)
        self._drop_empty_groups()
        self._size_index()
        return left

    def apply_canary(self, traffic: CanaryTraffic | None) -> None:
        """From now on so many of the new requests go to these workers, and the others to the rest; None: no canary.

        No pair has workers of both sides. While one side cannot serve, the other one serves all.
        """
        if traffic == self.canary:
            return
        if traffic is None or self.canary is None or traffic.percent != self.canary.percent:
            self._split = Split(0.0 if traffic is None else traffic.percent)
        self.canary = traffic
        names: frozenset[str] = frozenset() if traffic is None else frozenset(traffic.workers)
        moving = [self.endpoints[name] for name in self._canary_names ^ names if name in self.endpoints]
        self._canary_names = names
        for endpoint in moving:
            self._move(endpoint)
        self._drop_empty_groups()

    def _move(self, endpoint: Endpoint) -> None:
        """To the side that it now belongs to, with its load and its health."""
        barred = endpoint.level < 0
        if endpoint.pool is not None:
            endpoint.pool.remove(endpoint)
        pool = self._find_pool(endpoint.worker)
        pool.add([endpoint])
        if barred and (endpoint.health.probe is None or pool.available > 1):
            pool.bar(endpoint)

    def _find_pool(self, worker: Worker) -> Pool:
        groups = self._groups[worker.name in self._canary_names]
        key = worker.revision, worker.engine
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(Pool(), Pool())
            for other in sorted(groups):  # in one order in every gateway: sessions' revisions follow from it
                groups[other] = groups.pop(other)
        return group.prefills if worker.role is Role.PREFILL else group.decodes

    def _drop_empty_groups(self) -> None:
        for groups in self._groups:
            for key, group in list(groups.items()):
                if not group.decodes.members and not group.prefills.members:
                    del groups[key]

    # choosing

    def choose(self, demand: Demand, now: float, excluded: Collection[str] = _NOBODY) -> Choice | None:
        """The pair for this request, or None when no decode endpoint may serve it now. Commits to nothing, but for the
        side of a canary that the request is for.
        """
        if self._out and self._out[0][0] <= now:
            self._readmit(now)
        seed, known = demand.affinity, NOTHING
        if demand.prefix or demand.prompt_tokens >= SLACK_TOKENS or self.estimator.unseen_hits:
            seed, known = self._look_up(demand, now)
        if not seed:
            self._turn += 1
        canary = self.canary is not None and self._decide_side(demand, seed)
        for groups in (self._groups[canary], self._groups[not canary]):
            if groups:
                choice = pick(groups.values(), demand, seed, known, self._turn, now, excluded)
                if choice is not None:
                    if self.terms is not None and choice.prefill and choice.decode.worker.engine == "Tandem":
                        reconsider(choice, demand, known, self.terms, now)
                        if not choice.prefill:
                            name_source(choice, known, excluded)
                            count_stored(choice, known.stored)
                    return choice
        return None

    def _look_up(self, demand: Demand, now: float) -> tuple[int, Known]:
        """The seed of the session, which follows from the prompt where nothing names it; and where the prompt is."""
        chain, seed = demand.prefix, demand.affinity
        cached: dict[Endpoint, int] = {}
        shared: SharedPrefix | None = None
        shared_tokens = 0
        stored: dict[Store, int] = {}
        if chain:
            tokens = CHUNK_BYTES / self.estimator.bytes_per_token
            depth = 0
            located, shared = self.index.locate(chain)
            if shared is not None:
                depth, demand.shared = shared.depth, shared.entry
                shared_tokens = int(depth * tokens)
            seed = seed or chain[min(depth, len(chain) - 1)]
            cached = self.index.match(chain, depth, tokens, located)
            stored = self.index.match_stored(chain, located, tokens, len(self._stores))
            self.hearsay.match(chain, located, tokens, cached, stored, now)
            stored = {} if demand.scored else stored  # nothing is loaded for it, which says nothing of what is there
        if len(chain) < SHORT_CHUNKS and seed and demand.prompt_tokens >= SLACK_TOKENS:
            for endpoint, tokens in self.index.match_session(seed, demand.short):
                cached[endpoint] = max(tokens, cached.get(endpoint, 0))
        unseen = self.estimator.unseen_hits
        return seed, Known(cached, shared, shared_tokens, stored, min(1.0, HOME_CREDIT * unseen) if unseen else 0.0)

    def _decide_side(self, demand: Demand, seed: int) -> bool:
        """Whether the request is for the canary; a request that is tried again stays where it was."""
        if demand.canary is None:
            demand.canary = self._split.decide(seed)
        return demand.canary

    def preview(self, demand: Demand, now: float) -> Choice | None:
        """What `choose` would say. Nothing that is chosen later hangs on it, but for who is first of equals."""
        turn, split = self._turn, copy(self._split)
        choice = self.choose(demand, now)
        self._turn, self._split = turn, split
        return choice

    def reserve(self, choice: Choice, demand: Demand, now: float) -> Reservation:
        """Count the request on its endpoints."""
        if self._retries < RETRY_BURST:
            self._retries = min(RETRY_BURST, self._retries + RETRY_SHARE)
        if self.canary is not None:
            served = choice.decode.worker.name in self._canary_names
            self.canary_requests[served, demand.canary is not None and demand.canary is not served] += 1
        decode, conversion = choice.decode, choice.conversion
        prefill = choice.prefill[0] if choice.prefill else decode
        if conversion is not None:
            self.conversions[conversion.verdict] += 1
        work = choice.uncached_tokens + choice.pulled_work
        pulls = choice.pulled_tokens > 0 or choice.stored_tokens > 0
        reservation = Reservation(decode, prefill, work, demand.output_tokens, now, demand.stream, conversion, pulls)
        if prefill.told:
            prefill.add_told(work, now)
        if decode.health.probe is WANTED:
            self._begin_probe(decode, reservation, now)
        if prefill is not decode and prefill.health.probe is WANTED:
            self._begin_probe(prefill, reservation, now)
        return reservation

    @staticmethod
    def _begin_probe(endpoint: Endpoint, reservation: Reservation, now: float) -> None:
        pool = endpoint.pool
        if pool is not None:
            endpoint.health.probe = reservation
            endpoint.health.probe_until = now + PROBE_SECONDS
            if pool.available > 1:
                pool.bar(endpoint)

    def accept(self, choice: Choice, demand: Demand, reservation: Reservation, now: float) -> None:
        """The worker answers the request: remember where its prefix now is, until its end in use."""
        decode = choice.decode
        prefill = choice.prefill[0] if choice.prefill else decode
        written = choice.uncached_tokens + choice.pulled_tokens + choice.stored_tokens
        decode.kv_written += written
        if prefill is not decode:
            prefill.kv_written += written
        chain = demand.prefix
        if not chain and demand.prompt_tokens < SLACK_TOKENS:
            return
        both = (decode,) if prefill is decode else (prefill, decode)
        if chain:
            reservation.copy = self.index.record(chain, both, now)
        if len(chain) < SHORT_CHUNKS and demand.affinity and demand.prompt_tokens >= SLACK_TOKENS:
            copy = self.index.record_session(demand.affinity, both, demand.prompt_tokens, now, demand.short)
            reservation.copy = copy

    def observe(
        self,
        endpoint: Endpoint,
        now: float,
        *,
        queued_tokens: float,
        evicted_until: float | None = None,
        kv_tokens: int | None = None,
        prompts: Iterable[str] = (),
        pull_rate: float | None = None,
        share: Share | None = None,
    ) -> None:
        """What a worker tells about itself: uncached prompt tokens in its queue, whoever sent them, until when its
        cache has forgotten what was last used (by the clock of `now`), how many tokens fit into that, the names of
        prompts that it has begun lately, at how many tokens per second it brings blocks of other workers: 0 where
        that is not known yet, None where it brings none; and its part in a store, None where it uses none.
        """
        room = self._stores.tokens
        self._stores.apply(endpoint, share)
        endpoint.pull_rate = pull_rate if endpoint.worker.kv_address else None
        endpoint.tell(min(queued_tokens, MOST_OTHERS), now)
        for name in prompts:
            self._hear(endpoint, name, now)
        if evicted_until is not None:
            endpoint.evicted_until = evicted_until
        resized = kv_tokens and kv_tokens != endpoint.kv_tokens
        if kv_tokens:
            endpoint.kv_tokens = kv_tokens
        if resized or self._stores.tokens != room:
            self._size_index()

    def _hear(self, endpoint: Endpoint, name: str, now: float) -> None:
        """Some gateway has sent this prompt there."""
        parts = parse_name(name)
        if parts is None:
            return
        entry, shared_entry, prefill = parts
        if self.hearsay.knows(entry, endpoint) or self.index.holds(entry, endpoint):
            return
        holdings = [Holding(endpoint, now)]
        holdings[0].note_stored()
        helper = self.endpoints.get(prefill) if prefill else None
        if helper is not None:
            holdings.append(Holding(helper, now))
        self.hearsay.add(entry, holdings)
        self.index.share(self.index.find_shared(shared_entry), holdings)

    @staticmethod
    def name_prompt(choice: Choice, demand: Demand) -> str:
        """How the worker is to tell all gateways that it has this prompt; empty: it is too short to matter."""
        chain = demand.prefix
        if len(chain) < SHORT_CHUNKS:
            return ""
        return name_prompt(chain[-1], demand.shared, choice.prefill[0].worker.name if choice.prefill else "")

    def find_backlog(self, waiting_tokens: int = 0) -> float | None:
        """Seconds until the prompts are computed that wait at workers, and of so many tokens before them; None while no
        worker's speed is known. O(workers)."""
        speed = sum(endpoint.speed.value for endpoint in self.endpoints.values())
        if not speed:
            return None
        waits = sum(endpoint.prefill_tokens + endpoint.others for endpoint in self.endpoints.values())
        return (waiting_tokens + waits) / speed

    def miss(self, endpoint: Endpoint) -> None:
        """A worker has told nothing for a while: what was in its queue is not known any more, nor whether it still
        gives blocks away and uses a store."""
        endpoint.charge(0, 0, -endpoint.others)
        endpoint.told, endpoint.pull_rate = 0.0, None
        self._stores.apply(endpoint, None)

    def _size_index(self) -> None:
        tokens = self._stores.tokens + sum(endpoint.kv_tokens for endpoint in self.endpoints.values())
        self.index.resize(tokens * self.estimator.bytes_per_token)

    # health

    def report(self, endpoint: Endpoint, outcome: Outcome, now: float) -> None:
        """How an attempt at an endpoint went. Decides whether it is left out for a while."""
        health = endpoint.health
        pool = endpoint.pool
        out = endpoint.level < 0 and health.probe is None
        if outcome is _ANSWERED:
            if not health.failures and not out and health.probe is None:
                return  # nothing new
            if out and health.reason in SERVES_OLD:
                return  # to a request from before
            health.succeed()
            if pool is not None:
                pool.admit(endpoint)
            return
        self.failures[outcome] += 1
        pause = health.fail(outcome)
        if out:
            return  # many requests fail at once when a worker dies: they cost it one pause
        if not pause or pool is None or not (RULES[outcome].hard or self._may_eject(pool, endpoint)):
            return
        health.open(now + pause, outcome)
        self.ejections[outcome] += 1
        pool.bar(endpoint)
        heappush(self._out, (health.until, endpoint.serial, endpoint))

    def report_timeout(self, endpoint: Endpoint, waited: float, now: float) -> None:
        """A request got nothing from an endpoint for so many seconds, which is as long as it may take."""
        alive = endpoint.heard_at > now - min(waited, SILENT_SECONDS)
        self.report(endpoint, Outcome.LATE if alive else Outcome.TIMEOUT, now)

    def report_prefill(self, choice: Choice, used: str, now: float) -> None:
        """`used` names the worker that computed the prompt. Those named before it did not: they are dead or refused.

        A decode worker computes short prompts itself, and prompts that it knows; a long one only where nobody else did.
        """
        for endpoint in choice.prefill:
            if endpoint.worker.name == used:
                endpoint.count_end(failed=False)
                self.report(endpoint, Outcome.ANSWERED, now)
                break
        else:
            if used != choice.decode.worker.name or choice.uncached_tokens < LONG_PROMPT:
                return
        for endpoint in choice.prefill:
            if endpoint.worker.name == used:
                return
            endpoint.count_end(failed=True)
            self.report(endpoint, Outcome.UNUSED, now)

    def may_retry(self) -> bool:
        """Whether another attempt is within the budget of this model; spends it."""
        if self._retries < 1.0:
            return False
        self._retries -= 1.0
        return True

    @staticmethod
    def _may_eject(pool: Candidates, endpoint: Endpoint) -> bool:
        """On suspicion never the last, and never so many that fewer than half are left."""
        left = pool.available - (endpoint.level >= 0)
        return left >= 1 and 2 * left >= len(pool.members)

    def _readmit(self, now: float) -> None:
        while self._out and self._out[0][0] <= now:
            until, _, endpoint = heappop(self._out)
            if endpoint.pool is not None and endpoint.health.until == until:
                endpoint.health.half_open()
                endpoint.quiet_since = now  # what it owes from before has spoken against it already
                endpoint.pool.admit(endpoint)

    def tick(self, now: float) -> None:
        """End the pauses that are over, whether or not anybody asks, and look for workers that are silent or slow."""
        self._readmit(now)
        passed = now - self._checked_at
        if passed < CHECK_SECONDS:
            return
        self._checked_at = now
        if passed > SILENT_SECONDS:  # this process was held up, and has heard nobody
            for endpoint in self.endpoints.values():
                endpoint.quiet_since = now
            return
        for groups in self._groups:
            for group in groups.values():
                check(group.decodes, now, self.report)
                check(group.prefills, now, self.report)
