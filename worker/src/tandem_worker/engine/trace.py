"""When a traced request passed what, inside a worker. Requests that are not traced have none of it.

Threads write to it as the request passes through them, each its own fields; whoever records the spans reads it when the
request is over. Times are seconds of `time.monotonic`, 0 where something did not happen.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from tandem_api.spans import TraceContext

MAX_HOPS = 16
"""Orders at prefill workers that are recorded of one request."""


@dataclass(slots=True, eq=False)
class Hop:
    """One order at one prefill worker. The decode end's, which the prefill end continues by its context."""

    context: TraceContext
    """Context of the span that the order is."""
    endpoint: str = ""
    ordered: float = 0.0
    ended: float = 0.0
    first_block: float = 0.0
    last_block: float = 0.0
    num_bytes: int = 0
    worker: str | None = None
    """Pod that computed the prompt."""
    failure: str | None = None
    """Why it brought nothing."""

    def note_blocks(self, num_bytes: int, began: float, ended: float) -> None:
        """A frame of blocks has moved."""
        self.first_block = self.first_block or began
        self.last_block = ended
        self.num_bytes += num_bytes

    def end(self, failure: str | None = None) -> None:
        """It is over; only the first call counts."""
        if not self.ended:
            self.ended, self.failure = time.monotonic(), failure


@dataclass(slots=True, eq=False)
class RequestTrace:
    """One request of the engine."""

    context: TraceContext
    """Context of the span that its phases stand under."""
    arrived: float = 0.0
    admitted: float = 0.0
    """It has had its blocks: it computes, or was ordered from a prefill worker."""
    prefilled: float = 0.0
    """The logits of its prompt are here."""
    ended: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    hops: list[Hop] = field(default_factory=list[Hop])

    def begin_hop(self, endpoint: str) -> Hop:
        """An order goes out."""
        hop = Hop(self.context.child(), endpoint, ordered=time.monotonic())
        if len(self.hops) < MAX_HOPS:
            self.hops.append(hop)
        return hop

    def note_prompt(self, num_tokens: int, num_cached: int) -> None:
        """The prompt is computed, by whomever."""
        self.prefilled = time.monotonic()
        self.prompt_tokens, self.cached_tokens = num_tokens, num_cached

    def note_end(self, num_output: int) -> None:
        """Nothing more comes of it."""
        self.ended, self.output_tokens = time.monotonic(), num_output
