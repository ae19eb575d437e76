"""Grouped-query self-attention with a fused QKV projection (arXiv:2305.13245)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem_worker.attention.base import AttentionSpec
from tandem_worker.errors import StartupError
from tandem_worker.layers.linear import Linear
from tandem_worker.layers.norm import HeadNorm
from tandem_worker.layers.step import Step
from tandem_worker.models.config import ModelConfig
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.weights.base import Slice
from tandem_worker.weights.loader import Part, WeightLoader


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


class SelfAttention:
    """Projections around a `StepAttention`. The output joins the residual stream."""

    def __init__(
        self,
        qkv: Linear,
        out: Linear,
        spec: AttentionSpec,
        *,
        index: int,
        head_norm: HeadNorm | None = None,
        rotary: bool = True,
    ) -> None:
        self.qkv = qkv
        self.out = out
        self.spec = spec
        self.head_norm = head_norm
        self.rotary = rotary
        self._index = index
        self._num_rotated = spec.num_heads + spec.num_kv_heads

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: Step, kv_layer: torch.Tensor) -> torch.Tensor:
        """`residual + attention(x)` for `[T, hidden]`. Writes this layer's KV."""
        spec = self.spec
        heads = self.qkv(x).view(x.shape[0], -1, spec.head_dim)
        rotated = heads[:, : self._num_rotated]
        if self.head_norm is not None:
            self.head_norm.normalize_(rotated, spec.num_heads)
        if self.rotary:
            step.rotation.rotate_half_(rotated)
        kv = heads[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads))
        step.attention.write(kv, kv_layer)
        step.written(self._index)
        attended = step.attention.attend(heads[:, : spec.num_heads], kv, kv_layer, spec)
        return self.out.add_to(attended, residual)


def load_qkv(config: ModelConfig, loader: WeightLoader, share: HeadShare, prefix: str) -> Linear:
    """Queries, keys and values of this rank's heads as one matrix, with a bias where the checkpoint has one."""
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
    bias = loader.stack(biases) if loader.has(biases[0].name) else None
    return Linear(loader.stack(weights), bias)


def load_output(
    config: ModelConfig, loader: WeightLoader, share: HeadShare, context: ParallelContext, prefix: str
) -> Linear:
    """The output projection; ranks hold the columns of their heads."""
    dim, width = config.head_dim, config.num_heads * config.head_dim
    piece = None
    if share.num_heads != config.num_heads:
        piece = Slice(1, share.first_head * dim, (share.first_head + share.num_heads) * dim)
    name = f"{prefix}o_proj."
    bias = loader.load(f"{name}bias", (config.hidden_size,)) if loader.has(f"{name}bias") else None
    return Linear(loader.load(f"{name}weight", (config.hidden_size, width), piece), bias, reduce=context.tp)
