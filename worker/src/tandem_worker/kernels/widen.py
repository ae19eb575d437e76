"""A packed weight in full, for products that are large enough to belong to cuBLAS, and some of its rows.

Bound by memory: each packed word is read once and each value written once.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INDEXES, require_contiguous, require_dtype, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .quantized import SplitByteWeight, Weight
from .reference.linear import look_up_reference, widen_reference
from .split_tiles import escape_range, escape_values, pair_columns, pair_tile, read_table
from .weight_tiles import check_weight, scale_tile, weight_arguments, weight_tile

_BLOCK_N, _BLOCK_K = 16, 256
_ROW_K = 2048


@triton.jit
def _widen_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, num_rows, num_columns, stride_w, stride_scale, stride_out,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_start = tl.program_id(1) * BLOCK_K
    if FORMAT >= 4:
        _widen_pairs(
            w_ptr, scale_ptr, zero_ptr, out_ptr, rows, rows, num_rows, k_start, num_columns, stride_w, stride_out,
            FORMAT == 4, BLOCK_K,
        )  # fmt: skip
    else:
        scale, zero = scale_tile(
            scale_ptr, zero_ptr, rows, num_rows, k_start, num_columns, stride_scale,
            FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_K,
        )  # fmt: skip
        values = weight_tile(
            w_ptr, scale, zero, rows, num_rows, k_start, num_columns, stride_w,
            FORMAT, HAS_ZERO, BLOCK_N, BLOCK_K, out_ptr.dtype.element_ty,
        )  # fmt: skip
        columns = k_start + tl.arange(0, BLOCK_K)
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], values, mask=mask)


@triton.jit
def _widen_pairs(
    w_ptr, codes_ptr, beside_ptr, out_ptr, rows, places, num_rows, k_start, num_columns, stride_w, stride_out,
    ASSEMBLY: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of `rows`, to rows `places` of the result: escapes are written over what stood in their place."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    table_low, table_high, _ = read_table(beside_ptr, DTYPE)
    a, b = pair_tile(
        w_ptr,
        codes_ptr,
        table_low,
        table_high,
        rows,
        num_rows,
        k_start,
        num_columns,
        stride_w,
        ASSEMBLY,
        BLOCK_K,
        DTYPE,
    )
    columns = pair_columns(k_start, BLOCK_K)
    inside = rows < num_rows
    mask = inside[:, None] & (columns < num_columns)[None, :]
    out_ptrs = out_ptr + places[:, None] * stride_out
    tl.store(out_ptrs + columns[None, :], a, mask=mask)
    tl.store(out_ptrs + columns[None, :] + 32, b, mask=mask)
    tl.debug_barrier()  # other threads' tiles are written before their escapes
    begin, end = escape_range(beside_ptr, rows, num_rows)
    for at in range(begin, end, 64):
        row, column, value, live = escape_values(beside_ptr, at, end, DTYPE)
        live = live & (column >= k_start) & (column < k_start + BLOCK_K)
        mine = (row[None, :] == (rows & 255).to(tl.int32)[:, None]) & live[None, :] & inside[:, None]
        values = tl.broadcast_to(value[None, :], mine.shape)
        tl.store(out_ptrs + column[None, :], values, mask=mine)


@with_twin(widen_reference)
def widen(like: torch.Tensor, weight: Weight, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """The values of a weight `[N, K]` in any form of `quantized`, in the dtype of `like`.

    -> `[N, K]`; a plain weight is returned as it is. Raises `ValueError` for shapes and group sizes, `TypeError` for
    dtypes and devices.
    """
    require_dtype("like", like, *FLOATS)
    shape = check_weight("weight", weight, like.dtype, like.device, 2)
    if isinstance(weight, torch.Tensor):
        return weight if out is None else out.copy_(weight)
    out = result_like("out", out, shape, like)
    arguments = weight_arguments(weight)
    _, stride_w, _, stride_scale = arguments.strides
    _widen_kernel[(triton.cdiv(shape[0], _BLOCK_N), triton.cdiv(shape[1], _BLOCK_K))](
        *arguments.tensors, out, *shape, stride_w, stride_scale, out.stride(0), **arguments.constants,
        BLOCK_N=_BLOCK_N, BLOCK_K=_BLOCK_K, num_warps=4, **FUSED_MATH,
    )  # fmt: skip
    return out


@triton.jit
def _look_up_kernel(
    ids_ptr, w_ptr, codes_ptr, beside_ptr, out_ptr, num_rows, num_columns, stride_w, stride_out,
    FORMAT: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.load(ids_ptr + token).to(tl.int64) + tl.arange(0, 1)
    places = token + tl.arange(0, 1)
    _widen_pairs(
        w_ptr, codes_ptr, beside_ptr, out_ptr, rows, places, num_rows, tl.program_id(1) * BLOCK_K, num_columns,
        stride_w, stride_out, FORMAT == 4, BLOCK_K,
    )  # fmt: skip


@with_twin(look_up_reference)
def look_up(ids: torch.Tensor, weight: SplitByteWeight, dtype: torch.dtype) -> torch.Tensor:
    """Rows of an embedding table in 12 bits a weight: ids `[T]`, weight `[N, K]` -> `[T, K]` of dtype.

    Ids are trusted to be within [0, N). Raises `ValueError` for shapes, `TypeError` for dtypes and devices.
    """
    require_shape("ids", ids, (None,))
    require_dtype("ids", ids, *INDEXES)
    require_contiguous("ids", ids)
    shape = check_weight("weight", weight, dtype, ids.device, 2)
    out = torch.empty((ids.shape[0], shape[1]), dtype=dtype, device=ids.device)
    if ids.shape[0]:
        arguments = weight_arguments(weight)
        _look_up_kernel[(ids.shape[0], triton.cdiv(shape[1], _ROW_K))](
            ids, *arguments.tensors, out, *shape, arguments.strides[1], out.stride(0),
            FORMAT=arguments.constants["FORMAT"], BLOCK_K=_ROW_K, num_warps=4, **FUSED_MATH,
        )  # fmt: skip
    return out
