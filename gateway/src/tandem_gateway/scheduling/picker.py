"""From the endpoints that may serve a request to the pair that does.

The score of an endpoint is work in tokens that stands before this request's first token, its own included. Affinity
decides among endpoints whose scores are within a tolerance of the best, so no session can pile more than the tolerance
on one endpoint while another is free: bounded load, and nobody starves. One pass over the endpoints, O(n).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

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


@dataclass(slots=True)
class _Best:
    """Running result of one pass over the endpoints of one role and revision."""

    endpoint: Endpoint
    score: float


def pick(
    endpoints: Sequence[Endpoint], demand: Demand, cached: Mapping[int, int], *, disaggregated: bool
) -> Choice | None:
    """The best pair of one revision among `endpoints` (already filtered), or None without a decode endpoint.

    `cached` gives the estimated cached prompt tokens by endpoint serial. A revision without prefill endpoints is taken
    only when no revision is complete: its decode workers compute prompts themselves, slower but right.
    """
    best: tuple[tuple[bool, float], Choice] | None = None
    for decodes, prefills in _by_revision(endpoints).values():
        if not decodes:
            continue
        alone = not prefills
        found = _pick_in_revision(decodes, prefills, demand, cached)
        rank = (disaggregated and alone, found[0])
        if best is None or rank < best[0]:
            best = (rank, found[1])
    return best[1] if best else None


def missing_role(endpoints: Sequence[Endpoint]) -> str:
    """Why no pair can be chosen, as a sentence for the client."""
    if not any(endpoint.worker.role is not Role.PREFILL for endpoint in endpoints):
        return "no decode worker of this model is ready"
    return "every decode worker of this model refused the connection a moment ago"


def _by_revision(endpoints: Sequence[Endpoint]) -> dict[str, tuple[list[Endpoint], list[Endpoint]]]:
    groups: dict[str, tuple[list[Endpoint], list[Endpoint]]] = {}
    for endpoint in endpoints:
        group = groups.setdefault(endpoint.worker.revision, ([], []))
        group[endpoint.worker.role is Role.PREFILL].append(endpoint)
    return groups


def _pick_in_revision(
    decodes: list[Endpoint], prefills: list[Endpoint], demand: Demand, cached: Mapping[int, int]
) -> tuple[float, Choice]:
    prompt = demand.prompt_tokens
    if not prefills:
        best = _pick_one(decodes, demand, cached, _unified_score)
        hit = min(prompt, cached.get(best.endpoint.serial, 0))
        return best.score, Choice(best.endpoint, [], prompt - hit, hit)
    prefill = _pick_one(prefills, demand, cached, _prefill_score)
    decode = _pick_one(decodes, demand, cached, _decode_score)
    hit = min(prompt, cached.get(prefill.endpoint.serial, 0))
    ranked = [prefill.endpoint, *_alternates(prefills, prefill.endpoint, demand, cached)]
    return prefill.score + decode.score, Choice(decode.endpoint, ranked, prompt - hit, hit)


def _prefill_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    return endpoint.prefill_tokens + max(0, prompt - cached.get(endpoint.serial, 0))


def _decode_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    """Outstanding output, and the part of the prompt's blocks that would have to be moved here."""
    return endpoint.decode_tokens + DECODE_WEIGHT * max(0, prompt - cached.get(endpoint.serial, 0))


def _unified_score(endpoint: Endpoint, prompt: int, cached: Mapping[int, int]) -> float:
    return _prefill_score(endpoint, prompt, cached) + DECODE_WEIGHT * endpoint.decode_tokens


def _pick_one(endpoints: list[Endpoint], demand: Demand, cached: Mapping[int, int], score: _Score) -> _Best:
    if len(endpoints) == 1:
        return _Best(endpoints[0], score(endpoints[0], demand.prompt_tokens, cached))
    scores = [score(endpoint, demand.prompt_tokens, cached) for endpoint in endpoints]
    limit = min(scores) + TOLERANCE_TOKENS
    within = [index for index, value in enumerate(scores) if value <= limit]
    winner = within[0]
    if len(within) > 1:
        winner = max(within, key=lambda index: weigh(endpoints[index], demand.affinity))
    return _Best(endpoints[winner], scores[winner])


def _alternates(prefills: list[Endpoint], best: Endpoint, demand: Demand, cached: Mapping[int, int]) -> list[Endpoint]:
    others = [endpoint for endpoint in prefills if endpoint is not best]
    if len(others) < 2:
        return others
    return nsmallest(
        MAX_PREFILL - 1, others, key=lambda endpoint: _prefill_score(endpoint, demand.prompt_tokens, cached)
    )
