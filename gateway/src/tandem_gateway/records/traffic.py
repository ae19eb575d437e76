"""What arrives at this gateway and what becomes of it: totals for the operator, a few additions per request."""

from __future__ import annotations

from collections.abc import Mapping

from tandem_api.fleet import Traffic

from tandem_gateway.http.sse import find_cached
from tandem_gateway.scheduling.demand import MOST_TOKENS

_FRAMES = 2
"""Events of a stream that are no token: the one that ends it, and `[DONE]`."""


class TrafficCounter:
    """`requests`, `prompt_tokens` and `prompt_squares` grow when a request arrives, `finished` when it ends well, each
    once whatever happens in between. The gateway adds to them in place: a call would cost more than the addition.

    What a worker refuses is no demand. Totals never fall, so the next arrivals are not counted as far as refused ones
    have been.
    """

    __slots__ = (
        "_requests_ahead", "_squares_ahead", "_tokens_ahead", "ahead", "computed_prompt_tokens", "computed_tokens",
        "finished", "output_tokens", "prompt_squares", "prompt_tokens", "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.finished = self.output_tokens = 0
        self.computed_prompt_tokens = self.computed_tokens = 0
        self.prompt_squares = 0.0
        self.ahead = False
        """Something was counted and refused, and is not made up for."""
        self._requests_ahead = self._tokens_ahead = 0
        self._squares_ahead = 0.0

    def take_back(self, prompt_tokens: int) -> None:
        """A request that was counted is refused."""
        self.ahead = True
        self._requests_ahead += 1
        self._tokens_ahead += prompt_tokens
        self._squares_ahead += prompt_tokens * prompt_tokens

    def make_up(self, prompt_tokens: int) -> None:
        """A request arrives while refused ones are `ahead`: it counts as far as it is more than those."""
        requests, tokens = 1 - self._requests_ahead, prompt_tokens - self._tokens_ahead
        squares = prompt_tokens * prompt_tokens - self._squares_ahead
        self.requests += max(0, requests)
        self.prompt_tokens += max(0, tokens)
        self.prompt_squares += max(0.0, squares)
        self._requests_ahead, self._tokens_ahead = max(0, -requests), max(0, -tokens)
        self._squares_ahead = max(0.0, -squares)
        self.ahead = bool(self._requests_ahead or self._tokens_ahead or self._squares_ahead)

    def count_answer(self, usage: Mapping[str, object] | None, events: int, *, well: bool) -> None:
        """`usage` is what the answer said, under the names of chats; None where it said nothing. A stream without it
        has about a token per event. What a worker says that cannot be is taken for nothing."""
        output = events - _FRAMES
        if usage is not None:
            prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int) and 0 < prompt <= MOST_TOKENS:
                cached = find_cached(usage)
                self.computed_prompt_tokens += prompt
                self.computed_tokens += prompt - cached if cached is not None and 0 <= cached <= prompt else prompt
        if well and isinstance(output, int) and 0 < output <= MOST_TOKENS:
            self.output_tokens += output

    def report(
        self, *, waiting_requests: int = 0, waiting_tokens: int = 0, idle_seconds: float | None = None
    ) -> Traffic:
        """With what waits for a worker now, and for how long nothing has been under way."""
        return Traffic(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            prompt_squares=self.prompt_squares,
            computed_prompt_tokens=self.computed_prompt_tokens,
            computed_tokens=self.computed_tokens,
            finished=self.finished,
            output_tokens=self.output_tokens,
            waiting_requests=waiting_requests,
            waiting_tokens=waiting_tokens,
            idle_seconds=idle_seconds,
        )
