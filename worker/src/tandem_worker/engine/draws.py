"""Random numbers without state: one draw per (seed, choice, position).

A draw depends on nothing else, so a choice continues with the same tokens after preemption, on another worker, and
in whatever batch it runs.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def draw_uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. `position` is the absolute position of the token to be chosen."""
    return (_mix(_mix(_mix(seed & _MASK) ^ choice) ^ position) >> 11) * 2.0**-53
