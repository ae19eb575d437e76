"""Blocks that a worker brings from another one, or from a store, instead of computing them: who is named for that, and
what it costs.

Workers tell at which rate such blocks come. To who computes prompts slowly, or has a fast network, a token that is
brought costs next to nothing; where computing is as fast nobody is named.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from math import inf

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.known import Known
from tandem_gateway.scheduling.pool import Pool
from tandem_gateway.scheduling.storing import Store

COPY_WEIGHT = 0.25
"""Cost of a token that is brought, in computed ones, beside its time: a second copy pushes another out of a cache, from
where that may be brought in turn."""
USUAL_WEIGHT = 0.25
"""Its time, in that of a computed one, until a worker has told its rate."""
NOTHING_COMES = 1e-6
"""Tokens per second of a worker that gets nothing of those whom it asks. It gives as before."""
MIN_TOKENS = 256
"""Fewer are not worth asking for."""
_MAX_SHARERS = 8


def weigh_time(endpoint: Endpoint) -> float:
    """What a token that this worker brings takes, in the time that it computes one."""
    rate, speed = endpoint.pull_rate, endpoint.speed.value
    if rate == NOTHING_COMES:  # also while nobody knows how fast it computes
        return inf
    return speed / rate if rate and speed else USUAL_WEIGHT


def find_source(
    pools: tuple[Pool, Pool],
    known: Known,
    excluded: Collection[str],
) -> tuple[Endpoint, int] | None:
    """Who of these pools has most of the prompt and gives it away, and how many tokens; None: nobody has enough.
    O(1): what many share has many holders, of whom a few are looked at."""
    best: Endpoint | None = None
    most, shared = MIN_TOKENS - 1, known.shared
    for endpoint, tokens in known.cached.items():
        if tokens > most and endpoint.pull_rate is not None and _gives(endpoint, pools, excluded):
            best, most = endpoint, tokens
    if best is None and shared is not None and known.shared_tokens > most:
        for endpoint, holding in islice(shared.holders.items(), _MAX_SHARERS):
            if endpoint.pull_rate is not None and _gives(endpoint, pools, excluded) and holding.alive():
                # Another one each time: many who lack it may be told at once.
                others = [other for pool in pools for other in shared.sample(1, pool)]
                others = [o for o in others if o.pull_rate is not None and _gives(o, pools, excluded)]
                return others[0] if others else endpoint, known.shared_tokens
    return None if best is None else (best, most)


def _gives(endpoint: Endpoint, pools: tuple[Pool, Pool], excluded: Collection[str]) -> bool:
    """Whether one that gives blocks away may be named: it is of the same build, and nothing speaks against it."""
    return endpoint.level >= 0 and endpoint.pool in pools and endpoint.worker.name not in excluded


def weigh_pulls(costs: dict[Endpoint, float], source: tuple[Endpoint, int], prompt_tokens: int, weight: float) -> None:
    """Lower the costs of candidates that had better bring what `source` has. `costs`: `weight` for every token that a
    candidate lacks, and no queues yet."""
    holder, held = source
    rest = max(0, prompt_tokens - held)  # what it is taken to hold may be counted in other tokens
    for endpoint, cost in costs.items():
        if endpoint.pull_rate is None or endpoint is holder:
            continue
        missing = cost / weight - rest
        time = weigh_time(endpoint)
        if missing >= MIN_TOKENS and time < 1:
            costs[endpoint] = min(cost, weight * rest + missing * (time + COPY_WEIGHT))


def weigh_loading(endpoint: Endpoint, store: Store) -> float:
    """What a token that is believed to be in the store takes this worker, in the time that it computes one."""
    rate, speed = store.find_rate(endpoint), endpoint.speed.value
    time = speed / rate if rate and speed else USUAL_WEIGHT
    return store.found * min(1.0, time) + 1 - store.found


def lower_costs(
    costs: dict[Endpoint, float],
    source: tuple[Endpoint, int] | None,
    stored: Mapping[Store, int],
    prompt_tokens: int,
    weight: float,
) -> None:
    """Lower the costs of candidates that had better bring what `source` has, or load what is `stored`, as `weigh_pulls`
    and `weigh_stored` do; whichever costs less."""
    plain = costs.copy() if source is not None and stored else costs
    if source is not None:
        weigh_pulls(costs, source, prompt_tokens, weight)
    if stored:
        weigh_stored(costs, plain, stored, prompt_tokens, weight)


def weigh_stored(
    costs: dict[Endpoint, float],
    plain: Mapping[Endpoint, float],
    stored: Mapping[Store, int],
    prompt_tokens: int,
    weight: float,
) -> None:
    """Lower the costs of candidates that had better load what is `stored`, in tokens by store. `plain`: `weight` for
    every token that a candidate lacks, and no queues yet; `costs` may be the same, or lower."""
    for endpoint, cost in plain.items():
        store = endpoint.store
        held = 0 if store is None else stored.get(store, 0)
        if store is None or not held:
            continue
        rest = max(0, prompt_tokens - held)  # what it is taken to have may be counted in other tokens
        missing = cost / weight - rest
        time = weigh_loading(endpoint, store)
        if missing >= MIN_TOKENS and time < 1:
            # A token that is not there after all costs its place in a queue besides, as any that is computed.
            place = store.found * COPY_WEIGHT + (1 - store.found) * (weight - 1)
            costs[endpoint] = min(costs[endpoint], weight * rest + missing * (time + place))
