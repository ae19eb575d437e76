"""From the pools of a model to the pair that serves a request.

The cost of an endpoint is work in tokens that stands before this request's first token, its own included. Candidates
are who holds the prompt's prefix, the session's homes on the ring, some who hold what many prompts begin with, and the
least loaded: a fixed number, however many endpoints there are. The session's home is taken while it costs at most
`SLACK` of the mean load more than the best candidate: affinity with bounded load, so nobody starves and no session
piles up on one endpoint. The same holds for revisions, over which sessions spread in proportion to what each can serve.

Several gateways choose alike where each knows what the others do: queues as workers tell them, prompts as workers name
them (`hearsay`). Where workers name none, a session's home is what all agree on, and counts for more the more of what
this gateway has not seen turns out to be cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from tandem_api.names import Role

from tandem_gateway.scheduling.canary import BY_REVISION, find_point
from tandem_gateway.scheduling.conversion import Conversion
from tandem_gateway.scheduling.demand import Demand
from tandem_gateway.scheduling.endpoint import DECODE_WEIGHT, Endpoint
from tandem_gateway.scheduling.known import NOTHING, Known
from tandem_gateway.scheduling.pool import Pool
from tandem_gateway.scheduling.pulling import MIN_TOKENS, find_source, lower_costs, weigh_loading, weigh_time
from tandem_gateway.scheduling.shared import SharedPrefix
from tandem_gateway.scheduling.storing import Store

SLACK = 0.25
"""Share of the pool's mean load."""
OWN_SLACK = 0.1
"""Share of the request's own work: its first token comes that much later at most."""
SLACK_TOKENS = 64
"""What nobody notices, loaded or not."""
RECOMPUTE_WEIGHT = 1.5
"""Cost of an uncached token: it takes the time of one, and pushes another out of a cache and others back in a queue."""
MOVE_WEIGHT = 0.0625
"""Cost of moving one prompt token's blocks to a decode worker, in prefill tokens."""
MOST_DECODE_LOAD = 2.0
MAX_IDLE = 3
"""Least loaded endpoints that are candidates."""
MAX_SHARERS = 3
"""Holders of the system prompt, say, that are candidates, others each time."""
MAX_PREFILL = 3
"""Prefill endpoints named to the decode worker: the best and two alternates."""

_NOBODY: list[Endpoint] = []
_NO_COSTS: Mapping[Endpoint, float] = {}
_NO_NEARBY = False, None


@dataclass(slots=True)
class Choice:
    """The endpoints that a request goes to. `prefill` is empty where the decode endpoint computes the prompt itself."""

    decode: Endpoint
    prefill: list[Endpoint]
    uncached_tokens: int
    """Estimated for the endpoint that computes the prompt."""
    cached_tokens: int
    known_tokens: int
    """Estimated cached tokens on either endpoint."""
    offers: list[Offer]
    """What was compared, for people; emptied once nobody is told of it any more."""
    expected: float | None = None
    """Seconds from sending the request to its first token, as predicted; None while too little is known."""
    work: float = 0.0
    """Tokens of work before its first token, its own included, when it was sent."""
    measured: float = 0.0
    """Seconds that its first token took; 0 where that is not seen, as in an answer in one piece."""
    status: int = 0
    """Status of the answer; 0 while there is none, or where another attempt gave it."""
    source: Endpoint | None = None
    """Who has a part of the prompt that is brought from there instead of being computed; None: nobody is named."""
    pulled_tokens: int = 0
    """Estimated tokens that are, which count as cached."""
    pulled_work: int = 0
    """The time that those take, and what comes from a store, in tokens that the worker computes in it."""
    store: Store | None = None
    """The store that a part of the prompt is loaded from which nobody else is named for; None: there is none."""
    stored_tokens: int = 0
    """Estimated tokens that are, which count as cached."""
    conversion: Conversion | None = None
    """Whether the decode endpoint computes the prompt though prefill endpoints are there; None: nobody asked."""

    def learn_stored(self, cached_tokens: int) -> None:
        """From the `usage` of the answer: how many prompt tokens were cached, beside those that the worker had.

        Where another worker was to give its part first and has not, nothing is loaded that comes after it: that says
        nothing of the store.
        """
        if self.store is None or not self.stored_tokens:
            return
        had = self.cached_tokens - self.stored_tokens
        if not self.pulled_tokens or cached_tokens >= had:
            self.store.learn((cached_tokens - had) / self.stored_tokens)


@dataclass(slots=True)
class Group:
    """The endpoints of one revision."""

    decodes: Pool
    prefills: Pool


Offer = tuple[float, list[Endpoint], Endpoint, Group, Mapping[Endpoint, float], Mapping[Endpoint, float]]
"""What a revision's best pair costs, its prefill endpoints, best first, its decode endpoint, the revision, and what
each prefill and each decode candidate costs."""


def pick(
    groups: Iterable[Group],
    demand: Demand,
    seed: int,
    known: Known,
    turn: int,
    now: float,
    excluded: Collection[str],
) -> Choice | None:
    """The best pair of one revision among endpoints that may be chosen, or None without a decode endpoint.

    `turn` stands for a request that has no `seed`. In a revision without prefill endpoints decode workers compute
    prompts themselves; one whose engine cannot serves nobody there.
    """
    offers: list[Offer] = []
    for group in groups:
        cost, prefills, costs = 0.0, _NOBODY, _NO_COSTS
        nearby = _NO_NEARBY if known is NOTHING else _find_nearby(group, known, excluded)
        if group.prefills.available and not demand.local:
            prefill, costs = _rank(group.prefills, demand, seed, known, nearby, now, excluded, True)
            if prefill is not None:
                cost, prefills = costs[prefill], _list_alternates(prefill, costs)
        decode, own = _rank(group.decodes, demand, seed, known, nearby, now, excluded, not prefills)
        if decode is not None and (prefills or demand.local or not decode.worker.needs_prefill):
            offers.append((cost + own[decode], prefills, decode, group, costs, own))
    if not offers:
        return None
    offer = offers[0] if len(offers) == 1 else _choose_revision(offers, demand, find_point(seed or turn, BY_REVISION))
    prefills, decode = offer[1], offer[2]
    prompt = demand.prompt_tokens
    if known is NOTHING:
        return Choice(decode, prefills, prompt, 0, 0, offers)
    computing = prefills[0] if prefills else decode
    most = hit = min(prompt, known.count_cached(computing))
    if prefills:
        most = max(hit, min(prompt, known.count_cached(decode)))
    choice = Choice(decode, prefills, prompt - hit, hit, most, offers)
    if computing.pull_rate is not None and (known.cached or known.shared is not None):
        name_source(choice, known, excluded)
    if known.stored:
        count_stored(choice, known.stored)
    return choice


def _find_nearby(group: Group, known: Known, excluded: Collection[str]) -> tuple[bool, tuple[Endpoint, int] | None]:
    """Whether too few of a revision's workers have what many share of the prompt, and which of them has most of it, and
    how much."""
    shared = known.shared
    grows = shared is not None and shared.wants_more(group.prefills.available + group.decodes.available)
    return grows, find_source((group.prefills, group.decodes), known, excluded)


def count_stored(choice: Choice, stored: Mapping[Store, int]) -> None:
    """Count what the worker that computes the prompt loads from its store, beside what it has or is named for."""
    choice.store, choice.stored_tokens = None, 0
    computing = choice.prefill[0] if choice.prefill else choice.decode
    store = computing.store
    if store is None or (time := weigh_loading(computing, store)) >= 1:
        return
    missing = min(stored.get(store, 0), choice.uncached_tokens + choice.cached_tokens) - choice.cached_tokens
    if missing < MIN_TOKENS:
        return
    choice.store, choice.stored_tokens = store, missing
    choice.pulled_work += int(missing * time)
    choice.uncached_tokens -= missing
    choice.cached_tokens += missing
    choice.known_tokens = max(choice.known_tokens, choice.cached_tokens)


def name_source(choice: Choice, known: Known, excluded: Collection[str]) -> None:
    """Name who has more of the prompt than the worker that computes it, where bringing that is sooner; nobody else."""
    choice.source, choice.pulled_tokens, choice.pulled_work = None, 0, 0
    computing = choice.prefill[0] if choice.prefill else choice.decode
    if computing.pull_rate is None or (time := weigh_time(computing)) >= 1:
        return
    group = next((offer[3] for offer in choice.offers if offer[3].decodes is choice.decode.pool), None)
    if group is None:
        return
    source = find_source((group.prefills, group.decodes), known, excluded)
    if source is None or source[0] is computing:
        return
    endpoint, held = source
    held = min(held, choice.uncached_tokens + choice.cached_tokens)
    if held - choice.cached_tokens < MIN_TOKENS:
        return
    choice.source, choice.pulled_tokens = endpoint, held - choice.cached_tokens
    choice.pulled_work = int(choice.pulled_tokens * time)
    choice.uncached_tokens -= choice.pulled_tokens
    choice.cached_tokens = held
    choice.known_tokens = max(choice.known_tokens, held)


def find_capacity(prefills: int, decodes: int, *, all_prefills: int, all_decodes: int) -> float:
    """What a revision with so many endpoints can serve, where all of them together, well matched, could serve 1.

    Its scarcest role limits it. Without prefill endpoints its decode endpoints do both, and have less time for each.
    """
    if not prefills:
        return decodes / (all_prefills + all_decodes)
    return min(prefills / all_prefills, decodes / all_decodes)


def _choose_revision(offers: list[Offer], demand: Demand, point: float) -> Offer:
    """Sessions spread over revisions in proportion to their capacity. A session's own revision is taken while it costs
    at most the slack more than the cheapest, as a home within a revision is. None is taken for its short queue alone
    whose decode endpoints have more than `MOST_DECODE_LOAD` of what all have in the mean.
    """
    all_prefills = sum(group.prefills.available for _, prefills, _, group, _, _ in offers if prefills)
    all_decodes = sum(offer[3].decodes.available for offer in offers)
    capacities = [
        find_capacity(
            group.prefills.available if prefills else 0, group.decodes.available,
            all_prefills=all_prefills, all_decodes=all_decodes,
        )
        for _, prefills, _, group, _, _ in offers
    ]  # fmt: skip
    left = point * sum(capacities)
    home = offers[-1]
    for offer, capacity in zip(offers, capacities, strict=True):
        left -= capacity
        if left < 0:
            home = offer
            break
    most = SLACK_TOKENS + MOST_DECODE_LOAD * sum(offer[3].decodes.load for offer in offers) / all_decodes
    sound = [offer for offer in offers if offer[3].decodes.load <= most * offer[3].decodes.available]
    cheapest = min(sound, key=itemgetter(0))
    load = sum(offer[3].prefills.load + offer[3].decodes.load for offer in offers)
    slack = SLACK_TOKENS + OWN_SLACK * RECOMPUTE_WEIGHT * demand.prompt_tokens
    limit = cheapest[0] + slack + SLACK * load / (all_prefills + all_decodes)
    return home if home[0] <= limit and home in sound else cheapest


def missing_role(endpoints: Collection[Endpoint]) -> str:
    """Why no pair can be chosen, as a sentence for the client."""
    if not any(endpoint.worker.role is not Role.PREFILL for endpoint in endpoints):
        return "no decode worker of this model is ready"
    lame = any(endpoint.worker.needs_prefill for endpoint in endpoints)
    if lame and not any(endpoint.worker.role is Role.PREFILL and endpoint.level >= 0 for endpoint in endpoints):
        return "no prefill worker of this model is ready, and its decode workers compute no prompts"
    return "every decode worker of this model refused the connection, or this gateway's key, a moment ago"


def _rank(
    pool: Pool,
    demand: Demand,
    seed: int,
    known: Known,
    nearby: tuple[bool, tuple[Endpoint, int] | None],
    now: float,
    excluded: Collection[str],
    computes: bool,
) -> tuple[Endpoint | None, dict[Endpoint, float]]:
    """The best candidate, and what each costs. `nearby`: as `_find_nearby` says. `computes`: whoever is chosen computes
    the prompt, or brings of it what others or stores have; else it gets the blocks."""
    if not pool.available:
        return None, {}
    prompt = demand.prompt_tokens
    part = whole = (RECOMPUTE_WEIGHT if computes else MOVE_WEIGHT) * prompt
    homes = pool.ring.find_homes(seed, excluded) if seed else _NOBODY
    candidates = homes
    if len(homes) < pool.available:
        candidates = homes + pool.find_idle(MAX_IDLE, excluded, demand.prefix[-1] if demand.prefix else 0)
    costs: dict[Endpoint, float] = dict.fromkeys(candidates, whole)
    if known is not NOTHING:
        part = _weigh_known(costs, pool, homes, prompt, known, nearby, excluded, computes)
    if not costs:
        return None, costs
    for endpoint in costs:
        if endpoint.prefill_tokens or endpoint.told:  # its load, less what it has probably computed of its prompts
            costs[endpoint] += endpoint.find_queue(now) + DECODE_WEIGHT * endpoint.decode_tokens
        else:
            costs[endpoint] += endpoint.load
    if homes:
        limit = min(costs.values()) + SLACK_TOKENS + SLACK * pool.load / pool.available + OWN_SLACK * part
        for home in homes:
            if costs[home] <= limit:
                return home, costs
    return min(costs, key=costs.__getitem__), costs


def _weigh_known(
    costs: dict[Endpoint, float],
    pool: Pool,
    homes: list[Endpoint],
    prompt: int,
    known: Known,
    nearby: tuple[bool, tuple[Endpoint, int] | None],
    excluded: Collection[str],
    computes: bool,
) -> float:
    """Lower the costs of candidates that have something of the prompt, and add those that do. `nearby`: where too few
    have what many share, homes count as if they had it, so that they get it. Returns the cost of the rest of it."""
    weight = RECOMPUTE_WEIGHT if computes else MOVE_WEIGHT
    grows, source = nearby
    shared, tokens = known.shared, known.shared_tokens
    part = weight * (prompt - tokens) if prompt > tokens else 0.0
    if shared is not None:
        _weigh_sharers(costs, shared, homes if grows else _NOBODY, pool, part, excluded)
    for endpoint, tokens in known.cached.items():
        if endpoint.pool is pool and endpoint.level >= 0 and not (excluded and endpoint.worker.name in excluded):
            costs[endpoint] = weight * (prompt - tokens) if tokens < prompt else 0.0
    if known.unseen and homes:
        costs[homes[0]] -= known.unseen * weight * max(0, prompt - known.count_cached(homes[0]))
    if computes and (source is not None or known.stored):
        lower_costs(costs, source, known.stored, prompt, weight)
    return part


def _weigh_sharers(
    costs: dict[Endpoint, float],
    shared: SharedPrefix,
    growing: list[Endpoint],
    pool: Pool,
    part: float,
    excluded: Collection[str],
) -> None:
    """Who has what many share computes only the rest. `growing` are taken for such; some who are become candidates."""
    holders = shared.holders
    for endpoint in costs:
        holding = holders.get(endpoint)
        if holding is not None and holding.alive():
            costs[endpoint] = part
    for endpoint in growing:
        costs[endpoint] = part
    for endpoint in shared.sample(MAX_SHARERS, pool):
        if not (excluded and endpoint.worker.name in excluded):
            costs[endpoint] = part


def _list_alternates(best: Endpoint, costs: Mapping[Endpoint, float]) -> list[Endpoint]:
    """The best, and the cheapest of the others."""
    ranked = sorted(costs, key=costs.__getitem__)[:MAX_PREFILL]
    if ranked[0] is not best:
        ranked.remove(best) if best in ranked else ranked.pop()
        ranked.insert(0, best)
    return ranked
