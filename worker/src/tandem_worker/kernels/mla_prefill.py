"""Prefill attention of multi-head latent attention, with keys and values expanded per head.

Long prompts are bound by arithmetic, and the expanded form needs 3.4 times fewer operations than the absorbed one: the
cached latents are gathered (`latent_gather`), multiplied by the up-projection with an ordinary matrix product, and
attended to here. The rotated part of the key is one row shared by all heads and is never copied per head.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .attention_checks import LOG2E, online_softmax
from .checks import FLOATS, INDEXES, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .prefill_attention import sequence_of_tile
from .reference.mla import latent_gather_reference, mla_prefill_attention_reference


@triton.jit(do_not_specialize=["num_sequences"])
def _mla_prefill_attention_kernel(
    q_ptr, kv_ptr, k_rope_ptr, query_start_ptr, kv_start_ptr, out_ptr, scale_log2, num_sequences, nope_dim, value_dim,
    stride_q_token, stride_q_head, stride_kv_token, stride_kv_head, stride_rope, stride_out_token, stride_out_head,
    ROPE: tl.constexpr, BLOCK_NOPE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = sequence_of_tile(query_start_ptr, tile, num_sequences, BLOCK_M)
    query_begin = tl.load(query_start_ptr + sequence).to(tl.int64)
    num_queries = (tl.load(query_start_ptr + sequence + 1).to(tl.int64) - query_begin).to(tl.int32)
    first_query = (tile - query_begin // BLOCK_M - sequence).to(tl.int32) * BLOCK_M
    if first_query >= num_queries:
        return
    kv_begin = tl.load(kv_start_ptr + sequence).to(tl.int64)
    context = (tl.load(kv_start_ptr + sequence + 1).to(tl.int64) - kv_begin).to(tl.int32)
    queries = first_query + tl.arange(0, BLOCK_M)
    positions = context - num_queries + queries
    valid = queries < num_queries
    nope = tl.arange(0, BLOCK_NOPE)
    rope = tl.arange(0, ROPE)
    values = tl.arange(0, BLOCK_V)
    q_ptrs = q_ptr + (query_begin + queries)[:, None] * stride_q_token + head * stride_q_head
    q_nope = tl.load(q_ptrs + nope[None, :], mask=valid[:, None] & (nope < nope_dim)[None, :], other=0.0)
    q_rope = tl.load(q_ptrs + nope_dim + rope[None, :], mask=valid[:, None], other=0.0)
    maximum = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    accumulated = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    end = tl.minimum(context - num_queries + first_query + BLOCK_M, context)
    for tile_start in range(0, end, BLOCK_N):
        keys = tile_start + tl.arange(0, BLOCK_N)
        inside = (keys < context)[:, None]
        row_ptrs = kv_ptr + (kv_begin + keys)[:, None] * stride_kv_token + head * stride_kv_head
        k_nope = tl.load(row_ptrs + nope[None, :], mask=inside & (nope < nope_dim)[None, :], other=0.0)
        k_rope = tl.load(k_rope_ptr + (kv_begin + keys)[:, None] * stride_rope + rope[None, :], mask=inside, other=0.0)
        scores = tl.dot(q_nope, tl.trans(k_nope), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(k_rope), scores, input_precision="ieee") * scale_log2
        scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        weights, decay, maximum, total = online_softmax(scores, maximum, total)
        v = tl.load(row_ptrs + nope_dim + values[None, :], mask=inside & (values < value_dim)[None, :], other=0.0)
        accumulated = accumulated * decay[:, None]
        accumulated = tl.dot(weights.to(v.dtype), v, accumulated, input_precision="ieee")
    y = accumulated / tl.where(total > 0.0, total, 1.0)[:, None]
    out_ptrs = out_ptr + (query_begin + queries)[:, None] * stride_out_token + head * stride_out_head + values[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (values < value_dim)[None, :])


@triton.jit(do_not_specialize=["num_sequences", "stride_table"])
def _latent_gather_kernel(
    cache_ptr, tables_ptr, kv_start_ptr, out_ptr, num_sequences, width, block_size,
    stride_block, stride_slot, stride_table, stride_out, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    low = 0
    high = num_sequences
    while low < high:  # the last sequence that starts at or before this token
        middle = (low + high) // 2
        if tl.load(kv_start_ptr + middle).to(tl.int32) <= token:
            low = middle + 1
        else:
            high = middle
    sequence = (low - 1).to(tl.int64)
    position = token - tl.load(kv_start_ptr + sequence).to(tl.int32)
    inside = token < tl.load(kv_start_ptr + num_sequences).to(tl.int32)  # rows past the last sequence become zeros
    block = tl.load(tables_ptr + sequence * stride_table + position // block_size, mask=inside, other=0).to(tl.int64)
    dims = tl.arange(0, BLOCK)
    source = cache_ptr + block * stride_block + (position % block_size) * stride_slot
    row = tl.load(source + dims, mask=dims < tl.where(inside, width, 0), other=0.0)
    tl.store(out_ptr + token.to(tl.int64) * stride_out + dims, row, mask=dims < width)


@with_twin(latent_gather_reference)
def latent_gather(
    latent_cache: torch.Tensor, block_tables: torch.Tensor, kv_start: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Copy every sequence's cached latents into one contiguous run, ready for the up-projection.

    latent_cache `[N, S, L]`, block_tables `[B, M]` int32, kv_start `[B + 1]` int32 or int64: sequence b's first
    kv_start[b+1] - kv_start[b] tokens go to rows kv_start[b] onward. -> `[num_tokens, L]`; rows past the last sequence
    are zeros. `num_tokens` is kv_start[B] or more, told by the host so that nothing waits for the device.
    """
    require_shape("latent_cache", latent_cache, (None, None, None))
    require_dtype("latent_cache", latent_cache, *FLOATS)
    require_rows("latent_cache", latent_cache)
    require_shape("block_tables", block_tables, (None, None))
    require_dtype("block_tables", block_tables, torch.int32)
    require_rows("block_tables", block_tables)
    require_shape("kv_start", kv_start, (block_tables.shape[0] + 1,))
    require_dtype("kv_start", kv_start, *INDEXES)
    require_same_device(latent_cache, block_tables=block_tables, kv_start=kv_start)
    width = latent_cache.shape[2]
    out = torch.empty((num_tokens, width), dtype=latent_cache.dtype, device=latent_cache.device)
    if num_tokens:
        _latent_gather_kernel[(num_tokens,)](
            latent_cache, block_tables, kv_start, out, block_tables.shape[0], width, latent_cache.shape[1],
            latent_cache.stride(0), latent_cache.stride(1), block_tables.stride(0), out.stride(0),
            BLOCK=triton.next_power_of_2(width), num_warps=4, **FUSED_MATH,
        )  # fmt: skip
    return out


@with_twin(mla_prefill_attention_reference)
def mla_prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_rope: torch.Tensor,
    query_start: torch.Tensor,
    kv_start: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the step's new tokens over expanded keys and values of their whole contexts.

    q `[T, H, Dn + R]`; kv `[C, H, Dn + Dv]` (key part, then value: the up-projection's own order); k_rope `[C, R]`, R a
    power of two from 16; query_start, kv_start `[B + 1]`: sequence b's queries are the last of its keys.
    -> `[T, H, Dv]`; rows past query_start[B] are not written. Raises `ValueError` for shapes and strides, `TypeError`
    for dtypes and devices. Method: FlashAttention-2 (Dao, 2023).
    """
    require_dtype("q", q, *FLOATS)
    for name, tensor, dims in (("q", q, 3), ("kv", kv, 3), ("k_rope", k_rope, 2)):
        require_shape(name, tensor, (None,) * dims)
        require_dtype(name, tensor, q.dtype)
        require_rows(name, tensor)
    require_shape("kv", kv, (k_rope.shape[0], q.shape[1], None))
    rope_dim = k_rope.shape[1]
    nope_dim = q.shape[2] - rope_dim
    value_dim = kv.shape[2] - nope_dim
    if rope_dim < 16 or rope_dim & (rope_dim - 1):
        raise ValueError(f"k_rope must have a power of two columns from 16, got {rope_dim}")
    if nope_dim <= 0 or value_dim <= 0:
        raise ValueError(
            f"q has {q.shape[2]} columns, k_rope {rope_dim} and kv {kv.shape[2]}: no room for key or value"
        )
    require_shape("kv_start", kv_start, tuple(query_start.shape))
    for name, starts in (("query_start", query_start), ("kv_start", kv_start)):
        require_dtype(name, starts, *INDEXES)
    require_same_device(q, kv=kv, k_rope=k_rope, query_start=query_start, kv_start=kv_start)
    num_tokens, num_heads = q.shape[:2]
    num_sequences = query_start.shape[0] - 1
    out = result_like("out", out, (num_tokens, num_heads, value_dim), q)
    if num_tokens == 0 or num_sequences == 0:
        return out
    small = q.element_size() > 2 or num_tokens <= 64 * num_sequences
    block_m = 64 if small else 128
    _mla_prefill_attention_kernel[(num_heads, num_tokens // block_m + num_sequences)](
        q, kv, k_rope, query_start, kv_start, out, scale * LOG2E, num_sequences, nope_dim, value_dim,
        q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), k_rope.stride(0), out.stride(0), out.stride(1),
        ROPE=rope_dim, BLOCK_NOPE=max(16, triton.next_power_of_2(nope_dim)),
        BLOCK_V=max(16, triton.next_power_of_2(value_dim)), BLOCK_M=block_m, BLOCK_N=32 if q.element_size() > 2 else 64,
        num_warps=4 if small else 8, num_stages=1 if q.element_size() > 2 else 3, **FUSED_MATH,
    )  # fmt: skip
    return out
