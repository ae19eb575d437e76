"""Measured speeds, smoothed, and the step size that follows from them."""

from __future__ import annotations

_WEIGHT = 0.2
_MIN_PREFILL_TOKENS = 32
"""A smaller chunk measures the overhead of a step, not the rate."""
_UNMEASURED_TOKENS = 256
_MIN_STEP_TOKENS = 64


class SpeedMeter:
    """Exponentially weighted averages over steps."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second: float | None = None
        self.decode_step_seconds: float | None = None

    def record(self, *, num_prefill_tokens: int, num_decodes: int, seconds: float) -> None:
        if num_prefill_tokens == 0:
            if num_decodes:
                self.decode_step_seconds = _smooth(self.decode_step_seconds, seconds)
        elif num_prefill_tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            share = num_prefill_tokens / (num_prefill_tokens + num_decodes)
            rate = num_prefill_tokens / (seconds * share)
            self.prefill_tokens_per_second = _smooth(self.prefill_tokens_per_second, rate)

    def plan_step_tokens(self, target_seconds: float | None) -> int | None:
        """Tokens that take about `target_seconds`; None: as many as fit."""
        if target_seconds is None:
            return None
        if self.prefill_tokens_per_second is None:
            return _UNMEASURED_TOKENS
        return max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_second * target_seconds))


def _smooth(average: float | None, value: float) -> float:
    return value if average is None else average + _WEIGHT * (value - average)
