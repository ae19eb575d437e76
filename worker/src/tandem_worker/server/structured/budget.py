"""What a grammar may cost the engine thread at most, where all streams of the worker wait for it.

What a step may compute is counted by the library (`proving.parser_limits`), the same on every machine. These seconds
are ten times what that comes to: they end what the library counts wrongly, and decide over no grammar that works on a
faster machine. They are of the thread's own computing, so that a busy machine ends nobody's request.
"""

from __future__ import annotations

TOKEN_SECONDS = 0.05
"""Masks and tokens of one request, on average over its answer; all choices together."""
CREDIT_SECONDS = 1.5
"""More than the average that a request may take: the first masks of a grammar find most of its states."""
STEP_SECONDS = 1.0
"""One mask or token of one choice."""


class MaskBudget:
    """The time that masks of one request may take; its choices share it. Used on the engine thread."""

    __slots__ = ("_num_tokens", "_spent")

    def __init__(self) -> None:
        self._spent = 0.0
        self._num_tokens = 0

    def spend(self, num_tokens: int, seconds: float) -> str | None:
        """Note the cost at a choice's token `num_tokens`. A sentence when the request must end."""
        self._spent += seconds
        self._num_tokens = max(self._num_tokens, num_tokens)
        if seconds > STEP_SECONDS:
            return f"one token took {seconds * 1e3:.0f} ms, and at most {STEP_SECONDS * 1e3:.0f} ms are allowed"
        if self._spent > CREDIT_SECONDS + TOKEN_SECONDS * self._num_tokens:
            return (
                f"{self._num_tokens + 1} tokens took {self._spent * 1e3:.0f} ms, and "
                f"{CREDIT_SECONDS * 1e3:.0f} ms and {TOKEN_SECONDS * 1e3:.0f} ms per token are allowed"
            )
        return None
