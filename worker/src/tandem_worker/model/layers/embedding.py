"""Token embedding and output projection, split over the vocabulary under tensor parallelism."""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem_worker.model.checkpoint.contract import Slice
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.model.layers.linear import HeadLinear
from tandem_worker.parallel.collectives import Collective
from tandem_worker.parallel.context import ParallelContext


class Embedding:
    """Rows of a table. Each rank holds a run of rows; others' tokens contribute zero to the sum over ranks."""

    def __init__(self, table: torch.Tensor, first_row: int, reduce: Collective | None) -> None:
        self.table = table
        self._first_row = first_row
        self._reduce = reduce

    @classmethod
    def load(cls, loader: WeightLoader, context: ParallelContext, name: str, shape: tuple[int, int]) -> Embedding:
        piece = vocabulary_share(shape[0], context)
        return cls(loader.load(name, shape, piece), 0 if piece is None else piece.start, context.tp)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """`[T]` to `[T, hidden]`."""
        if self._reduce is None:
            return functional.embedding(token_ids, self.table)
        local = token_ids - self._first_row
        elsewhere = (local < 0) | (local >= self.table.shape[0])
        rows = functional.embedding(local.masked_fill(elsewhere, 0), self.table)
        return self._reduce.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0.0))


class LMHead:
    """Logits of hidden states, whole on every rank."""

    def __init__(self, linear: HeadLinear, vocab_size: int, gather: Collective | None) -> None:
        self._linear = linear
        self._vocab_size = vocab_size
        self._gather = gather

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, hidden]` to `[N, vocab_size]` float32."""
        logits = self._linear(hidden)
        if self._gather is None:
            return logits
        return self._gather.all_gather(logits, 1)[:, : self._vocab_size]


def vocabulary_share(vocab_size: int, context: ParallelContext) -> Slice | None:
    """This rank's rows. The last rank's share may be shorter: vocabularies need not divide."""
    if context.tp_size == 1:
        return None
    share = -(-vocab_size // context.tp_size)
    start = min(share * context.tp_rank, vocab_size)
    return Slice(0, start, min(start + share, vocab_size))


def build_lm_head(
    loader: WeightLoader, context: ParallelContext, shape: tuple[int, int], *, tied: torch.Tensor | None
) -> LMHead:
    """The output projection: its own matrix, or the embedding's when tied."""
    weight = tied if tied is not None else loader.load("lm_head.weight", shape, vocabulary_share(shape[0], context))
    if context.tp_size > 1:
        share = -(-shape[0] // context.tp_size)
        weight = functional.pad(weight, (0, 0, 0, share - weight.shape[0]))
    return LMHead(loader.backend.head(weight), shape[0], context.tp)
