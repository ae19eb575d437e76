"""Grouped-query attention from a checkpoint: this rank's heads, projections and options."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.assembly.build import Build
from tandem_worker.model.attention import AttentionSpec
from tandem_worker.model.checkpoint.loader import Part
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.layers.attention import ROTATE, Placement, SelfAttention
from tandem_worker.model.layers.linear import Linear
from tandem_worker.parallel.context import ParallelContext


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads of this rank. KV heads are repeated on several ranks when there are fewer of them than ranks."""

    num_heads: int
    num_kv_heads: int
    first_head: int
    first_kv_head: int

    @classmethod
    def of(cls, config: ModelConfig, context: ParallelContext) -> HeadShare:
        """The share of this context's tensor-parallel rank.

        Raises StartupError (ParallelismInvalid) when the query heads do not divide by the ranks, or when of the number
        of KV heads and that of the ranks neither divides by the other.
        """
        rank, size = context.tp_rank, context.tp_size
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            raise StartupError(
                "ParallelismInvalid",
                f"{heads} attention heads with {kv_heads} KV heads cannot be split over {size} tensor-parallel ranks.",
            )
        local_kv = max(1, kv_heads // size)
        return cls(heads // size, local_kv, rank * heads // size, rank * kv_heads // size)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a family's layer has beyond plain grouped-query attention."""

    window: int | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    place: Placement = ROTATE


def load_attention(
    config: ModelConfig,
    build: Build,
    *,
    layer: int,
    index: int,
    options: AttentionOptions | None = None,
) -> SelfAttention:
    """Attention of the checkpoint's layer `layer`, which is number `index` of this rank."""
    options = options or AttentionOptions()
    share = HeadShare.of(config, build.context)
    spec = AttentionSpec(
        num_heads=share.num_heads,
        num_kv_heads=share.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=options.window,
        chunk=options.chunk,
        sinks=options.sinks,
    )
    prefix = f"model.layers.{layer}.self_attn."
    qkv = load_qkv(config, build, share, prefix)
    out = load_output(config, build, share, prefix)
    return build.backend.self_attention(qkv, out, spec, index=index, place=options.place)


def load_qkv(config: ModelConfig, build: Build, share: HeadShare, prefix: str) -> Linear:
    """Queries, keys and values of this rank's heads as one matrix, with biases where `attention_bias` says so."""
    dim = config.head_dim
    counts = {
        "q": (config.num_heads, share.first_head, share.num_heads),
        "k": (config.num_kv_heads, share.first_kv_head, share.num_kv_heads),
        "v": (config.num_kv_heads, share.first_kv_head, share.num_kv_heads),
    }
    weights, biases = [], []
    for name, (total, first, count) in counts.items():
        piece = None if count == total else Slice(0, first * dim, (first + count) * dim)
        shape = (total * dim, config.hidden_size)
        weights.append(Part(name=f"{prefix}{name}_proj.weight", shape=shape, piece=piece))
        biases.append(Part(name=f"{prefix}{name}_proj.bias", shape=shape[:1], piece=piece))
    bias = build.loader.stack(biases) if config.flag("attention_bias") else None
    return build.backend.linear(build.loader.matrix(weights), bias)


def load_output(config: ModelConfig, build: Build, share: HeadShare, prefix: str) -> Linear:
    """The output projection; ranks hold the columns of their heads."""
    dim, width = config.head_dim, config.num_heads * config.head_dim
    piece = None
    if share.num_heads != config.num_heads:
        piece = Slice(1, share.first_head * dim, (share.first_head + share.num_heads) * dim)
    name = f"{prefix}o_proj."
    bias = build.loader.load(f"{name}bias", (config.hidden_size,)) if config.flag("attention_bias") else None
    weight = build.loader.matrix([Part(name=f"{name}weight", shape=(config.hidden_size, width), piece=piece)])
    return build.backend.linear(weight, bias, reduce=build.context.tp)
