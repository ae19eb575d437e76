"""Twins of the mixture-of-experts kernels: routing, and one expert after another."""

from __future__ import annotations

import torch

from ..quantized import Weight, dequantize
from .elementwise import compute_dtype
from .linear import activate


def moe_route_reference(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of `moe_route`: logits `[T, E]` -> weights `[T, top_k]` float32, expert ids `[T, top_k]` int32."""
    logits = logits.to(compute_dtype(logits))
    scores = torch.softmax(logits, dim=-1) if scoring == "softmax" else torch.sigmoid(logits)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        group_scores = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, group_scores.topk(top_groups, dim=-1).indices, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights, ids = (weights * scale).float(), ids.int()
    if live is not None:
        weights, ids = weights.masked_fill(~live[:, None], 0.0), ids.masked_fill(~live[:, None], -1)
    return weights, ids


def fused_moe_reference(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    residual: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `fused_moe`: x `[T, H]`, gate_up `[E, 2I, H]`, down `[E, H, I]` -> `[T, H]`."""
    wide = compute_dtype(x)
    total = torch.zeros(x.shape, dtype=wide, device=x.device) if residual is None else residual.to(wide, copy=True)
    gate_up_values, down_values = dequantize(gate_up, wide), dequantize(down, wide)
    local = topk_ids.long() - first_expert
    for expert in range(gate_up_values.shape[0]):
        tokens, choices = (local == expert).nonzero(as_tuple=True)
        if tokens.numel() == 0:
            continue
        hidden = x[tokens].to(wide) @ gate_up_values[expert].t()
        if gate_up_bias is not None:
            hidden = hidden + gate_up_bias[expert].to(wide)
        y = activate(hidden, swiglu_limit) @ down_values[expert].t()
        if down_bias is not None:
            y = y + down_bias[expert].to(wide)
        total.index_add_(0, tokens, y * topk_weights[tokens, choices, None].to(wide))
    return total.to(x.dtype) if out is None else out.copy_(total)
