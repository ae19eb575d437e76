"""A quantized weight in full, for products that are large enough to belong to cuBLAS.

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

from .checks import FLOATS, require_dtype, result_like
from .dispatch import FUSED_MATH, with_twin
from .quantized import Weight
from .reference.linear import widen_reference
from .weight_tiles import check_weight, scale_tile, weight_arguments, weight_tile

_BLOCK_N, _BLOCK_K = 16, 256


@triton.jit
def _widen_kernel(
    w_ptr, scale_ptr, zero_ptr, out_ptr, num_rows, num_columns, stride_w, stride_scale, stride_out,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    k_start = tl.program_id(1) * BLOCK_K
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
