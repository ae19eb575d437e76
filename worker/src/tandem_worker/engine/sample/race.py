"""Draws a token: a race that each token wins with its probability (see `host.philox`). Pure but for the kernel that
makes the noise."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tandem_worker.host import philox
from tandem_worker.host.philox import DrawKey, Words
from tandem_worker.model.backends import native

_STEPS = 2.0**32
_ROUNDING = 1.0 + 2.0**-20
"""What a bound in float32 is widened by, so that rounding leaves nobody out."""


def draw_words(key: DrawKey, tokens: int | npt.NDArray[np.int64]) -> Words:
    """As `host.philox.draw_words`, by the CPU kernels where they run."""
    return _kernel()(key, tokens)


@lru_cache(maxsize=1)
def _kernel():
    if native.find_obstacle() is not None:
        return philox.draw_words
    from tandem_worker.model.backends.native.library import draw_words

    return draw_words


def find_first(weights: npt.NDArray[np.float32], words: Words) -> int:
    """Index of the token that is drawn of those with `weights` `[n]`, not negative, of which one at least is above 0.

    A token's time is at least v / w, and about that where it is short, so logarithms are taken of few.
    """
    with np.errstate(divide="ignore", over="ignore"):
        least = (words.astype(np.float32) + np.float32(0.5)) / weights
    guess = int(least.argmin())
    bound = np.float32(min(_time(int(words[guess]), float(weights[guess])) * _STEPS * _ROUNDING, 3e38))
    few = np.flatnonzero(least <= bound)
    return int(min(few, key=lambda index: _time(int(words[index]), float(weights[index])), default=guess))


def _time(word: int, weight: float) -> float:
    return float(-np.log1p(-(word + 0.5) / _STEPS)) / weight


def make_gumbel(words: Words) -> npt.NDArray[np.float32]:
    """-log(-log(1 - v)), which a draw adds to logarithms of weights: the largest sum is drawn."""
    v = np.minimum((words.astype(np.float32) + np.float32(0.5)) * np.float32(1 / _STEPS), np.float32(1 - 2.0**-24))
    return -np.log(-np.log1p(-v))
