"""Grouped-query self-attention with a fused QKV projection (arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.backends.attention import AttentionSpec, kv_layer_spec
from tandem_worker.model.checkpoint.contract import Slice
from tandem_worker.model.checkpoint.loader import Part, WeightLoader
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.norm import HeadNorm
from tandem_worker.model.layers.step import Step
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
        rank, size = context.tp_rank, context.tp_size
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % size or (kv_heads % size and size % kv_heads):
            raise StartupError(
                "ParallelismInvalid",
                f"{heads} attention heads with {kv_heads} KV heads cannot be split over {size} tensor-parallel ranks.",
            )
        local_kv = max(1, kv_heads // size)
        return cls(heads // size, local_kv, rank * heads // size, rank * kv_heads // size)


Placement = Callable[[torch.Tensor, int, Step], None]
"""Brings positions into `[T, num_heads + num_kv_heads, head_dim]`, query heads first, in place."""


@dataclass(frozen=True, slots=True)
class Rotate:
    """Rotary embedding of queries and keys alike, after a norm of each head where there is one."""

    norm: HeadNorm | None = None
    interleaved: bool = False
    """Element 2i pairs with 2i + 1, not i with i + D / 2."""

    def __call__(self, heads: torch.Tensor, num_heads: int, step: Step) -> None:
        if self.norm is not None:
            self.norm.normalize_(heads, num_heads)
        if self.interleaved:
            step.rotation.rotate_interleaved_(heads)
        else:
            step.rotation.rotate_half_(heads)


class SelfAttention:
    """Projections around a `StepAttention`. The output joins the residual stream."""

    def __init__(self, qkv: Linear, out: Linear, spec: AttentionSpec, *, index: int, place: Placement) -> None:
        """`index` is the layer's place among this rank's layers."""
        self.qkv = qkv
        self.out = out
        self.spec = spec
        self._place = place
        self._index = index
        self._num_placed = spec.num_heads + spec.num_kv_heads

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        return kv_layer_spec(block_size, self.spec.num_kv_heads, self.spec.head_dim)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, step: Step, kv_layer: torch.Tensor
    ) -> torch.Tensor:
        """`residual + attention(x)` for `[T, hidden]`; None adds nothing. Writes this layer's KV."""
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        self._place(heads[:, : self._num_placed], spec.num_heads, step)
        kv = heads[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads))
        step.attention.write(kv, kv_layer)
        step.written(self._index)
        attended = step.attention.attend(heads[:, : spec.num_heads], kv, kv_layer, spec)
        return self.out.add_to(attended, residual)


ROTATE = Rotate()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """What a family's layer has beyond plain grouped-query attention."""

    window: int | None = None
    chunk: int | None = None
    sinks: torch.Tensor | None = None
    place: Placement = ROTATE


def load_attention(
    config: ModelConfig,
    loader: WeightLoader,
    context: ParallelContext,
    *,
    layer: int,
    index: int,
    options: AttentionOptions | None = None,
) -> SelfAttention:
    """Attention of the checkpoint's layer `layer`, which is number `index` of this rank."""
    options = options or AttentionOptions()
    share = HeadShare.of(config, context)
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
    qkv = load_qkv(config, loader, share, prefix)
    out = load_output(config, loader, share, context, prefix)
    return loader.backend.self_attention(qkv, out, spec, index=index, place=options.place)


def load_qkv(config: ModelConfig, loader: WeightLoader, share: HeadShare, prefix: str) -> Linear:
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
    bias = loader.stack(biases) if config.flag("attention_bias") else None
    return loader.backend.linear(loader.matrix(weights), bias)


def load_output(
    config: ModelConfig, loader: WeightLoader, share: HeadShare, context: ParallelContext, prefix: str
) -> Linear:
    """The output projection; ranks hold the columns of their heads."""
    dim, width = config.head_dim, config.num_heads * config.head_dim
    piece = None
    if share.num_heads != config.num_heads:
        piece = Slice(1, share.first_head * dim, (share.first_head + share.num_heads) * dim)
    name = f"{prefix}o_proj."
    bias = loader.load(f"{name}bias", (config.hidden_size,)) if config.flag("attention_bias") else None
    weight = loader.matrix([Part(name=f"{name}weight", shape=(config.hidden_size, width), piece=piece)])
    return loader.backend.linear(weight, bias, reduce=context.tp)
