"""What a sampler is to the engine, and the constants that both of them keep to."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from tandem_worker.engine.schedule.params import TokenLogprob
from tandem_worker.engine.schedule.request import Sequence

NO_TOKEN = -1
"""In place of a token where the logits allow none (NaN, or everything forbidden)."""
LEAST_TEMPERATURE = 1e-6
"""float32 can still divide by it; the likeliest token is certain long before."""


class Sampler(Protocol):
    """Both backends choose the same tokens, so a choice may go on with the other one."""

    def choose_tokens(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
        """One token per row of `logits` `[N, vocab]`: `[N]` int64 on its device, NO_TOKEN where none is possible."""
        ...

    def compute_logprobs(
        self, logits: torch.Tensor, sequences: Rows[Sequence], tokens: list[int]
    ) -> dict[int, TokenLogprob]:
        """Logprobs of the chosen tokens, by row of `logits` `[N, vocab]`; of the rows that ask for them."""
        ...
