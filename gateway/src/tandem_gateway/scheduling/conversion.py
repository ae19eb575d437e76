"""Whether a decode worker computes a prompt itself although prefill workers are there: while those are behind.

A prompt waits at its prefill worker for all before it. A decode worker could begin at once, but its steps are those of
its streams: they have a target, decoding takes its part of that, and the rest is for prompts. So the prompt takes
longer there than on an idle prefill worker, and is there sooner where the queue is longer than that. What is predicted
decides. Nothing but data is known here; see `reconsider`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tandem_api.launch import TTFTDeadline

ON_TIME = 0.8
"""Share of its target up to which a prompt is on time at its prefill worker: predictions are right within a fifth."""
LEAST_QUEUE = 64
"""Tokens: a prefill worker with fewer before a prompt is not behind, whatever the prompt takes."""
LEAST_SHARE = 0.2
"""Share of a step that must be left for prompts: with less they would take five times as long, and steps are not so
even."""
UNTOLD_SHARE = 0.5
"""The same, of a worker that has streams and has not yet told how long its steps are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What clients were promised."""

    step_seconds: float
    """A step with a part of a prompt takes at most so long: what streams beside it wait for their next token."""
    ttft: TTFTDeadline | None = None
    """Who is on time stays at its prefill worker; None: wherever the first token comes sooner."""


class Verdict(StrEnum):
    """What was decided about one request that could have gone to a prefill worker."""

    CONVERTED = "converted"
    ON_TIME = "on_time"
    """The prefill worker is not behind."""
    SLOWER = "slower"
    """It is, and no decode worker would be sooner."""
    NO_ROOM = "no_room"
    """It is, and decoding alone fills the steps of decode workers."""
    UNKNOWN = "unknown"
    """Too few prompts were computed to predict anything, or no decode worker can be told how long its steps may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a decode worker would have to do for a prompt."""

    tokens: int
    """Tokens of the prompt that the worker has not cached."""
    queued: float = 0.0
    """Prompt tokens that it computes before."""
    busy: bool = False
    """It has streams, or will have."""
    decode_seconds: float | None = None
    """What decoding takes of a step; None: it has not told."""
    factor: float = 1.0
    """Prompts lately took so many times what was predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What was decided, and by which predictions in seconds until the first token."""

    verdict: Verdict
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    step_seconds: float = 0.0

    @property
    def converted(self) -> bool:
        return self.verdict is Verdict.CONVERTED


def find_share(offer: Offer, step_seconds: float) -> float:
    """Share of a step that is left for prompts; 0 where that is too little."""
    if not offer.busy:
        return 1.0
    if offer.decode_seconds is None:
        return UNTOLD_SHARE
    share = 1.0 - offer.decode_seconds / step_seconds
    return share if share >= LEAST_SHARE else 0.0


def predict_own(offer: Offer, rate: float, step_seconds: float) -> float | None:
    """Seconds until the first token where the decode worker computes the prompt, `rate` tokens per second while it does
    nothing else; None where it has no room.
    """
    share = find_share(offer, step_seconds)
    return offer.factor * (offer.queued + offer.tokens) / (rate * share) if share else None


def decide(
    prefill_seconds: float | None,
    *,
    rate: float,
    queued: float,
    limit: float | None,
    offers: Mapping[str, Offer],
    step_seconds: float,
) -> tuple[Conversion, str]:
    """What is decided, and the decode worker that computes the prompt, if one does.

    `prefill_seconds` are predicted for the prefill worker, which computes `rate` tokens per second (0: not known) and
    has so many `queued` before this prompt; `limit` is the target of the first token in seconds, None without one.
    """
    if prefill_seconds is None or rate <= 0:
        return Conversion(verdict=Verdict.UNKNOWN), ""
    if queued < LEAST_QUEUE or (limit is not None and prefill_seconds <= ON_TIME * limit):
        return Conversion(verdict=Verdict.ON_TIME, prefill_seconds=prefill_seconds), ""
    if not offers:
        return Conversion(verdict=Verdict.UNKNOWN, prefill_seconds=prefill_seconds), ""
    predicted = {name: predict_own(offer, rate, step_seconds) for name, offer in offers.items()}
    seconds = {name: value for name, value in predicted.items() if value is not None}
    if not seconds:
        return Conversion(verdict=Verdict.NO_ROOM, prefill_seconds=prefill_seconds), ""
    best = min(seconds, key=seconds.__getitem__)
    sooner = seconds[best] < prefill_seconds
    conversion = Conversion(
        verdict=Verdict.CONVERTED if sooner else Verdict.SLOWER,
        prefill_seconds=prefill_seconds,
        decode_seconds=seconds[best],
        step_seconds=step_seconds if sooner else 0.0,
    )
    return conversion, best if sooner else ""
