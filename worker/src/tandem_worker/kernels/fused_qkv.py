"""Everything between the QKV projection and attention in one pass: QK norm, rotary embedding, KV write.

Bound by memory: each projected element is read once from device memory and written once, where separate kernels would
move queries and keys two or three times. At decode's batch sizes what counts is one launch instead of four.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INDEXES, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .kv import check_kv_cache, check_slots
from .reference.elementwise import fused_qkv_norm_rope_kv_write_reference
from .rotary import check_rope_tables


@triton.jit
def _fused_qkv_kernel(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, q_norm_ptr, k_norm_ptr, cache_ptr, slots_ptr, out_ptr,
    num_q_heads, num_kv_heads, head_dim, half, block_size, eps,
    stride_qkv, stride_table, stride_block, stride_kv, stride_kv_head, stride_slot, stride_out_token, stride_out_head,
    HAS_NORM: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_D)
    is_q = heads < num_q_heads
    is_k = (heads >= num_q_heads) & (heads < num_q_heads + num_kv_heads)
    is_v = (heads >= num_q_heads + num_kv_heads) & (heads < num_q_heads + 2 * num_kv_heads)
    inside = dims < head_dim
    rotated = dims < 2 * half
    if INTERLEAVED:
        pair = dims // 2
        partner = dims + 1 - 2 * (dims % 2)
        is_first = dims % 2 == 0
    else:
        is_first = dims < half
        pair = tl.where(is_first, dims, dims - half)
        partner = tl.where(is_first, dims + half, dims - half)
    mask = (is_q | is_k | is_v)[:, None] & inside[None, :]
    turned = (is_q | is_k)[:, None] & rotated[None, :]
    row_ptrs = qkv_ptr + token * stride_qkv + heads[:, None] * head_dim
    x = tl.load(row_ptrs + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    # The partner of each element is read again instead of shuffled between threads: the line is in the L1 cache.
    y = tl.load(row_ptrs + partner[None, :], mask=turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / head_dim + eps)
        inverse = tl.where(is_v, 1.0, inverse)[:, None]
        q_scale = tl.load(q_norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_scale = tl.load(k_norm_ptr + dims, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_partner = tl.load(q_norm_ptr + partner, mask=rotated, other=0.0).to(tl.float32)[None, :]
        k_partner = tl.load(k_norm_ptr + partner, mask=rotated, other=0.0).to(tl.float32)[None, :]
        x *= inverse * tl.where(is_q[:, None], q_scale, tl.where(is_k[:, None], k_scale, 1.0))
        y *= inverse * tl.where(is_q[:, None], q_partner, k_partner)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * stride_table + pair, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + position * stride_table + pair, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.where(is_first, -sin, sin)
    x = tl.where(turned, x * cos[None, :] + y * sin[None, :], x)

    out_ptrs = out_ptr + token * stride_out_token + heads[:, None] * stride_out_head + dims[None, :]
    tl.store(out_ptrs, x.to(out_ptr.dtype.element_ty), mask=is_q[:, None] & inside[None, :])
    slot = tl.load(slots_ptr + token).to(tl.int64)
    kv_heads = tl.where(is_v, heads - num_q_heads - num_kv_heads, heads - num_q_heads).to(tl.int64)
    target = cache_ptr + (slot // block_size) * stride_block + (slot % block_size) * stride_slot
    target_ptrs = target + (tl.where(is_v, stride_kv, 0) + kv_heads * stride_kv_head)[:, None] + dims[None, :]
    # A block compared with a scalar, not "and"-ed with one: the interpreter refuses masks made from a scalar condition.
    stored = (is_k | is_v) & (heads < tl.where(slot >= 0, num_q_heads + 2 * num_kv_heads, 0))
    tl.store(target_ptrs, x.to(cache_ptr.dtype.element_ty), mask=stored[:, None] & inside[None, :])


@with_twin(fused_qkv_norm_rope_kv_write_reference)
def fused_qkv_norm_rope_kv_write(
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
    """Norm and rotate queries and keys, write keys and values to their slots, return the queries.

    qkv `[T, (Hq + 2 Hk) D]`, heads of q, then k, then v; cos, sin `[P, R/2]`, positions `[T]` and `interleaved` as in
    `rope`; kv_cache `[N, 2, Hk, S, D]` and slot_mapping `[T]` as in `kv_write`; q_norm, k_norm `[D]`, both or neither,
    are RMSNorm weights over each head (Qwen3), applied before the rotation. -> q `[T, Hq, D]`, contiguous.
    Arithmetic in float32, rounded once. Raises `ValueError` for shapes and strides, `TypeError` for dtypes.
    """
    num_tokens = qkv.shape[0]
    check_kv_cache(kv_cache, None, None)
    num_kv_heads, block_size, head_dim = kv_cache.shape[2], kv_cache.shape[3], kv_cache.shape[4]
    require_dtype("qkv", qkv, *FLOATS)
    require_shape("qkv", qkv, (None, None))
    require_rows("qkv", qkv)
    num_q_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if qkv.shape[1] % head_dim or num_q_heads <= 0:
        raise ValueError(f"qkv has {qkv.shape[1]} columns, not (Hq + 2 * {num_kv_heads}) * {head_dim} for any Hq")
    require_shape("positions", positions, (num_tokens,))
    require_dtype("positions", positions, *INDEXES)
    check_slots(slot_mapping, num_tokens)
    half = check_rope_tables(cos, sin, head_dim)
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm must be given both or not at all")
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            require_shape(name, weight, (head_dim,))
            require_rows(name, weight)
    require_same_device(
        qkv, cos=cos, sin=sin, positions=positions, kv_cache=kv_cache, slots=slot_mapping, q_norm=q_norm, k_norm=k_norm
    )
    out = result_like("out", out, (num_tokens, num_q_heads, head_dim), qkv)
    if num_tokens == 0:
        return out
    block_d = triton.next_power_of_2(head_dim)
    num_heads = num_q_heads + 2 * num_kv_heads
    block_heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d))
    _fused_qkv_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        qkv, cos, sin, positions, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
        kv_cache, slot_mapping, out, num_q_heads, num_kv_heads, head_dim, half, block_size, eps,
        qkv.stride(0), cos.stride(0), *kv_cache.stride()[:4], out.stride(0), out.stride(1),
        HAS_NORM=q_norm is not None, INTERLEAVED=interleaved, BLOCK_HEADS=block_heads, BLOCK_D=block_d,
        num_warps=4, **FUSED_MATH,
    )  # fmt: skip
    return out
