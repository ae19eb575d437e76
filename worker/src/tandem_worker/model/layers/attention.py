"""Grouped-query self-attention with a fused QKV projection (arXiv:2305.13245)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem_worker.model.attention import AttentionSpec, kv_layer_spec
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.norm import HeadNorm
from tandem_worker.model.layers.step import Step

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
        self.place = place
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
        self.place(heads[:, : self._num_placed], spec.num_heads, step)
        kv = heads[:, spec.num_heads :].unflatten(1, (2, spec.num_kv_heads))
        step.entering(self._index)
        step.attention.write(kv, kv_layer)
        step.written(self._index)
        attended = step.attention.attend(heads[:, : spec.num_heads], kv, kv_layer, spec)
        return self.out.add_to(attended, residual)


ROTATE = Rotate()
