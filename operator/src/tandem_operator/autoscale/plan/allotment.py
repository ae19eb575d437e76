"""A namespace's GPUs over its models, by priority: `(claims, budget) → allotments`. Pure and deterministic.

Every model has its minimum first. What is left goes to the highest priority as far as it wants more, then to the next;
within one priority all get the same part of what they want, as far as whole replicas allow, and what a model has it
keeps as long as nobody is owed more than one replica for it. A model that is to have fewer shrinks by draining; one
that is to have more grows into what is free by then, never into what another one still holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import groupby


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one model has and wants, in GPUs."""

    name: str
    """The first by name of equal claims is served first."""
    priority: int
    """A higher one goes first."""
    least: int
    """Its minimums take so many."""
    held: int
    """Its replicas take so many, those on their way included."""
    present: int
    """Its pods take so many, those on their way out included."""
    wanted: int
    """Demand takes so many, within its own bounds; at least `least`."""
    step: int = 1
    """Its smallest replica takes so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """What one model may have, in GPUs."""

    target: int
    """What the budget and the claims of all come to."""
    granted: int
    """The part of it that it may have now: others that hold the rest have to let it go first."""


def allot(claims: Sequence[Claim], budget: int) -> dict[str, Allotment]:
    """Allotments by name. Together the targets take no more than `budget`, unless the minimums do: then each has its
    minimum."""
    targets = share_out(claims, budget)
    free = budget - sum(max(claim.held, claim.present) for claim in claims)
    allotments: dict[str, Allotment] = {}
    for claim in _ordered(claims):
        target = targets[claim.name]
        granted = target
        if target > claim.held:
            # Its own pods that are on their way out stand for replicas that come.
            room = max(0, free) + max(0, claim.present - claim.held)
            granted = max(claim.least, min(target, claim.held + room))
            free -= max(0, granted - max(claim.held, claim.present))
        allotments[claim.name] = Allotment(target=target, granted=granted)
    return allotments


def share_out(claims: Sequence[Claim], budget: int) -> dict[str, int]:
    """Targets by name."""
    targets: dict[str, int] = {}
    left = budget - sum(claim.least for claim in claims)
    for _, group in groupby(_ordered(claims), key=lambda claim: claim.priority):
        peers = list(group)
        least = {claim.name: claim.least for claim in peers}
        fair = _fill(peers, least, left)
        kept = {claim.name: max(claim.least, min(claim.held, claim.wanted)) for claim in peers}
        spare = left - sum(kept.values()) + sum(least.values())
        is_owed = any(fair[claim.name] - kept[claim.name] > claim.step for claim in peers)
        chosen = fair if is_owed or spare < 0 else _fill(peers, kept, spare)
        left -= sum(chosen.values()) - sum(least.values())
        targets |= chosen
    return targets


def _ordered(claims: Sequence[Claim]) -> list[Claim]:
    return sorted(claims, key=lambda claim: (-claim.priority, claim.name))


def _fill(claims: Sequence[Claim], first: Mapping[str, int], left: int) -> dict[str, int]:
    """From `first` on, a replica at a time to the claim of which the smallest part is met."""
    given = dict(first)
    if sum(max(0, claim.wanted - given[claim.name]) for claim in claims) <= left:
        return {claim.name: max(claim.wanted, given[claim.name]) for claim in claims}
    open_claims = [_place(claim, given) for claim in claims if given[claim.name] < claim.wanted]
    heapify(open_claims)
    while open_claims:
        *_, claim = heappop(open_claims)
        more = min(claim.step, claim.wanted - given[claim.name])
        if more > left:
            continue  # what is left only shrinks
        given[claim.name] += more
        left -= more
        if given[claim.name] < claim.wanted:
            heappush(open_claims, _place(claim, given))
    return given


def _place(claim: Claim, given: Mapping[str, int]) -> tuple[float, str, Claim]:
    """Names differ, so that claims are never compared."""
    return given[claim.name] / claim.wanted, claim.name, claim
