"""Philox4x32-10, the counter-based random generator of both sampling backends (Salmon et al., "Parallel Random Numbers:
As Easy as 1, 2, 3", 2011), and the noise of draws that is made of it.

A token is drawn by a race: token i runs -log(1 - v_i) / w_i long, with its weight w_i and a number v_i in (0, 1) of its
own, and the first one is drawn, which is each with the probability w_i / sum(w). It is the Gumbel-max trick
(arXiv:1411.0030) with times instead of their logarithms. v_i depends on (seed, choice, position, token) and on nothing
else: a choice continues with the same tokens after preemption, on another worker, on another backend, in whatever batch
it runs, and of likelihoods that are nearly the same it makes the same token (arXiv:2408.07978).

It lies apart from the kernels, whose package brings Triton: a fifth of a second that a start on a CPU does without.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MASK32 = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
_HALF = np.uint64(32)

Words = npt.NDArray[np.uint32]


class DrawKey(NamedTuple):
    """What the noise of one draw depends on, beside the tokens."""

    seed: int
    choice: int
    position: int
    """Absolute position of the token that is drawn."""


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits from ten rounds, in plain integers: the oracle of the fast ones."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _FACTORS[0] * c0, _FACTORS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK32, (first >> 32) ^ c3 ^ k1, first & _MASK32
        k0, k1 = (k0 + _STEPS[0]) & _MASK32, (k1 + _STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def draw_words(key: DrawKey, tokens: int | npt.NDArray[np.int64]) -> Words:
    """Noise of the `tokens` `[n]`, or of all from 0 to so many: `[n]` words of 32 bits; v is (word + 1/2) / 2^32.

    The seed is Philox's key, the counter is (position, choice, token // 4, 0), and of its four words token % 4 counts.
    """
    whole = isinstance(tokens, int)
    quads = np.arange(-(-tokens // 4), dtype=np.uint64) if whole else (tokens >> 2).astype(np.uint64)
    mask, factors = np.uint64(_MASK32), tuple(map(np.uint64, _FACTORS))
    c0, c1 = (np.full_like(quads, value & _MASK32) for value in (key.position, key.choice))
    c2, c3 = quads, np.zeros_like(quads)
    k0, k1 = key.seed & _MASK32, key.seed >> 32 & _MASK32
    for _ in range(_ROUNDS):
        first, second = factors[0] * c0, factors[1] * c2
        c0, c1 = (second >> _HALF) ^ c1 ^ np.uint64(k0), second & mask
        c2, c3 = (first >> _HALF) ^ c3 ^ np.uint64(k1), first & mask
        k0, k1 = (k0 + _STEPS[0]) & _MASK32, (k1 + _STEPS[1]) & _MASK32
    words = np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)
    if isinstance(tokens, int):
        return words.reshape(-1)[:tokens]
    return words[np.arange(len(quads)), tokens & 3]
