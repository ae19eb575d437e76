"""How many guesses of each choice are checked in a step. Pure.

The best ones are, as long as tokens per second grow. A guess is worth its chance of being reached and right. Each
choice's guesses are taken from the first on, and their worth only falls, so the best of all choices are a prefix of
each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

LEAST_GAIN = 1.05
"""Below that a gain in tokens per second is not worth its risk: chances and costs are estimates, and the best of many
guesses are those whose chances are taken for too high."""
MOST_LOSS = 0.05
"""Tokens per second that a choice may lose to the guesses of others."""
_HOPELESS = 0.75
"""When the rate has fallen to this much of the best, further guesses are not looked at."""


def choose_lengths(
    chances: Sequence[Sequence[float]], num_choices: int, cost: Callable[[int], float], most: int
) -> list[int]:
    """How many guesses of each choice to check, `most` in all.

    `chances[i][j]` is that of guess j of choice i to be right where those before it are; `num_choices` counts choices
    without guesses too. `cost(k)` is the duration of a step with k guesses, over one without.
    """
    ranked = sorted((-value, choice) for choice, row in enumerate(chances) for value in accumulate(row, mul))
    gains = [0.0] * len(chances)
    lengths = [0] * len(chances)
    best, highest, total = lengths.copy(), LEAST_GAIN, 0.0
    for count, (value, choice) in enumerate(ranked[:most], start=1):
        gains[choice] -= value
        total -= value
        lengths[choice] += 1
        slower = cost(count)
        rate = (1 + total / num_choices) / slower
        if rate > highest and _least_gain(gains, num_choices) >= slower * (1 - MOST_LOSS):
            best, highest = lengths.copy(), rate
        elif rate < highest * _HOPELESS:
            break
    return best


def _least_gain(gains: Sequence[float], num_choices: int) -> float:
    """Tokens of the choice that gets fewest out of the step."""
    return 1.0 + (0.0 if len(gains) < num_choices else min(gains))
