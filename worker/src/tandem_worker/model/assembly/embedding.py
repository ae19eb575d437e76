"""Token embedding and output projection from a checkpoint, split over the vocabulary under tensor parallelism."""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.checkpoint.contract import Slice
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.checkpoint.stored import PackedWeight
from tandem_worker.model.layers.embedding import Embedding, LMHead
from tandem_worker.parallel.context import ParallelContext


def vocabulary_share(vocab_size: int, context: ParallelContext) -> Slice | None:
    """This rank's rows. The last rank's share may be shorter: vocabularies need not divide."""
    if context.tp_size == 1:
        return None
    share = -(-vocab_size // context.tp_size)
    start = min(share * context.tp_rank, vocab_size)
    return Slice(0, start, min(start + share, vocab_size))


def load_embedding(build: Build, name: str, shape: tuple[int, int]) -> Embedding:
    """The table `shape` = `[vocab_size, hidden]`, or this rank's rows of it."""
    piece = vocabulary_share(shape[0], build.context)
    lossless = build.backend.lossless
    if lossless is not None and build.loader.is_lossless and piece is None:
        weight = build.loader.matrix([Part(name=name, shape=shape)])
        if isinstance(weight, PackedWeight):
            return lossless.embedding(weight)
        assert isinstance(weight, torch.Tensor), "this backend multiplies no other form"
        return Embedding(weight, 0, build.context.tp)
    return Embedding(build.loader.load(name, shape, piece), 0 if piece is None else piece.start, build.context.tp)


def load_lm_head(build: Build, shape: tuple[int, int], *, tied: torch.Tensor | PackedWeight | None) -> LMHead:
    """The output projection: its own matrix, or the embedding's when tied."""
    if isinstance(tied, PackedWeight):
        return LMHead(build.backend.head(tied), shape[0], build.context.tp)
    rows = vocabulary_share(shape[0], build.context)
    weight = tied if tied is not None else build.loader.load("lm_head.weight", shape, rows)
    if build.context.tp_size > 1:
        share = -(-shape[0] // build.context.tp_size)
        weight = functional.pad(weight, (0, 0, 0, share - weight.shape[0]))
    return LMHead(build.backend.head(build.loader.lay_out("the output matrix", weight)), shape[0], build.context.tp)
