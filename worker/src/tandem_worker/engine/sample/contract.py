"""What a sampler is to the engine, and the constants that both of them keep to."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import torch

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.engine.schedule.request import Sequence

NO_TOKEN = -1
"""In place of a token where the logits allow none (NaN, or everything forbidden)."""
LEAST_TEMPERATURE = 1e-6
"""float32 can still divide by it; the likeliest token is certain long before."""


class CheckedRows(NamedTuple):
    """A sequence in a step's logits: the row of its newest token, behind which those of its guesses follow."""

    sequence: Sequence
    row: int
    guesses: tuple[int, ...]


class Sampler(Protocol):
    """Both backends choose the same tokens, so a choice may go on with the other one."""

    checks_at_once: bool
    """It has `choose_checked`; else guesses are checked one wave after another by `choose_tokens`."""

    def choose_tokens(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
        """One token per row of `logits` `[N, vocab]`: `[N]` int64 on its device, NO_TOKEN where none is possible."""
        ...

    def choose_checked(self, logits: torch.Tensor, checked: Rows[CheckedRows]) -> torch.Tensor:
        """The token at each place of each sequence, in order, as if all guesses before it were right: `[sum of places]`
        int64 on the device of `logits` `[N, vocab]`. All tokens of the sequences are known, and none has a grammar.

        What it remembers of a sequence is as after its first token and one more for each guess that was right up to the
        first that was not."""
        ...

    def compute_logprobs(
        self, logits: torch.Tensor, sequences: Rows[Sequence], tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        """Logprobs of the chosen tokens, by row of `logits` `[N, vocab]`; of the rows that ask for them."""
        ...
