"""How much work a request is: tokens estimated from bytes, output estimated from what earlier requests produced."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_BYTES_PER_TOKEN = 4.0
DEFAULT_OUTPUT_TOKENS = 128.0
_WEIGHT = 0.05
"""Weight of one new observation in the moving averages: about the last forty requests count."""

MOST_TOKENS = 10**9
"""The longest that one answer can be."""
MIN_UNSEEN = 512
"""Tokens: chunks and the ends of prompts are not known better."""


@dataclass(slots=True)
class Demand:
    """One request in the scheduler's terms."""

    prompt_tokens: int
    output_tokens: int
    prefix: list[int]
    """Hash chain over the prompt's bytes, one entry per full chunk."""
    affinity: int
    """Seed for the ring; equal for the turns of one session. 0: nothing names the session, its prefix must."""
    short: bytes = b""
    """A prompt that is too short for chunks; of others nothing."""
    shared: int = 0
    """The last entry of what many prompts begin with, as far as this one does; found when it is placed. 0: nothing."""
    local: bool = False
    """Nothing is decoded: the worker that answers computes the prompt itself."""
    scored: bool = False
    """It asks for numbers of each prompt token: a worker computes all of them, whatever it has cached."""
    stream: bool = True
    """Its first token shows; an answer in one piece shows nothing until it is complete."""
    canary: bool | None = None
    """Whether it is for the canary's workers; decided when it is first placed while there is a canary."""


class Estimator:
    """Learned per model: how many bytes make a token, and how long answers are."""

    __slots__ = ("bytes_per_token", "output_tokens", "unseen_hits")

    def __init__(self) -> None:
        self.bytes_per_token = DEFAULT_BYTES_PER_TOKEN
        self.output_tokens = DEFAULT_OUTPUT_TOKENS
        self.unseen_hits = 0.0
        """The share that were cached all the same of the tokens that seemed uncached to this gateway: what other
        gateways have sent there. 0 where there are none."""

    def prompt_tokens(self, num_bytes: int) -> int:
        return int(num_bytes / self.bytes_per_token) + 1

    def expected_output(self, max_tokens: int | None) -> int:
        """At least 1: every request occupies its decode worker."""
        expected = int(self.output_tokens) + 1
        if max_tokens is None or max_tokens >= expected:
            return expected
        return max_tokens if max_tokens > 0 else 1

    def learn(self, *, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """From the `usage` of an answer. Prompts too short to say anything beyond their template are skipped."""
        if prompt_tokens >= 32 and prompt_bytes >= 32:
            ratio = min(64.0, max(0.25, prompt_bytes / prompt_tokens))
            self.bytes_per_token += _WEIGHT * (ratio - self.bytes_per_token)
        self.learn_output(output_tokens)

    def learn_output(self, output_tokens: int) -> None:
        """From the number of events of a stream that told no usage. What cannot be teaches nothing."""
        if 0 <= output_tokens <= MOST_TOKENS:
            self.output_tokens += _WEIGHT * (output_tokens - self.output_tokens)

    def learn_cached(self, *, prompt_tokens: int, expected: int, cached: int) -> None:
        """From the `usage` of an answer: how many prompt tokens were cached, beside those expected."""
        if prompt_tokens - expected >= MIN_UNSEEN:
            share = min(1.0, max(0.0, (cached - expected) / (prompt_tokens - expected)))
            self.unseen_hits += _WEIGHT / 2 * (share - self.unseen_hits)
