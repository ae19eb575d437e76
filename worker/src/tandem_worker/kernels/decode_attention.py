"""Decode attention over paged KV with grouped query heads: one query per sequence, the context split over the device.

Bound by memory: every key and value is read once. The heads of a group share one tile of queries, so a key is read
once per KV head and not once per query head. Flash-Decoding's split over the context gives a lone sequence several
programs. The grid follows from shapes only, so a captured CUDA graph serves all lengths that fit its block table; where
a context is cut follows from its length alone, so a row has the same bits in every batch.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_checks import LOG2E, cdiv, check_paged_inputs, first_visible, online_softmax
from .checks import require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.attention import paged_decode_attention_reference
from .split_merge import merge_splits, plan_splits, tiles_of_split


@triton.jit(do_not_specialize=["num_splits", "fewest_tiles", "max_splits", "stride_table"])
def _paged_decode_attention_kernel(
    q_ptr, cache_ptr, tables_ptr, lens_ptr, out_ptr, partial_ptr, lse_ptr,
    scale_log2, group, num_q_heads, head_dim, block_size, num_splits, fewest_tiles, max_splits,
    stride_q_row, stride_q_head, stride_block, stride_kv, stride_kv_head, stride_slot, stride_table,
    stride_out_row, stride_out_head,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    members = tl.arange(0, BLOCK_G)
    dims = tl.arange(0, BLOCK_D)
    heads = kv_head * group + members
    valid = (members < group)[:, None] & (dims < head_dim)[None, :]
    context = tl.load(lens_ptr + row).to(tl.int32)
    first = first_visible(tl.maximum(context - 1, 0), WINDOW, CHUNK)
    first_tile = first // BLOCK_N
    num_tiles = cdiv(context, BLOCK_N) - first_tile
    tiles_per_split = tiles_of_split(num_tiles, fewest_tiles, max_splits)
    start = first_tile + split * tiles_per_split
    end = tl.minimum(start + tiles_per_split, first_tile + num_tiles)

    q = tl.load(q_ptr + row * stride_q_row + heads[:, None] * stride_q_head + dims[None, :], mask=valid, other=0.0)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_kv_head
    maximum = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    accumulated = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for tile in range(start, end):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        seen = (keys < context) & (keys >= first)
        block = tl.load(tables_ptr + row * stride_table + keys // block_size, mask=seen, other=0).to(tl.int64)
        offsets = block * stride_block + (keys % block_size) * stride_slot
        kv_ptrs = head_ptr + offsets[:, None] + dims[None, :]
        kv_mask = seen[:, None] & (dims < head_dim)[None, :]
        k = tl.load(kv_ptrs, mask=kv_mask, other=0.0)
        v = tl.load(kv_ptrs + stride_kv, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")

    if SPLIT:
        slot = (row * num_q_heads + heads) * num_splits + split
        divisor = tl.where(total > 0.0, total, 1.0)  # a split without keys: maximum, and so its lse, is -inf
        tl.store(lse_ptr + slot, maximum + tl.log2(divisor), mask=members < group)
        parts = accumulated / divisor[:, None]
        tl.store(partial_ptr + slot[:, None] * head_dim + dims[None, :], parts, mask=valid & (total > 0.0)[:, None])
    else:
        y = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
        out_ptrs = out_ptr + row * stride_out_row + heads[:, None] * stride_out_head + dims[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid)


def _keys_per_tile(block_d: int, element_size: int) -> int:
    """Keys per tile. Loads through the block table take two of Triton's stages each: five stages keep two tiles of keys
    and values under way, and larger tiles would not fit that often.
    """
    return max(16, min(128, 16384 // (block_d * element_size)))


@with_twin(paged_decode_attention_reference)
def paged_decode_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one new query per sequence over its paged context, the query's own key included.

    q `[B, Hq, D]` bf16, fp16 or fp32; kv_cache `[N, 2, Hk, S, D]` of q's dtype, any strides with D contiguous;
    block_tables `[B, M]` int32; context_lens `[B]` int32 or int64, 0 for padding rows, which come back as zeros; scale
    usually D ** -0.5; `window` counts the keys a query sees, its own included; `chunk` is Llama 4's chunk length; sinks
    `[Hq]` are gpt-oss's extra logits. -> `[B, Hq, D]`. `num_splits` divides every context among so many.
    Raises `ValueError` for shapes, strides and ranges, `TypeError` for dtypes and devices.
    Method: FlashAttention-2 (Dao, 2023) with Flash-Decoding's split over the context.
    """
    group = check_paged_inputs(q, kv_cache, block_tables, context_lens, sinks, window, chunk)
    require_shape("q", q, (block_tables.shape[0], None, None))
    out = result_like("out", out, tuple(q.shape), q)
    num_rows, num_q_heads, head_dim = q.shape
    if num_rows == 0:
        return out
    block_d = max(16, triton.next_power_of_2(head_dim))
    block_n = _keys_per_tile(block_d, q.element_size())
    longest = min(block_tables.shape[1] * kv_cache.shape[3], window or 1 << 62, chunk or 1 << 62)
    num_kv_heads = num_q_heads // group
    num_splits, *cuts = plan_splits(triton.cdiv(longest, block_n) + 1, block_n, num_splits)
    split = num_splits > 1 or sinks is not None  # sinks join where pieces meet
    partial, lse = out, out
    if split:
        partial = torch.empty((num_rows, num_q_heads, num_splits, head_dim), dtype=torch.float32, device=q.device)
        lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=q.device)
    _paged_decode_attention_kernel[(num_kv_heads, num_splits, num_rows)](
        q, kv_cache, block_tables, context_lens, out, partial, lse,
        scale * LOG2E, group, num_q_heads, head_dim, kv_cache.shape[3], num_splits, *cuts,
        q.stride(0), q.stride(1), *kv_cache.stride()[:4], block_tables.stride(0), out.stride(0), out.stride(1),
        WINDOW=window or 0, CHUNK=chunk or 0, SPLIT=split,
        BLOCK_G=max(16, triton.next_power_of_2(group)), BLOCK_N=block_n, BLOCK_D=block_d,
        num_warps=4, num_stages=5, **FUSED_MATH,
    )  # fmt: skip
    if split:
        merge_splits(partial, lse, sinks, out)
    return out
