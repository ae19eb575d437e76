"""Measured speeds, smoothed, the step size that follows from them, and what has been computed in what time."""

from __future__ import annotations

import math

_STEP_WEIGHT = 0.2
_TOKENS_WEIGHT = 0.02
"""Right guesses come in runs: a mean over some fifty steps."""
_TOKEN_TIME_WEIGHT = 0.01
"""A step's part of the time between tokens, whose steps make one or many: what is planned by it can wait."""
_MEMORY_TOKENS = 1024
"""The prefill rate is an average over about so many tokens: a few small chunks beside decodes hardly count."""
_MIN_PREFILL_TOKENS = 32
"""A smaller chunk measures the overhead of a step, not the rate."""
_UNMEASURED_TOKENS = 256
_MIN_STEP_TOKENS = 64
_MEMORY_SECONDS = 60.0
"""Seconds of computing prompts: the velocity is a mean over about so long."""
_LEAST_SECONDS = 1.0
"""Fewer tell no velocity."""


class TokenTime:
    """Mean seconds between two tokens of an answer: of steps that make several at a time their seconds over their
    tokens, older ones fading alike."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    @property
    def seconds(self) -> float | None:
        """None before the first step."""
        return self._seconds / self._tokens if self._tokens else None

    def record(self, seconds: float, tokens: float) -> None:
        """A step took so long, and made so many tokens of an answer."""
        kept = 1 - _TOKEN_TIME_WEIGHT
        self._seconds, self._tokens = self._seconds * kept + seconds, self._tokens * kept + tokens


class SpeedMeter:
    """Exponentially weighted averages: of decode steps, and over prefilled tokens."""

    def __init__(self) -> None:
        self.prefill_tokens_per_second: float | None = None
        self.decode_step_seconds: float | None = None
        self.plain_step_seconds: float | None = None
        """The same of decode steps as they would be if no guesses were checked in them."""
        self.mixed_step_seconds: float | None = None
        """Mean of steps that compute prompts beside answers."""
        self.decode_token, self.mixed_token = TokenTime(), TokenTime()
        """The time of a token in steps that only decode, and in those that compute prompts too."""
        self._chunk_tokens = self._chunk_seconds = 0.0
        """Prompt tokens, and by how much they made their steps longer, older ones fading."""
        self.decode_tokens_per_step = 1.0
        """Mean tokens of one answer in a step that computes no prompts: more than 1 where guesses were right."""

    def record(
        self,
        *,
        num_prefill_tokens: int,
        num_decodes: int,
        seconds: float,
        num_guesses: int = 0,
        num_saved: int = 0,
        plain_seconds: float | None = None,
    ) -> None:
        """A step took `seconds`. A mixed one counts as prefill by its share of tokens; short prompts say nothing.

        Beside its `num_decodes` tokens it computed `num_guesses`, of which `num_saved` made a token more; without them
        it would have taken about `plain_seconds`, None: as long.
        """
        plain = seconds if plain_seconds is None else plain_seconds
        tokens = 1 + num_saved / num_decodes if num_decodes else 0.0
        if num_prefill_tokens == 0:
            if num_decodes:
                self.decode_step_seconds = _smooth(self.decode_step_seconds, seconds, _STEP_WEIGHT)
                self.plain_step_seconds = _smooth(self.plain_step_seconds, plain, _STEP_WEIGHT)
                self.decode_tokens_per_step = _smooth(self.decode_tokens_per_step, tokens, _TOKENS_WEIGHT)
                self.decode_token.record(seconds, tokens)
            return
        weight = 1 - math.exp(-num_prefill_tokens / _MEMORY_TOKENS)
        alone = self.plain_step_seconds if num_decodes else 0.0
        if alone is not None:
            self._chunk_tokens = self._chunk_tokens * (1 - weight) + num_prefill_tokens
            self._chunk_seconds = self._chunk_seconds * (1 - weight) + plain - alone
        if num_decodes:
            self.mixed_step_seconds = _smooth(self.mixed_step_seconds, seconds, _STEP_WEIGHT)
            self.mixed_token.record(seconds, tokens)
        if num_prefill_tokens >= _MIN_PREFILL_TOKENS and seconds > 0:
            share = num_prefill_tokens / (num_prefill_tokens + num_decodes + num_guesses)
            rate = num_prefill_tokens / (seconds * share)
            self.prefill_tokens_per_second = _smooth(self.prefill_tokens_per_second, rate, weight)

    def plan_step_tokens(self, target_seconds: float | None) -> int | None:
        """Tokens that take about `target_seconds`; None: as many as fit."""
        if target_seconds is None:
            return None
        if self.prefill_tokens_per_second is None:
            return _UNMEASURED_TOKENS
        return max(_MIN_STEP_TOKENS, int(self.prefill_tokens_per_second * target_seconds))

    def plan_chunk_tokens(self, seconds: float, decoding: bool) -> int:
        """Prompt tokens that make a step take so many seconds, beside the decodes of late or alone."""
        if self._chunk_seconds <= 0:
            return _MIN_STEP_TOKENS
        if decoding and self.plain_step_seconds is not None:
            seconds -= self.plain_step_seconds
        return max(0, int(seconds * self._chunk_tokens / self._chunk_seconds))


class WorkMeter:
    """What an engine has computed and how long that took. Its lanes have one between them: their steps are joint."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything: what was computed so far was not work, such as warming up."""
        self.busy_seconds = 0.0
        self.prefill_seconds = 0.0
        """The prompts' share of those."""
        self.prefill_tokens = 0
        self._last_end = 0.0
        self._recent_tokens = self._recent_seconds = 0.0
        """Sums over prompts, older ones fading."""

    @property
    def velocity(self) -> float | None:
        """Prompt tokens per second of computing prompts; None while there was less than a second of that."""
        if self.prefill_seconds < _LEAST_SECONDS:
            return None
        return self._recent_tokens / self._recent_seconds

    def record(self, *, began: float, ended: float, num_prefill_tokens: int, num_decodes: int) -> None:
        """A step, by the clock of the one before, in the order of their ends. Time that two steps share counts once.

        One that computed nothing that counts (it failed, or nobody waited for it) has no tokens, and took its time.
        """
        seconds = ended - max(began, self._last_end)
        self._last_end = ended
        self.busy_seconds += seconds
        if not num_prefill_tokens:
            return
        seconds *= num_prefill_tokens / (num_prefill_tokens + num_decodes)
        self.prefill_seconds += seconds
        self.prefill_tokens += num_prefill_tokens
        kept = max(0.0, 1 - seconds / _MEMORY_SECONDS)
        self._recent_tokens = self._recent_tokens * kept + num_prefill_tokens
        self._recent_seconds = self._recent_seconds * kept + seconds


class Totals:
    """Counters since the start."""

    __slots__ = ("cached_tokens", "generated_tokens", "prefills_fallback", "prefills_local", "prefills_remote",
                 "prompt_tokens", "steps")  # fmt: skip

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.steps = 0
        self.prefills_local = self.prefills_remote = self.prefills_fallback = 0


def _smooth(average: float | None, value: float, weight: float) -> float:
    return value if average is None else average + weight * (value - average)
