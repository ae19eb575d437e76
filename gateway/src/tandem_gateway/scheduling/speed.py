"""How fast a worker answers, learned from when first tokens come: seconds = latency + tokens of work / speed.

What a gateway takes for the work before a first token is right or far off, in either direction: others have sent
something there that it has not heard of, or a prompt was cached that it took for new. A mean would follow the errors; a
quantile of the last observations is what most of them agree on. Others' work is the more frequent error and makes a
worker look slower than it is, so the quantile of speeds lies above the median, and that of latencies below.
"""

from __future__ import annotations

from collections import deque

WINDOW = 15
"""Observations: a worker whose speed changes is known anew after about ten."""
SPEED_QUANTILE = 0.6
LATENCY_QUANTILE = 0.4
MIN_SAMPLES = 2
SHORT_TOKENS = 256
"""Less tells nothing of the speed."""
LONG_TOKENS = 1024
"""More tells nothing of the latency."""


class Speed:
    """How fast one worker computes prompts: from sending a request to its first token, with all prompts before it."""

    __slots__ = ("_latencies", "_speeds", "latency", "samples", "short_samples", "value")

    def __init__(self) -> None:
        self._speeds: deque[float] = deque(maxlen=WINDOW)
        self._latencies: deque[float] = deque(maxlen=WINDOW)
        self.forget()

    def forget(self) -> None:
        self._speeds.clear()
        self._latencies.clear()
        self.samples = 0
        self.value = 0.0
        """Tokens per second; 0 while too little is known."""
        self.latency = 0.0
        """Seconds that a prompt takes beside computing its tokens."""
        self.short_samples = 0

    def predict(self, tokens: float) -> float | None:
        """Seconds until the first token of a request with so many tokens to compute, or None while nothing is known."""
        speed = self.value
        if not speed and not self.short_samples:
            return None
        return self.latency + (tokens / speed if speed else 0.0)

    def observe(self, tokens: float, seconds: float) -> None:
        value = self.value
        if tokens < (LONG_TOKENS if value else SHORT_TOKENS):
            self.short_samples = samples = self.short_samples + 1
            computing = tokens / value if value else 0.0
            self._latencies.append(seconds - computing if seconds > computing else 0.0)
            if samples < WINDOW or not samples % 4:
                self.latency = _find_quantile(self._latencies, LATENCY_QUANTILE)
        if tokens >= SHORT_TOKENS:
            computing = seconds - self.latency
            self._speeds.append(tokens / (computing if computing > seconds / 4 else seconds / 4 + 1e-9))
            self.samples += 1
            if self.samples >= MIN_SAMPLES:
                self.value = _find_quantile(self._speeds, SPEED_QUANTILE)


def _find_quantile(values: deque[float], quantile: float) -> float:
    return sorted(values)[int(quantile * len(values))]
