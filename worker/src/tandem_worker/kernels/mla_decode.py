"""Decode attention of multi-head latent attention in absorbed form: one shared latent serves as key and value.

The query is already multiplied by the key up-projection, so all heads attend to the same row of L + R numbers, and the
values are the first L of it: a tile of the cache is read once and used by two products. With 128 heads that is about
240 operations per byte, at the edge between memory and arithmetic (FlashMLA, DeepSeek, 2025); tiles of 64 heads keep
the tensor cores' 64-row instruction busy.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_checks import LOG2E, cdiv, check_sequences, online_softmax
from .checks import FLOATS, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.mla import mla_decode_attention_reference
from .split_merge import merge_splits, plan_splits, tiles_of_split


@triton.jit(do_not_specialize=["num_splits", "fewest_tiles", "max_splits", "stride_table"])
def _mla_decode_attention_kernel(
    q_ptr, cache_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, num_heads, block_size, num_splits, fewest_tiles, max_splits,
    stride_q_row, stride_q_head, stride_block, stride_slot, stride_table, stride_out_row, stride_out_head,
    SPLIT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head_tiles = tl.cdiv(num_heads, BLOCK_H)
    row = (tl.program_id(0) // head_tiles).to(tl.int64)  # a grid's other axes end at 65,535
    heads = tl.program_id(0) % head_tiles * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(1)
    latent_dims = tl.arange(0, LATENT)
    rope_dims = LATENT + tl.arange(0, ROPE)
    valid = heads < num_heads
    context = tl.load(lens_ptr + row).to(tl.int32)
    num_tiles = cdiv(context, BLOCK_N)
    tiles_per_split = tiles_of_split(num_tiles, fewest_tiles, max_splits)
    start = split * tiles_per_split
    end = tl.minimum(start + tiles_per_split, num_tiles)

    q_ptrs = q_ptr + row * stride_q_row + heads[:, None] * stride_q_head
    q_latent = tl.load(q_ptrs + latent_dims[None, :], mask=valid[:, None], other=0.0)
    q_rope = tl.load(q_ptrs + rope_dims[None, :], mask=valid[:, None], other=0.0)
    maximum = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    accumulated = tl.zeros((BLOCK_H, LATENT), tl.float32)
    for tile in range(start, end):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = keys < context
        block = tl.load(tables_ptr + row * stride_table + keys // block_size, mask=seen, other=0).to(tl.int64)
        key_ptrs = cache_ptr + (block * stride_block + (keys % block_size) * stride_slot)[:, None]
        k_latent = tl.load(key_ptrs + latent_dims[None, :], mask=seen[:, None], other=0.0)
        k_rope = tl.load(key_ptrs + rope_dims[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q_latent, tl.trans(k_latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(k_latent.dtype), k_latent, accumulated, input_precision="ieee")

    divisor = tl.where(total > 0.0, total, 1.0)
    y = accumulated / divisor[:, None]
    if SPLIT:
        slot = (row * num_heads + heads) * num_splits + split
        tl.store(lse_ptr + slot, maximum + tl.log2(divisor), mask=valid)
        partial_ptrs = partial_ptr + slot[:, None] * LATENT + latent_dims[None, :]
        tl.store(partial_ptrs, y, mask=(valid & (total > 0.0))[:, None])
    else:
        out_ptrs = out_ptr + row * stride_out_row + heads[:, None] * stride_out_head + latent_dims[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None])


def _tile_shape(num_heads: int, element_size: int) -> dict[str, int]:
    block_h = min(64, max(16, triton.next_power_of_2(num_heads)))
    if element_size > 2:  # float32 serves tests; four-byte tiles must be smaller to fit
        return {"BLOCK_H": min(block_h, 16), "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    if block_h >= 64:
        return {"BLOCK_H": block_h, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_H": block_h, "BLOCK_N": 32, "num_warps": 8, "num_stages": 5}


@with_twin(mla_decode_attention_reference)
def mla_decode_attention(
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
    """Attention of one absorbed query per sequence over the paged latents, its own included.

    q `[B, H, L + R]`: the query times the key up-projection (L), then its rotated part (R); latent_cache
    `[N, S, L + R]` with contiguous last axis; block_tables `[B, M]` int32; context_lens `[B]`, 0 for padding rows,
    which come back as zeros; latent_dim L and R are powers of two from 16 (512 and 64 in DeepSeek-V3 and Kimi K2);
    scale is that of the unabsorbed heads, (Dn + R) ** -0.5 with YaRN's factor. -> `[B, H, L]`, to be multiplied by the
    value up-projection.
    Raises `ValueError` for shapes and strides, `TypeError` for dtypes and devices.
    """
    require_dtype("q", q, *FLOATS)
    require_shape("q", q, (block_tables.shape[0], None, None))
    require_rows("q", q)
    num_rows, num_heads, width = q.shape
    rope_dim = width - latent_dim
    for name, extent in (("latent_dim", latent_dim), ("the rotated part of q", rope_dim)):
        if extent < 16 or extent & (extent - 1):
            raise ValueError(f"{name} must be a power of two from 16, got {extent}")
    require_shape("latent_cache", latent_cache, (None, None, width))
    require_dtype("latent_cache", latent_cache, q.dtype)
    require_rows("latent_cache", latent_cache)
    check_sequences(block_tables, context_lens)
    require_same_device(q, latent_cache=latent_cache, block_tables=block_tables, context_lens=context_lens)
    out = result_like("out", out, (num_rows, num_heads, latent_dim), q)
    if num_rows == 0:
        return out
    tile = _tile_shape(num_heads, q.element_size())
    head_tiles = triton.cdiv(num_heads, tile["BLOCK_H"])
    max_tiles = triton.cdiv(block_tables.shape[1] * latent_cache.shape[1], tile["BLOCK_N"])
    num_splits, *cuts = plan_splits(max_tiles, tile["BLOCK_N"], num_splits)
    partial, lse = out, out
    if num_splits > 1:
        partial = torch.empty((num_rows, num_heads, num_splits, latent_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_rows, num_heads, num_splits), dtype=torch.float32, device=q.device)
    _mla_decode_attention_kernel[(num_rows * head_tiles, num_splits)](
        q, latent_cache, block_tables, context_lens, out, partial, lse,
        scale * LOG2E, num_heads, latent_cache.shape[1], num_splits, *cuts,
        q.stride(0), q.stride(1), latent_cache.stride(0), latent_cache.stride(1), block_tables.stride(0),
        out.stride(0), out.stride(1), SPLIT=num_splits > 1, LATENT=latent_dim, ROPE=rope_dim, **tile, **FUSED_MATH,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(partial, lse, None, out)
    return out
