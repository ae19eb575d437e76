"""Twins of the norm, rotary, activation and KV-write kernels.

Arithmetic is done in float32, or in float64 when the inputs are float64, and rounded once at the end, as the kernels
do: the GPU tests feed float64 copies to get an oracle.
"""

from __future__ import annotations

import torch


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `rms_norm`: x `[..., H]`, weight `[H]` -> `[..., H]`."""
    wide = x.to(compute_dtype(x))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(normed.dtype)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def residual_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `residual_rms_norm`: adds x `[T, H]` into residual `[T, H]` in place, returns the norm of the sum."""
    wide = compute_dtype(x)
    residual.copy_(residual.to(wide) + x.to(wide))
    normed = rms_norm_reference(residual, weight, eps)
    return normed.to(x.dtype) if out is None else out.copy_(normed)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> None:
    """Rotate the leading dimensions of heads `[T, H, D]` in place by cos, sin `[T, R/2]`."""
    half = cos.shape[1]
    first, second = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if interleaved else (slice(0, half), slice(half, 2 * half))
    )
    wide = compute_dtype(heads)
    x, y = heads[..., first].to(wide), heads[..., second].to(wide)
    c, s = cos[:, None, :].to(wide), sin[:, None, :].to(wide)
    # Both results exist before either is stored: x and y are views when nothing had to be widened.
    rotated_x, rotated_y = x * c - y * s, y * c + x * s
    heads[..., first] = rotated_x.to(heads.dtype)
    heads[..., second] = rotated_y.to(heads.dtype)


def rope_reference(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Twin of `rope`: rotates q `[T, Hq, D]` and k `[T, Hk, D]` in place; tables `[P, R/2]`, positions `[T]`."""
    cos_rows, sin_rows = cos[positions], sin[positions]
    _rotate(q, cos_rows, sin_rows, interleaved)
    if k is not None:
        _rotate(k, cos_rows, sin_rows, interleaved)


def silu_mul_reference(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of `silu_mul`: gate_up `[T, 2I]` (gate first) -> silu(gate) * up `[T, I]`."""
    wide = compute_dtype(gate_up)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return product.to(gate_up.dtype) if out is None else out.copy_(product)


def swiglu_clamped_reference(
    gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Twin of `swiglu_clamped`: gate_up `[T, 2I]` (gate first) -> (up + 1) * gate * sigmoid(alpha * gate) `[T, I]`."""
    wide = compute_dtype(gate_up)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    product = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return product.to(gate_up.dtype) if out is None else out.copy_(product)


def kv_write_reference(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Twin of `kv_write`: k, v `[T, Hk, D]` into kv_cache `[N, 2, Hk, S, D]` at slots `[T]`; negative slots drop."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    blocks, offsets = slots // kv_cache.shape[3], slots % kv_cache.shape[3]
    kv_cache[blocks, 0, :, offsets] = k[keep].to(kv_cache.dtype)
    kv_cache[blocks, 1, :, offsets] = v[keep].to(kv_cache.dtype)


def latent_write_reference(latent: torch.Tensor, latent_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Twin of `latent_write`: latent `[T, L]` into latent_cache `[N, S, L]` at slots `[T]`; negative slots drop."""
    keep = slot_mapping >= 0
    slots = slot_mapping[keep]
    block_size = latent_cache.shape[1]
    latent_cache[slots // block_size, slots % block_size] = latent[keep].to(latent_cache.dtype)


def fused_qkv_norm_rope_kv_write_reference(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `fused_qkv_norm_rope_kv_write`: qkv `[T, (Hq + 2 Hk) D]` -> q `[T, Hq, D]`; K and V go to the cache."""
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    heads = qkv.unflatten(-1, (-1, head_dim))
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    wide = heads.to(compute_dtype(qkv))
    q, k, v = wide.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
    q = q.clone() if q_norm is None else rms_norm_reference(q, q_norm, eps)
    k = k.clone() if k_norm is None else rms_norm_reference(k, k_norm, eps)
    rope_reference(q, k, cos, sin, positions, interleaved=interleaved)
    kv_write_reference(k, v, kv_cache, slot_mapping)
    return q.to(qkv.dtype) if out is None else out.copy_(q)


def copy_rows_reference(
    pairs: torch.Tensor, source: torch.Tensor, source_column: int, target: torch.Tensor, target_column: int, width: int
) -> None:
    """Twin of `copy_rows`."""
    rows = source.index_select(0, pairs[:, 0]).narrow(1, source_column, width)
    target.narrow(1, target_column, width).index_copy_(0, pairs[:, 1], rows)
