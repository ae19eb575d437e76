"""From the endpoints that may serve a request to the pair that does.

The score of an endpoint is work in tokens that stands before this request's first token, its own included. Affinity
decides among endpoints whose scores are within a tolerance of the best, so no session can pile more than the tolerance
on one endpoint while another is free: bounded load, and nobody starves. One pass over the endpoints, O(n).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from operator import itemgetter

from tandem_api.names import Role

from tandem_gateway.scheduling.affinity import weigh
from tandem_gateway.scheduling.demand import Demand
from tandem_gateway.scheduling.endpoint import Endpoint

DECODE_WEIGHT = 0.25
"""Cost of one outstanding output token in prefill tokens, where one worker does both: decoding is batched with the
prompt chunks and slows them, but each token only a little."""
TOLERANCE_TOKENS = 64
MAX_PREFILL = 3
"""Prefill endpoints named to the decode worker: the best and two alternates."""


_Score = Callable[[Endpoint, int, Mapping[int, int]], float]


@dataclass(slots=True)
class Choice:
    """Where a request goes. `prefill` is empty where the decode endpoint computes the prompt itself."""

    decode: Endpoint
    prefill: list[Endpoint]
    uncached_tokens: int
    """Estimated for the endpoint that computes the prompt."""
    cached_tokens: int


Group = tuple[list[Endpoint], list[Endpoint]]
"""The decode and the prefill endpoints of one revision."""


def group_by_revision(endpoints: Iterable[Endpoint]) -> list[Group]:
    groups: dict[str, Group] = {}
    for endpoint in endpoints:
        group = groups.setdefault(endpoint.worker.revision, ([], []))
        group[endpoint.worker.role is Role.PREFILL].append(endpoint)
    return list(groups.values())


def pick(groups: Iterable[Group], demand: Demand, cached: Mapping[int, int], *, disaggregated: bool) -> Choice | None:
    """The best pair of one revision among endpoints that are available, or None without a decode endpoint.

    `cached` gives the estimated cached prompt tokens by endpoint serial. A revision without prefill endpoints is taken
    only when no revision is complete: its decode workers compute prompts themselves, slower but right.
    """
    best: tuple[tuple[bool, float], Choice] | None = None
    for decodes, prefills in groups:
        if not decodes:
            continue
        score, choice = _pick_in_group(decodes, [] if demand.local else prefills, demand, cached)
        rank = (disaggregated and not prefills, score)
        if best is None or rank < best[0]:
            best = (rank, choice)
    return best[1] if best else None


def missing_role(endpoints: Sequence[Endpoint]) -> str:
    """Why no pair can be chosen, as a sentence for the client."""
    if not any(endpoint.worker.role is not Role.PREFILL for endpoint in endpoints):
        return "no decode worker of this model is ready"
    return "every decode worker of this model refused the connection, or this gateway's key, a moment ago"


def _pick_in_group(
    decodes: list[Endpoint], prefills: list[Endpoint], demand: Demand, cached: Mapping[int, int]
) -> tuple[float, Choice]:
    prompt = demand.prompt_tokens
    if not prefills:
        score, unified = _pick_one(decodes, demand, cached, _unified_score)
        hit = min(prompt, cached.get(unified.serial, 0))
        return score, Choice(unified, [], prompt - hit, hit)
    prefill_score, prefill = _pick_one(prefills, demand, cached, _prefill_score)
    decode_score, decode = _pick_one(decodes, demand, cached, _decode_score)
    hit = min(prompt, cached.get(prefill.serial, 0))
    ranked = [prefill, *_alternates(prefills, prefill, demand, cached)]
    return prefill_score + decode_score, Choice(decode, ranked, prompt - hit, hit)


def _prefill_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    return endpoint.prefill_tokens + max(0, prompt - cached.get(endpoint.serial, 0))


def _decode_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    """Outstanding output, and the part of the prompt's blocks that would have to be moved here."""
    return endpoint.decode_tokens + DECODE_WEIGHT * max(0, prompt - cached.get(endpoint.serial, 0))


def _unified_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    return _prefill_score(endpoint, prompt, cached) + DECODE_WEIGHT * endpoint.decode_tokens


def _pick_one(
    endpoints: list[Endpoint], demand: Demand, cached: Mapping[int, int], score: _Score
) -> tuple[float, Endpoint]:
    prompt = demand.prompt_tokens
    if len(endpoints) == 1:
        return score(endpoints[0], prompt, cached), endpoints[0]
    scored = [(score(endpoint, prompt, cached), endpoint) for endpoint in endpoints]
    limit = min(scored, key=_SCORE)[0] + TOLERANCE_TOKENS
    within = [item for item in scored if item[0] <= limit]
    if len(within) == 1:
        return within[0]
    seed = demand.affinity
    return max(within, key=lambda item: weigh(item[1], seed))


_SCORE = itemgetter(0)


def _alternates(prefills: list[Endpoint], best: Endpoint, demand: Demand, cached: Mapping[int, int]) -> list[Endpoint]:
    others = [endpoint for endpoint in prefills if endpoint is not best]
    if len(others) < 2:
        return others
    return nsmallest(
        MAX_PREFILL - 1, others, key=lambda endpoint: _prefill_score(endpoint, demand.prompt_tokens, cached)
    )
