"""What replicas of a role say of a figure that is about the same for all of them: their speed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean, median

_LEAST, _MOST = 1e-6, 1e9
"""Tokens per second, and seconds of a step, that can be."""
MOST_APART = 4.0
"""Times the median, or parts of it, that replicas of a role can be apart: an empty one's steps take less than a full
one's, and a cold GPU is a little faster."""
_FEWEST_PEERS = 3
"""Nobody knows which of two that differ is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreed:
    """What replicas say of a figure that is alike for all of them."""

    value: float | None
    """Mean of those that most agree with."""
    mean: float | None
    """The mean of all."""
    odd: frozenset[str]
    """Those left out, by pod."""


def agree(told: Mapping[str, float | None]) -> Agreed:
    """What those agree on that are measured. What no machine does is not measured."""
    known = {name: value for name, value in told.items() if value is not None and _LEAST <= value <= _MOST}
    if not known:
        return Agreed(value=None, mean=None, odd=frozenset())
    middle = median(known.values())
    near = {name: value for name, value in known.items() if middle / MOST_APART <= value <= middle * MOST_APART}
    if len(known) < _FEWEST_PEERS or 2 * len(near) <= len(known):
        near = known
    return Agreed(value=fmean(near.values()), mean=fmean(known.values()), odd=frozenset(known.keys() - near.keys()))
