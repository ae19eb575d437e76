"""RMS normalization (arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch.nn import functional


class RMSNorm:
    """`x / rms(x) * weight` over the last dimension, computed in float32. `weight` None: no scale."""

    __slots__ = ("eps", "shape", "weight")

    def __init__(self, weight: torch.Tensor | None, eps: float, dim: int | None = None) -> None:
        """`dim` is the width that is normalized when that is not the weight's whole shape."""
        assert weight is not None or dim is not None
        self.weight = weight
        self.shape = (dim,) if dim is not None else (weight.shape[-1],)  # pyright: ignore[reportOptionalMemberAccess]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., dim]` to the same shape and type."""
        return functional.rms_norm(x, self.shape, self.weight, self.eps)


class HeadNorm:
    """RMSNorm of each head's `head_dim`, with one weight for queries and one for keys (Qwen3)."""

    __slots__ = ("eps", "key_weight", "query_weight", "weights")

    def __init__(
        self, query_weight: torch.Tensor, key_weight: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float
    ) -> None:
        self.query_weight = query_weight
        self.key_weight = key_weight
        # Not `cat`: a torch that is imported whole computes its shape in Python, and imports its compilers for that.
        self.weights = query_weight.new_empty((num_heads + num_kv_heads, query_weight.shape[-1]))
        self.weights[:num_heads].copy_(query_weight)
        self.weights[num_heads:].copy_(key_weight)
        self.eps = eps

    def normalize_(self, heads: torch.Tensor, num_heads: int) -> None:
        """Normalize `[T, num_heads + num_kv_heads, head_dim]` in place, query heads first."""
        torch.mul(functional.rms_norm(heads, heads.shape[-1:], None, self.eps), self.weights, out=heads)
