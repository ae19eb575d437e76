"""How fast a worker answers, learned from when first tokens come.

Long prompts tell tokens per second; short ones, whose time is everything but computing, tell the seconds that any
takes.
"""

from __future__ import annotations

_DECAY = 0.95
"""Weight kept of older observations with every new one: about the last twenty count."""
_SETTLED = 20
"""Observations of which the mean has that decay."""
MIN_SAMPLES = 4
SHORT_TOKENS = 256


class Speed:
    """How fast one worker computes prompts: from sending a request to its first token, with all prompts before it."""

    __slots__ = ("_seconds", "_tokens", "latency", "samples", "short_samples", "value")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._tokens = self._seconds = 0.0
        self.samples = 0
        self.value = 0.0
        """Tokens per second; 0 while too little is known."""
        self.latency = 0.0
        """Seconds that a short prompt takes."""
        self.short_samples = 0

    def predict(self, tokens: float) -> float | None:
        """Seconds until the first token of a request with so many tokens to compute, or None while nothing is known."""
        speed = self.value
        if not speed and not self.short_samples:
            return None
        return self.latency + (tokens / speed if speed else 0.0)

    def observe(self, tokens: float, seconds: float) -> None:
        if tokens < SHORT_TOKENS:
            self.short_samples += 1
            weight = 1 - _DECAY if self.short_samples >= _SETTLED else 1 / self.short_samples
            self.latency += weight * (seconds - self.latency)
            return
        self._tokens = self._tokens * _DECAY + tokens
        self._seconds = self._seconds * _DECAY + max(seconds, 1e-6)
        self.samples += 1
        if self.samples >= MIN_SAMPLES:
            self.value = self._tokens / self._seconds
