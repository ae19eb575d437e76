"""Measured speeds, smoothed, and the step size that follows from them."""

from __future__ import annotations

import math

_STEP_WEIGHT = 0.2
_MEMORY_TOKENS = 1024
"""The prefill rate is an average over about so many tokens: a few small chunks beside decodes hardly count."""
_MIN_PREFILL_TOKENS = 32
"""A smaller chunk measures the overhead of a step, not the rate."""
_UNMEASURED_TOKENS = 256
_MIN_STEP_TOKENS = 64


class SpeedMeter:
    """Exponentially weighted averages: of decode steps, and over prefilled tokens."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second: float | None = None
        self.decode_step_seconds: float | None = None

    def record(self, *, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        """A step took `seconds`. A mixed one counts as prefill by its share of tokens; short prompts say nothing."""
        if num_prefill_tokens == 0:
            if num_decodes:
                self.decode_step_seconds = _smooth(self.decode_step_seconds, seconds, _STEP_WEIGHT)
        elif num_prefill_tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            share = num_prefill_tokens / (num_prefill_tokens + num_decodes)
            rate = num_prefill_tokens / (seconds * share)
            weight = 1 - math.exp(-num_prefill_tokens / _MEMORY_TOKENS)
            self.prefill_tokens_per_second = _smooth(self.prefill_tokens_per_second, rate, weight)

    def plan_step_tokens(self, target_seconds: float | None) -> int | None:
        """Tokens that take about `target_seconds`; None: as many as fit."""
        if target_seconds is None:
            return None
        if self.prefill_tokens_per_second is None:
            return _UNMEASURED_TOKENS
        return max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_second * target_seconds))


def _smooth(average: float | None, value: float, weight: float) -> float:
    return value if average is None else average + weight * (value - average)
