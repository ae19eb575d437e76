"""What was decided for a request and what came of it, for people who ask afterwards or beforehand."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_gateway.scheduling.conversion import Conversion, Verdict
from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.ledger import Reservation
from tandem_gateway.scheduling.picker import Choice

KEPT = 64
"""Decisions that a gateway remembers, the last ones."""


Decision = tuple[bytes, float, int, float, Choice]
"""One attempt of a request: the request's id, when it was made, which attempt it was, seconds that the request had
waited for a worker, and the choice. A plain tuple, because every request makes one."""


def predict(choice: Choice, *, output_tokens: int, now: float) -> None:
    """Fill in what would be expected of a choice, for a request that is not sent."""
    prefill = choice.prefill[0] if choice.prefill else choice.decode
    reservation = Reservation(
        choice.decode, prefill, prefill_tokens=choice.uncached_tokens + choice.pulled_work,
        decode_tokens=output_tokens, now=now, conversion=choice.conversion,
    )  # fmt: skip
    reservation.release()
    choice.expected, choice.work = reservation.expected, reservation.work


def describe_choice(choice: Choice) -> dict[str, object]:
    """Which pair, why, and what was predicted of it."""
    prefills = [endpoint.worker.name for endpoint in choice.prefill]
    chosen = next((offer for offer in choice.offers if choice.decode in offer[5]), None)
    why: dict[str, str] = {}
    if chosen is not None:
        cost, best, decode, _, prefill_costs, decode_costs = chosen
        why["decode"] = _explain(decode, decode_costs)
        if choice.prefill:
            why["prefill"] = _explain(best[0], prefill_costs)
        if len(choice.offers) > 1:
            cheapest = cost <= min(offer[0] for offer in choice.offers)
            why["revision"] = (
                "the cheapest pair" if cheapest else "the session's revision, or others have too much load"
            )
    if choice.conversion is not None:
        why["conversion"] = _explain_conversion(choice.conversion)
    return {
        "decode": choice.decode.worker.name,
        "prefill": prefills,
        "source": None if choice.source is None else choice.source.worker.name,
        "pulledTokens": choice.pulled_tokens,
        "storedTokens": choice.stored_tokens,
        "converted": choice.conversion is not None and choice.conversion.converted,
        "revision": choice.decode.worker.revision,
        "why": why,
        "promptTokens": choice.uncached_tokens + choice.cached_tokens,
        "cachedTokens": choice.cached_tokens,
        "uncachedTokens": choice.uncached_tokens,
        "queuedTokens": round(choice.work - choice.uncached_tokens - choice.pulled_work),
        "predictedSeconds": None if choice.expected is None else round(choice.expected, 4),
        "candidates": [
            {
                "revision": decode.worker.revision,
                "cost": round(cost, 1),
                "prefill": _list_costs(prefill_costs),
                "decode": _list_costs(decode_costs),
            }
            for cost, _, decode, _, prefill_costs, decode_costs in choice.offers
        ],
    }


def describe_decision(decision: Decision, *, at: str) -> dict[str, object]:
    """One that was taken `at` that time."""
    request_id, _, attempt, waited, choice = decision
    return {
        "at": at,
        "requestId": request_id.decode("latin-1"),
        "attempt": attempt,
        "waitedSeconds": round(waited, 3),
        "status": choice.status or None,
        "measuredSeconds": round(choice.measured, 4) if choice.measured else None,
        **describe_choice(choice),
    }


def _explain(endpoint: Endpoint, costs: Mapping[Endpoint, float]) -> str:
    if len(costs) == 1:
        return "the only candidate"
    if costs[endpoint] <= min(costs.values()):
        return "the cheapest candidate"
    return "a home of the session, which costs little more than the cheapest"


def _explain_conversion(conversion: Conversion) -> str:
    """Who computes the prompt, the prefill or the decode worker, and by which predictions."""
    prefill, decode = (
        "an unknown time" if seconds is None else f"{seconds:.2f} s"
        for seconds in (conversion.prefill_seconds, conversion.decode_seconds)
    )
    return {
        Verdict.CONVERTED: f"prefill workers are behind ({prefill}), the decode worker computes it itself ({decode})",
        Verdict.ON_TIME: f"the prefill worker is not behind ({prefill})",
        Verdict.SLOWER: f"the prefill worker is behind ({prefill}), a decode worker would take longer ({decode})",
        Verdict.NO_ROOM: f"the prefill worker is behind ({prefill}), streams fill the steps of decode workers",
        Verdict.UNKNOWN: "too little is known of the workers to have a decode worker compute it",
    }[conversion.verdict]


def _list_costs(costs: Mapping[Endpoint, float]) -> list[dict[str, object]]:
    """Cheapest first."""
    ranked = sorted(costs, key=costs.__getitem__)
    return [{"worker": endpoint.worker.name, "cost": round(costs[endpoint], 1)} for endpoint in ranked]
