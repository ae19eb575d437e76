"""Twins of the multi-head latent attention kernels (DeepSeek-V2, 2024)."""

from __future__ import annotations

import torch

from .attention import masked_softmax, visible
from .elementwise import compute_dtype


def mla_decode_attention_reference(
    q: torch.Tensor,
    latent_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    latent_dim: int,
    scale: float,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `mla_decode_attention`: q `[B, H, L + R]`, latent_cache `[N, S, L + R]` -> `[B, H, L]`."""
    del num_splits
    shape = (q.shape[0], q.shape[1], latent_dim)
    out = torch.zeros(shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    block_size, wide = latent_cache.shape[1], compute_dtype(q)
    for row, length in enumerate(context_lens.tolist()):
        if length == 0:
            continue
        blocks = block_tables[row, : -(-length // block_size)].long()
        keys = latent_cache[blocks].flatten(0, 1)[:length].to(wide)
        weights = torch.softmax(q[row].to(wide) @ keys.t() * scale, dim=-1)
        out[row] = (weights @ keys[:, :latent_dim]).to(out.dtype)
    return out


def latent_gather_reference(
    latent_cache: torch.Tensor, block_tables: torch.Tensor, kv_start: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Twin of `latent_gather`: the first kv_start[b+1] - kv_start[b] latents of every sequence, `[num_tokens, L]`."""
    out = latent_cache.new_zeros((num_tokens, latent_cache.shape[2]))
    starts, block_size = kv_start.tolist(), latent_cache.shape[1]
    for row in range(block_tables.shape[0]):
        length = starts[row + 1] - starts[row]
        blocks = block_tables[row, : -(-length // block_size)].long()
        out[starts[row] : starts[row + 1]] = latent_cache[blocks].flatten(0, 1)[:length]
    return out


def mla_prefill_attention_reference(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    query_start: torch.Tensor,
    kv_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `mla_prefill_attention`: q `[T, H, Dn + R]`, kv `[C, H, Dn + Dv]`, k_rope `[C, R]` -> `[T, H, Dv]`."""
    nope_dim = q.shape[2] - k_rope.shape[1]
    shape = (q.shape[0], q.shape[1], kv.shape[2] - nope_dim)
    out = torch.zeros(shape, dtype=q.dtype, device=q.device) if out is None else out.zero_()
    wide = compute_dtype(q)
    query_bounds, kv_bounds = query_start.tolist(), kv_start.tolist()
    for row in range(len(query_bounds) - 1):
        queries = slice(query_bounds[row], query_bounds[row + 1])
        keys = slice(kv_bounds[row], kv_bounds[row + 1])
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        if num_queries == 0:
            continue
        rope = k_rope[keys, None].expand(-1, q.shape[1], -1)
        k = torch.cat((kv[keys, :, :nope_dim], rope), dim=-1).to(wide).transpose(0, 1)
        v = kv[keys, :, nope_dim:].to(wide).transpose(0, 1)
        scores = q[queries].to(wide).transpose(0, 1) @ k.transpose(1, 2) * scale
        positions = torch.arange(num_keys - num_queries, num_keys, device=q.device)
        weights = masked_softmax(scores, visible(positions, num_keys, None, None), None)
        out[queries] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out
