"""What one engine step does, and the limits it keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tandem_worker.engine.schedule.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_running: int = 256
    """Sequences that hold blocks and take part in steps, those waiting for remote KV included."""
    max_batch_tokens: int = 2048
    """Tokens computed in one step."""
    local_prefill_max_tokens: int = 16
    """Prompts with more uncached tokens go to a prefill worker, when the request names one."""
    max_scored_chunk: int = 256
    """Chunk limit of prompts whose every position wants logits: they take `vocab_size * 4` bytes per token."""
    seconds_per_priority: float = 30.0
    """A request is served as if it had arrived this much later per level: a bounded wait instead of starvation."""


class Chunk(NamedTuple):
    """Tokens `start` to `start + length` of a sequence are computed in this step."""

    sequence: Sequence
    start: int
    length: int

    @property
    def end(self) -> int:
        """Position behind the last token of the chunk."""
        return self.start + self.length

    @property
    def final(self) -> bool:
        """The sequence's last token is in it: its logits give the next token."""
        return self.end == self.sequence.num_tokens


@dataclass(slots=True)
class StepPlan:
    """Done in this order: withdrawals, copies to and from host memory (`HostCache.take_moves`), orders, copies, one
    forward pass over decodes and chunks."""

    decodes: list[Sequence] = field(default_factory=list[Sequence])
    """The newest token of each, and the guesses behind it."""
    guesses: dict[Sequence, tuple[int, ...]] = field(default_factory=dict[Sequence, tuple[int, ...]])
    """Tokens that may follow the newest one of a decode: computed with it, and checked when its logits are there. Of
    decodes without any there is no entry."""
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    copies: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(source, target) blocks of copy-on-write."""
    orders: list[Sequence] = field(default_factory=list[Sequence])
    """Now RECEIVING: their remote prefill is to be started."""
    withdrawn: list[Sequence] = field(default_factory=list[Sequence])
    """No longer RECEIVING: their remote prefill is to be cancelled."""
    num_preempted: int = 0
    num_fetched: int = 0
    """Blocks that come from host memory for sequences that are admitted."""
    lockstep: bool = False
    """The next step cannot be planned before this one's tokens are known: the host has a part in choosing them."""

    @property
    def empty(self) -> bool:
        """Nothing to compute."""
        return not self.decodes and not self.chunks

    def sequences(self) -> Iterator[Sequence]:
        """Sequences that the forward pass computes: decodes, then those of the chunks."""
        yield from self.decodes
        for chunk in self.chunks:
            yield chunk.sequence

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def num_guesses(self) -> int:
        """Tokens of all guesses."""
        return sum(map(len, self.guesses.values())) if self.guesses else 0

    @property
    def num_decode_tokens(self) -> int:
        """Rows of the forward pass that belong to decodes: one for each, and the guesses."""
        return len(self.decodes) + self.num_guesses

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass: those of the decodes, and the tokens of the chunks."""
        return self.num_decode_tokens + self.num_prefill_tokens
