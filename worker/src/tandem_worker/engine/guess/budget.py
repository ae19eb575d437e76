"""How many guesses of each choice are checked in a step. Pure.

The best ones are, as long as tokens per second grow. A guess is worth its chance of being reached and right. Each
choice's guesses are taken from the first on, and their worth only falls, so the best of all choices are a prefix of
each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

LEAST_GAIN = 1.05
"""Below that a gain in tokens per second is not worth its risk: chances and costs are estimates, and the best of many
guesses are those whose chances are taken for too high."""
MOST_LOSS = 0.05
"""Tokens per second that a choice may lose to the guesses of others, beside what it has gained by its own before."""
MOST_LEAD = 16.0
"""Tokens. An answer that was guessed well for long is not slowed down for as long afterwards."""
MOST_DEBT = 4.0
"""Tokens. What an answer has lost by guesses of its own is overlooked up to here: of many answers with good guesses one
always has bad luck, and the others would wait for it."""
_MOST_LOOKS = 64
"""Numbers of guesses that are looked at in a step, about: of hundreds a device waits for the host to look at each."""


def choose_lengths(
    chances: Sequence[Sequence[float]],
    num_choices: int,
    cost: Callable[[int], float],
    most: int,
    *,
    leads: Sequence[float] | None = None,
    least_lead: float = 0.0,
) -> list[int]:
    """How many guesses of each choice to check, `most` in all.

    `chances[i][j]` is that of guess j of choice i to be right where those before it are; `num_choices` counts choices
    without guesses too. `cost(k)` is the duration of a step with k guesses, over one without, and grows with k.
    `leads[i]`: tokens that choice i is ahead of where it would be without guesses, and may lose again, or has lost too
    many (below 0); `least_lead`: the least of those of choices without guesses, of which there may be none.
    """
    ranked = sorted((-value, choice) for choice, row in enumerate(chances) for value in accumulate(row, mul))[:most]
    ahead = [0.0] * len(chances) if leads is None else [_overlook(lead) for lead in leads]
    others = _overlook(least_lead) if len(chances) < num_choices else math.inf
    at_most = 1 - sum(value for value, _ in ranked) / num_choices
    best, highest, total = 0, LEAST_GAIN, 0.0
    stride = 1 + len(ranked) // _MOST_LOOKS
    for count, (value, choice) in enumerate(ranked, start=1):
        ahead[choice] -= value
        total -= value
        if count % stride and count < len(ranked):
            continue
        slower = cost(count)
        if at_most <= highest * slower:
            break
        rate = (1 + total / num_choices) / slower
        if rate > highest and 1 + min(others, *ahead) >= slower * (1 - MOST_LOSS):
            best, highest = count, rate
    lengths = [0] * len(chances)
    for _, choice in ranked[:best]:
        lengths[choice] += 1
    return lengths


def _overlook(lead: float) -> float:
    return lead if lead >= 0 else min(0.0, lead + MOST_DEBT)


def next_lead(lead: float, right: int, slower: float) -> float:
    """Tokens that a choice is ahead of where it would be without guesses, behind a step in which `right` guesses of it
    were right, and which took `slower` times what it would have taken without guesses.

    Below 0 it lost more than it may: that is made up for by the share that it may lose of every step, guesses or not.
    If it were forgiven, a choice whose guesses look better than they are would lose as much again in the next step.
    """
    lead += 1 + right - slower
    return min(MOST_LEAD, lead if lead >= 0 else min(0.0, lead + MOST_LOSS * slower))
