"""Prefill attention over paged KV: sequences of any length side by side, chunked prefill and decode rows included.

Bound by arithmetic for long prompts. Rows of a tile are (token, head of the group) pairs, so the heads that share keys
share their loads, and a tile spans few tokens, which wastes less above the diagonal. Tiles that lie wholly below the
diagonal run without a mask. The grid follows from shapes only; each program finds its sequence by binary search, so
neither lengths nor a tile list travel from the host.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_checks import LOG2E, check_paged_inputs, first_visible, online_softmax
from .checks import INDEXES, require_dtype, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.attention import paged_prefill_attention_reference


@triton.jit
def sequence_of_tile(query_start_ptr, tile, num_sequences, TOKENS: tl.constexpr):
    """Last sequence whose first tile is not beyond `tile`.

    Sequence b starts at tile query_start[b] // TOKENS + b: room for all its tiles, at most one more per sequence than
    needed, and no prefix sum to compute.
    """
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle).to(tl.int32) // TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend(
    accumulated, maximum, total, q, positions, head_ptr, table_ptr, start, end, context,
    scale_log2, head_dim, block_size, stride_block, stride_kv, stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Fold the keys [start, end) into the running softmax; start is a multiple of BLOCK_N."""
    dims = tl.arange(0, BLOCK_D)
    for tile_start in range(start, end, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        inside = keys < context
        block = tl.load(table_ptr + keys // block_size, mask=inside, other=0).to(tl.int64)
        offsets = block * stride_block + (keys % block_size) * stride_slot
        kv_ptrs = head_ptr + offsets[:, None] + dims[None, :]
        kv_mask = inside[:, None] & (dims < head_dim)[None, :]
        k = tl.load(kv_ptrs, mask=kv_mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            seen &= keys[None, :] >= first_visible(positions, WINDOW, CHUNK)[:, None]
            scores = tl.where(seen, scores, float("-inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        v = tl.load(kv_ptrs + stride_kv, mask=kv_mask, other=0.0)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
    return accumulated, maximum, total


@triton.jit(
    do_not_specialize=["num_sequences", "stride_table"],
    do_not_specialize_on_alignment=["tables_ptr", "lens_ptr"],  # they begin behind the decodes of a step
)
def _paged_prefill_attention_kernel(
    q_ptr, cache_ptr, tables_ptr, query_start_ptr, lens_ptr, sinks_ptr, out_ptr,
    scale_log2, num_sequences, head_dim, block_size,
    stride_q_token, stride_q_head, stride_block, stride_kv, stride_kv_head, stride_slot, stride_table,
    stride_out_token, stride_out_head,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    # Late tiles of a causal prompt have the most keys: they start first, so that the short ones fill the tail.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = sequence_of_tile(query_start_ptr, tile, num_sequences, TOKENS)
    query_begin = tl.load(query_start_ptr + sequence).to(tl.int32)
    num_queries = tl.load(query_start_ptr + sequence + 1).to(tl.int32) - query_begin
    first_query = (tile - query_begin // TOKENS - sequence) * TOKENS
    if first_query >= num_queries:
        return
    context = tl.load(lens_ptr + sequence).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    queries = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    valid = ((rows < TOKENS * GROUP) & (queries < num_queries))[:, None] & (dims < head_dim)[None, :]
    cached = context - num_queries
    positions = cached + queries
    first_position = cached + first_query
    end = tl.minimum(first_position + TOKENS, context)
    start = first_visible(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N

    tokens = (query_begin + queries).to(tl.int64)
    q_ptrs = q_ptr + tokens[:, None] * stride_q_token + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptrs, mask=valid, other=0.0)
    head_ptr = cache_ptr + kv_head.to(tl.int64) * stride_kv_head
    table_ptr = tables_ptr + sequence.to(tl.int64) * stride_table
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulated = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if WINDOW == 0 and CHUNK == 0:
        unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
        accumulated, maximum, total = _attend(
            accumulated, maximum, total, q, positions, head_ptr, table_ptr, start, unmasked_end, context,
            scale_log2, head_dim, block_size, stride_block, stride_kv, stride_slot,
            False, WINDOW, CHUNK, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        start = unmasked_end
    accumulated, maximum, total = _attend(
        accumulated, maximum, total, q, positions, head_ptr, table_ptr, start, end, context,
        scale_log2, head_dim, block_size, stride_block, stride_kv, stride_slot,
        True, WINDOW, CHUNK, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads).to(tl.float32) * 1.4426950408889634
        with_sink = tl.maximum(maximum, sink)
        decay = tl.exp2(maximum - with_sink)
        accumulated = accumulated * decay[:, None]
        total = total * decay + tl.exp2(sink - with_sink)
    y = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
    out_ptrs = out_ptr + tokens[:, None] * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid)


def _tile_shape(num_tokens: int, num_sequences: int, group: int, block_d: int, element_size: int) -> dict[str, int]:
    """Tile of rows and keys. Short steps (mostly decode rows) take small tiles, long prompts tiles that feed wgmma."""
    wide = element_size > 2 or block_d > 128
    largest = 64 if wide else 128
    needed = max(16, triton.next_power_of_2(triton.cdiv(num_tokens, num_sequences) * group))
    block_m = max(min(largest, needed), triton.next_power_of_2(group))
    block_n = max(16, min(64 if wide else 128, 8192 // (block_d * element_size // 2)))
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": 8 if block_m >= 128 else 4, "num_stages": 5}


@with_twin(paged_prefill_attention_reference)
def paged_prefill_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the step's new tokens over their paged contexts; the new keys must already be written.

    q `[T, Hq, D]`; query_start `[B + 1]` and context_lens `[B]` int32 or int64 as in `ForwardBatch` (sequence b has
    query_start[b+1] - query_start[b] new tokens, the last of its context_lens[b]); the rest as in
    `paged_decode_attention`. -> `[T, Hq, D]`; rows past query_start[B] (padding) are not written.
    Raises `ValueError` for shapes, strides and ranges, `TypeError` for dtypes and devices.
    Method: FlashAttention-2 (Dao, 2023).
    """
    group = check_paged_inputs(q, kv_cache, block_tables, context_lens, sinks, window, chunk)
    num_sequences = block_tables.shape[0]
    require_shape("query_start", query_start, (num_sequences + 1,))
    require_dtype("query_start", query_start, *INDEXES)
    require_same_device(q, query_start=query_start)
    out = result_like("out", out, tuple(q.shape), q)
    num_tokens, num_q_heads, head_dim = q.shape
    if num_tokens == 0 or num_sequences == 0:
        return out
    block_d = max(16, triton.next_power_of_2(head_dim))
    tile = _tile_shape(num_tokens, num_sequences, group, block_d, q.element_size())
    tokens_per_tile = tile["BLOCK_M"] // group
    grid = (num_q_heads // group, num_tokens // tokens_per_tile + num_sequences)
    _paged_prefill_attention_kernel[grid](
        q, kv_cache, block_tables, query_start, context_lens, q if sinks is None else sinks, out,
        scale * LOG2E, num_sequences, head_dim, kv_cache.shape[3],
        q.stride(0), q.stride(1), *kv_cache.stride()[:4], block_tables.stride(0), out.stride(0), out.stride(1),
        GROUP=group, TOKENS=tokens_per_tile, WINDOW=window or 0, CHUNK=chunk or 0, HAS_SINKS=sinks is not None,
        BLOCK_D=block_d, **tile, **FUSED_MATH,
    )  # fmt: skip
    return out
