"""Philox4x32-10, the counter-based random generator of both sampling backends (Salmon et al., "Parallel Random Numbers:
As Easy as 1, 2, 3", 2011). Plain integers: it runs on the host, and is the oracle of the kernel's.

It lies apart from the kernels, whose package brings Triton: a fifth of a second that a start on a CPU does without.
"""

from __future__ import annotations

_MASK32 = 0xFFFFFFFF


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random words of 32 bits from ten rounds."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _MASK32, (first >> 32) ^ c3 ^ k1, first & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def draw_uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 24 random bits, which float32 holds exactly.

    `position` is the absolute position of the token to be chosen. A draw depends on nothing else, so a choice continues
    with the same tokens after preemption, on another worker, on another backend, and in whatever batch it runs.
    """
    counter = (position & _MASK32, choice & _MASK32, 0, 0)
    word = philox4x32(counter, (seed & _MASK32, seed >> 32 & _MASK32))[0]
    return (word >> 8) * 2.0**-24
