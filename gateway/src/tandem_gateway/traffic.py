"""What arrives at this gateway and what becomes of it: totals for the operator, a few additions per request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from tandem_api.fleet import Traffic

_FRAMES = 2
"""Events of a stream that are no token: the one that ends it, and `[DONE]`."""


class TrafficCounter:
    """`requests`, `prompt_tokens` and `prompt_squares` grow when a request arrives, `finished` when it ends well, each
    once whatever happens in between. The gateway adds to them in place: a call would cost more than the addition.
    """

    __slots__ = (
        "computed_prompt_tokens", "computed_tokens", "finished", "output_tokens", "prompt_squares", "prompt_tokens",
        "requests",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.finished = self.output_tokens = 0
        self.computed_prompt_tokens = self.computed_tokens = 0
        self.prompt_squares = 0.0

    def count_answer(self, usage: Mapping[str, object] | None, events: int, *, well: bool) -> None:
        """`usage` is what the answer said, under the names of chats; None where it said nothing. A stream without it
        has about a token per event. What a worker says that cannot be is taken for nothing."""
        output = events - _FRAMES
        if usage is not None:
            prompt, output = usage.get("prompt_tokens"), usage.get("completion_tokens")
            if isinstance(prompt, int) and prompt > 0:
                details: Any = usage.get("prompt_tokens_details")
                cached: Any = cast(dict[str, Any], details).get("cached_tokens") if isinstance(details, dict) else 0
                self.computed_prompt_tokens += prompt
                self.computed_tokens += prompt - cached if isinstance(cached, int) and 0 <= cached <= prompt else prompt
        if well and isinstance(output, int) and output > 0:
            self.output_tokens += output

    def report(self, *, waiting_requests: int = 0, waiting_tokens: int = 0) -> Traffic:
        """With what waits for a worker now."""
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
        )
