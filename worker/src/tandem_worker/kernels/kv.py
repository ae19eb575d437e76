"""Scatter of new keys and values (or MLA latents) into the block space."""

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
from .reference.elementwise import kv_write_reference, latent_write_reference


@triton.jit
def _kv_write_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr, num_heads, head_dim, block_size,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_block, stride_kv, stride_head, stride_slot,
    BLOCK_HEADS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dims = tl.arange(0, BLOCK_D)
    mask = (heads < num_heads)[:, None] & (dims < head_dim)[None, :]
    target = cache_ptr + (slot // block_size) * stride_block + (slot % block_size) * stride_slot
    target_ptrs = target + heads[:, None].to(tl.int64) * stride_head + dims[None, :]
    k = tl.load(k_ptr + token * stride_k_token + heads[:, None] * stride_k_head + dims[None, :], mask=mask)
    v = tl.load(v_ptr + token * stride_v_token + heads[:, None] * stride_v_head + dims[None, :], mask=mask)
    tl.store(target_ptrs, k.to(cache_ptr.dtype.element_ty), mask=mask)
    tl.store(target_ptrs + stride_kv, v.to(cache_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _latent_write_kernel(
    latent_ptr, cache_ptr, slots_ptr, width, block_size, stride_latent, stride_block, stride_slot, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    dims = tl.arange(0, BLOCK)
    row = tl.load(latent_ptr + token * stride_latent + dims, mask=dims < width)
    target = cache_ptr + (slot // block_size) * stride_block + (slot % block_size) * stride_slot
    tl.store(target + dims, row.to(cache_ptr.dtype.element_ty), mask=dims < width)


def check_kv_cache(kv_cache: torch.Tensor, num_kv_heads: int | None, head_dim: int | None) -> None:
    """Refuse a block space that is not `[N, 2, Hk, S, D]` with contiguous heads."""
    require_shape("kv_cache", kv_cache, (None, 2, num_kv_heads, None, head_dim))
    require_dtype("kv_cache", kv_cache, *FLOATS)
    require_rows("kv_cache", kv_cache)


def check_slots(slot_mapping: torch.Tensor, num_tokens: int) -> None:
    """Refuse anything but one slot per token, `[T]`, of an index type."""
    require_shape("slot_mapping", slot_mapping, (num_tokens,))
    require_dtype("slot_mapping", slot_mapping, *INDEXES)


@with_twin(kv_write_reference)
def kv_write(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's key and value into its slot; tokens with a negative slot are dropped.

    k, v `[T, Hk, D]`, any token and head stride; kv_cache `[N, 2, Hk, S, D]` (block, keys then values, head, offset,
    dimension), any strides as long as D is contiguous, so another memory order is a `permute` of the caller's;
    slot_mapping `[T]` int32 or int64, block * S + offset. Slots of one call must differ (block 0 excepted: what lands
    there is never read). Raises `ValueError` for shapes and strides, `TypeError` for dtypes.
    """
    require_dtype("k", k, *FLOATS)
    require_shape("k", k, (None, None, None))
    require_shape("v", v, tuple(k.shape))
    require_dtype("v", v, k.dtype)
    require_rows("k", k)
    require_rows("v", v)
    num_tokens, num_heads, head_dim = k.shape
    check_kv_cache(kv_cache, num_heads, head_dim)
    check_slots(slot_mapping, num_tokens)
    require_same_device(k, v=v, kv_cache=kv_cache, slot_mapping=slot_mapping)
    if num_tokens == 0:
        return
    block_d = triton.next_power_of_2(head_dim)
    block_heads = min(triton.next_power_of_2(num_heads), max(1, 2048 // block_d))
    _kv_write_kernel[(num_tokens, triton.cdiv(num_heads, block_heads))](
        k, v, kv_cache, slot_mapping, num_heads, head_dim, kv_cache.shape[3],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), kv_cache.stride(3),
        BLOCK_HEADS=block_heads, BLOCK_D=block_d, num_warps=4, **FUSED_MATH,
    )  # fmt: skip


@with_twin(latent_write_reference)
def latent_write(latent: torch.Tensor, latent_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write each token's MLA latent (compressed KV, then rotated key part) into its slot.

    latent `[T, L]`, latent_cache `[N, S, L]` with contiguous L, slot_mapping `[T]` as in `kv_write`.
    """
    require_dtype("latent", latent, *FLOATS)
    require_shape("latent", latent, (None, None))
    require_rows("latent", latent)
    require_shape("latent_cache", latent_cache, (None, None, latent.shape[1]))
    require_dtype("latent_cache", latent_cache, *FLOATS)
    require_rows("latent_cache", latent_cache)
    check_slots(slot_mapping, latent.shape[0])
    require_same_device(latent, latent_cache=latent_cache, slot_mapping=slot_mapping)
    if latent.shape[0] == 0:
        return
    _latent_write_kernel[(latent.shape[0],)](
        latent, latent_cache, slot_mapping, latent.shape[1], latent_cache.shape[1],
        latent.stride(0), latent_cache.stride(0), latent_cache.stride(1),
        BLOCK=triton.next_power_of_2(latent.shape[1]), num_warps=4, **FUSED_MATH,
    )  # fmt: skip
