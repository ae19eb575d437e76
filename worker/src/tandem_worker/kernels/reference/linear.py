"""Twins of the small-batch products: dequantize, multiply, act."""

from __future__ import annotations

import torch

from ..quantized import SplitByteWeight, Weight, dequantize
from .elementwise import compute_dtype, silu_mul_reference, swiglu_clamped_reference


def small_batch_linear_reference(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `small_batch_linear`: x `[M, K]`, weight `[N, K]`, residual `[M, N]` -> `[M, N]`."""
    del num_splits
    wide = compute_dtype(x)
    y = x.to(wide) @ dequantize(weight, wide).t()
    if bias is not None:
        y = y + bias.to(wide)
    if residual is not None:
        y = y + residual.to(wide)
    return y.to(x.dtype) if out is None else out.copy_(y)


def widen_reference(like: torch.Tensor, weight: Weight, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of `widen`: the weight's values `[N, K]` in the dtype of `like`."""
    y = dequantize(weight, like.dtype)
    return y if out is None else out.copy_(y)


def look_up_reference(ids: torch.Tensor, weight: SplitByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """Twin of `look_up`: rows `ids` `[T]` of a weight `[N, K]`, `[T, K]`."""
    return weight.dequantize(dtype)[ids.long()]


def gate_up_silu_reference(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `gate_up_silu`: x `[M, K]`, weight `[2I, K]` (gate rows first) -> `[M, I]`."""
    wide = compute_dtype(x)
    y = silu_mul_reference(small_batch_linear_reference(x.to(wide), weight, bias))
    return y.to(x.dtype) if out is None else out.copy_(y)


def activate(gate_up: torch.Tensor, limit: float | None) -> torch.Tensor:
    """An expert's gated activation, `[T, 2I]` to `[T, I]`: silu, or gpt-oss's clamped form where there is a limit."""
    return silu_mul_reference(gate_up) if limit is None else swiglu_clamped_reference(gate_up, limit=limit)
