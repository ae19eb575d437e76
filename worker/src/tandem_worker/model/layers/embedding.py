"""Token embedding and output projection, split over the vocabulary under tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.layers.linear import HeadLinear
from tandem_worker.parallel.collectives import Collective

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight


class Embedding:
    """Rows of a table. Each rank holds a run of rows; others' tokens contribute zero to the sum over ranks."""

    def __init__(self, table: Weight | PackedWeight, first_row: int, reduce: Collective | None) -> None:
        self.table = table
        self._first_row = first_row
        self._reduce = reduce

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` to `[T, hidden]`."""
        if self._reduce is None:
            return self._rows(token_ids)
        local = token_ids - self._first_row
        elsewhere = (local < 0) | (local >= self.table.shape[0])
        rows = self._rows(local.masked_fill(elsewhere, 0))
        return self._reduce.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.table, torch.Tensor), "a backend with packed tables looks up rows itself"
        return functional.embedding(ids, self.table)


class LMHead:
    """Logits of hidden states, whole on every rank."""

    def __init__(self, linear: HeadLinear, vocab_size: int, gather: Collective | None) -> None:
        self.linear = linear
        self.gather = gather
        """None: there is one rank."""
        self._vocab_size = vocab_size

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` to `[N, vocab_size]` float32."""
        logits = self.linear(hidden)
        if self.gather is None:
            return logits
        share = -(-self._vocab_size // self.gather.size)
        if logits.shape[1] < share:  # a packed matrix of the last rank has no rows to fill up with
            logits = functional.pad(logits, (0, share - logits.shape[1]))
        return self.gather.all_gather(logits, 1)[:, : self._vocab_size]
