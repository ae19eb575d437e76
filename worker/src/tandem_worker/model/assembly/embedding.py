"""Token embedding and output projection from a checkpoint, split over the vocabulary under tensor parallelism."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.layers.embedding import Embedding, LMHead
from tandem_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.checkpoint.stored import PackedWeight


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
    first_row, lossless = 0 if piece is None else piece.start, build.backend.lossless
    if lossless is not None and build.loader.is_lossless:
        weight = build.loader.matrix([Part(name=name, shape=shape, piece=piece)])
        if isinstance(weight, torch.Tensor):
            return Embedding(weight, first_row, build.context.tp)
        return lossless.embedding(weight, first_row, build.context.tp, build.loader.dtype)
    return Embedding(build.loader.load(name, shape, piece), first_row, build.context.tp)


def load_lm_head(
    build: Build, shape: tuple[int, int], *, tied: Weight | PackedWeight | None, name: str = "lm_head.weight"
) -> LMHead:
    """The output projection: its own matrix, or the embedding's when tied."""
    rows = vocabulary_share(shape[0], build.context)
    packed = tied
    if tied is None and build.loader.is_lossless:
        packed = build.loader.matrix([Part(name=name, shape=shape, piece=rows)])
    if packed is not None and not isinstance(packed, torch.Tensor):
        return LMHead(build.backend.head(packed), shape[0], build.context.tp)
    weight = packed if packed is not None else build.loader.load(name, shape, rows)
    if build.context.tp_size > 1:
        share = -(-shape[0] // build.context.tp_size)
        weight = functional.pad(weight, (0, 0, 0, share - weight.shape[0]))
    return LMHead(build.backend.head(build.loader.lay_out("the output matrix", weight)), shape[0], build.context.tp)
