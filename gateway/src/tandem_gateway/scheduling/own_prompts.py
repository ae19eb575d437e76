"""What a decode worker has of prompts that it computes while prefill workers are there, and how well that goes."""

from __future__ import annotations

_WEIGHT = 0.2
"""Weight of one new observation: about the last ten count."""
_MOST_CHANGE = 3.0
"""One prompt counts at most as if it had taken so many times what was predicted: a pause is not a speed."""
_LEAST_FACTOR, _MOST_FACTOR = 0.25, 8.0
_MOST_DONE = 0.9
"""Share of the outstanding prompts that can be taken for computed, at most: the first token alone tells."""


class OwnPrompts:
    """Prompts that one decode worker computes itself. The invariant of `Endpoint` holds for `tokens`."""

    __slots__ = ("decode_seconds", "factor", "keeps_steps", "running", "since", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """Uncached prompt tokens sent here and not yet computed."""
        self.since = 0.0
        """When it began with the oldest of them."""
        self.factor = 1.0
        """Prompts lately took so many times what was predicted."""
        self.keeps_steps = False
        """It has told that its steps can be held to a time."""
        self.decode_seconds: float | None = None
        """What a step took that only decoded, as it told last."""
        self.running = 0
        """Requests there, whoever sent them, as it told last."""

    def begin(self, tokens: int, now: float) -> None:
        """One more prompt is sent there."""
        if not self.tokens:
            self.since = now
        self.tokens += tokens

    def end(self, tokens: int) -> None:
        """One is computed, or has been given up."""
        self.tokens -= tokens

    def left(self, now: float, rate: float) -> float:
        """Tokens that are probably not computed yet, at `rate` tokens per second at best."""
        return self.tokens - min(_MOST_DONE * self.tokens, rate * max(0.0, now - self.since) / self.factor)

    def learn(self, predicted: float, seconds: float, now: float) -> None:
        """A prompt's first token came after so many seconds."""
        self.since = now
        change = min(_MOST_CHANGE, seconds / max(predicted, 1e-3))
        factor = self.factor * (1 + _WEIGHT * (change - 1))
        self.factor = min(_MOST_FACTOR, max(_LEAST_FACTOR, factor))

    def tell(self, *, keeps_steps: bool, decode_seconds: float | None, running: int) -> None:
        """What the worker says of itself. A step that it does not tell, for nothing runs, is as it was."""
        self.keeps_steps = keeps_steps
        self.running = running
        if decode_seconds is not None:
            self.decode_seconds = decode_seconds
