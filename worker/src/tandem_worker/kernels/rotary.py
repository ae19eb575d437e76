"""Rotary position embedding, in place on views of the fused QKV projection."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INDEXES, require_dtype, require_rows, require_same_device, require_shape
from .dispatch import FUSED_MATH, with_twin
from .reference.elementwise import rope_reference


@triton.jit
def _rotate_heads(
    base_ptr, stride_head, num_heads, cos, sin, half,
    INTERLEAVED: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK_HALF)
    for start in range(0, num_heads, BLOCK_HEADS):
        heads = start + tl.arange(0, BLOCK_HEADS)
        mask = (heads < num_heads)[:, None] & (pair < half)[None, :]
        row_ptrs = base_ptr + heads[:, None] * stride_head
        first_ptrs = row_ptrs + (2 * pair if INTERLEAVED else pair)[None, :]
        second_ptrs = row_ptrs + (2 * pair + 1 if INTERLEAVED else pair + half)[None, :]
        x = tl.load(first_ptrs, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(second_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(first_ptrs, (x * cos - y * sin).to(base_ptr.dtype.element_ty), mask=mask)
        tl.store(second_ptrs, (y * cos + x * sin).to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, num_q_heads, num_k_heads, half,
    stride_q_token, stride_q_head, stride_k_token, stride_k_head, stride_table,
    INTERLEAVED: tl.constexpr, HAS_K: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    pair = tl.arange(0, BLOCK_HALF)
    cos = tl.load(cos_ptr + position * stride_table + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * stride_table + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    _rotate_heads(
        q_ptr + token * stride_q_token, stride_q_head, num_q_heads, cos, sin, half, INTERLEAVED, BLOCK_HEADS, BLOCK_HALF
    )
    if HAS_K:
        _rotate_heads(
            k_ptr + token * stride_k_token, stride_k_head, num_k_heads, cos, sin, half,
            INTERLEAVED, BLOCK_HEADS, BLOCK_HALF,
        )  # fmt: skip


def check_rope_tables(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> int:
    """Half the rotated width, after refusing tables that do not fit a head of `head_dim`."""
    require_shape("cos", cos, (None, None))
    require_shape("sin", sin, tuple(cos.shape))
    require_dtype("cos", cos, *FLOATS)
    require_dtype("sin", sin, cos.dtype)
    require_rows("cos", cos)
    require_rows("sin", sin)
    half = cos.shape[1]
    if not 0 < 2 * half <= head_dim:
        raise ValueError(f"cos has {half} columns and rotates {2 * half} dimensions, but heads have {head_dim}")
    if cos.stride(0) != sin.stride(0):
        raise ValueError(f"cos and sin must have the same row stride, got {cos.stride(0)} and {sin.stride(0)}")
    return half


@with_twin(rope_reference)
def rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotate the first R dimensions of every head by its token's position, in place (Su et al., RoFormer, 2021).

    q `[T, Hq, D]`, k `[T, Hk, D]` or None, any token and head stride (views of a fused projection work); cos, sin
    `[P, R/2]` with attention scaling already multiplied in; positions `[T]` int32 or int64 below P. Dimension i pairs
    with i + R/2, or with `interleaved` dimension 2i with 2i + 1.
    Raises `ValueError` for shapes, `TypeError` for dtypes.
    """
    require_dtype("q", q, *FLOATS)
    require_shape("q", q, (None, None, None))
    require_rows("q", q)
    require_shape("positions", positions, (q.shape[0],))
    require_dtype("positions", positions, *INDEXES)
    if k is not None:
        require_shape("k", k, (q.shape[0], None, q.shape[2]))
        require_dtype("k", k, q.dtype)
        require_rows("k", k)
    require_same_device(q, k=k, cos=cos, sin=sin, positions=positions)
    half = check_rope_tables(cos, sin, q.shape[2])
    if q.shape[0] == 0:
        return
    keys = q if k is None else k
    most_heads = max(q.shape[1], keys.shape[1])
    block_half = triton.next_power_of_2(half)
    block_heads = min(triton.next_power_of_2(most_heads), max(1, 2048 // block_half))
    _rope_kernel[(q.shape[0],)](
        q, keys, cos, sin, positions, q.shape[1], keys.shape[1], half,
        q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), cos.stride(0),
        INTERLEAVED=interleaved, HAS_K=k is not None, BLOCK_HEADS=block_heads, BLOCK_HALF=block_half,
        num_warps=4, **FUSED_MATH,
    )  # fmt: skip
