"""Whether the prefill worker of a pair that was picked is behind, and who computes the prompt then."""

from __future__ import annotations

from tandem_gateway.scheduling.conversion import Offer, Terms, decide
from tandem_gateway.scheduling.demand import Demand
from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.known import Known
from tandem_gateway.scheduling.picker import Choice


def reconsider(
    choice: Choice,
    demand: Demand,
    known: Known,
    terms: Terms,
    now: float,
) -> None:
    """Let a decode worker compute the prompt of a pair itself, if that is decided.

    Asked are the decode workers that were candidates for the pair. Changes nothing but the choice.
    """
    prefill = choice.prefill[0]
    queued = prefill.find_queue(now)
    rate = prefill.speed.value
    limit = None if terms.ttft is None else terms.ttft.limit(demand.prompt_tokens)
    candidates = next(list(offer[5]) for offer in choice.offers if offer[2] is choice.decode)
    able = {
        endpoint.worker.name: endpoint
        for endpoint in candidates
        if endpoint.own.keeps_steps and not endpoint.worker.needs_prefill
    }
    prompt = demand.prompt_tokens
    tokens = {name: max(0, prompt - known.count_cached(endpoint)) for name, endpoint in able.items()}
    offers = {name: _offer(endpoint, tokens[name], rate, now) for name, endpoint in able.items()}
    choice.conversion, best = decide(
        prefill.speed.predict(queued + choice.uncached_tokens + choice.pulled_work),
        rate=rate, queued=queued, limit=limit, offers=offers, step_seconds=terms.step_seconds,
    )  # fmt: skip
    if best:
        choice.decode, choice.prefill = able[best], []
        choice.uncached_tokens = tokens[best]
        choice.cached_tokens = choice.known_tokens = prompt - tokens[best]


def _offer(endpoint: Endpoint, tokens: int, rate: float, now: float) -> Offer:
    own = endpoint.own
    return Offer(
        tokens=tokens,
        queued=endpoint.others + own.left(now, rate),
        busy=endpoint.requests > 0 or own.running > 0,
        decode_seconds=own.decode_seconds,
        factor=own.factor,
    )
