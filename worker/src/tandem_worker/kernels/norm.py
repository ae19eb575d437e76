"""RMSNorm, alone and fused with the residual addition before it.

Both are bound by memory: one read and one write per element. A program takes as many rows as fill its registers with
independent loads, so that short rows (per-head QK norm, D = 64..128) run at the same bandwidth as hidden-size rows.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.elementwise import residual_rms_norm_reference, rms_norm_reference

_ELEMENTS_PER_PROGRAM = 4096
_MAX_WIDTH = 65536  # a row must fit the registers of one program


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, num_rows, width, stride_x, stride_out, eps,
    HAS_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    y = x * inverse[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _residual_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, num_rows, width, stride_x, stride_residual, stride_out, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride_x + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    residual_ptrs = residual_ptr + rows[:, None] * stride_residual + columns[None, :]
    # The norm sees the sum as it is stored: the next layer starts from the rounded value too.
    rounded = (x + tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(residual_ptrs, rounded, mask=mask)
    total = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(total * total, axis=1) / width + eps)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = total * inverse[:, None] * weight[None, :]
    tl.store(out_ptr + rows[:, None] * stride_out + columns[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


def _tile(width: int) -> dict[str, int]:
    if not 0 < width <= _MAX_WIDTH:
        raise ValueError(f"the normalized axis must have 1 to {_MAX_WIDTH} elements, got {width}")
    block = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS_PER_PROGRAM // block // 2)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(4, rows * block // 1024))}


def _as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`[..., H]` as `[T, H]` without a copy."""
    require_rows(name, tensor)
    try:
        return tensor.view(-1, tensor.shape[-1])
    except RuntimeError as error:
        raise ValueError(f"{name} must be viewable as rows, got strides {tensor.stride()}") from error


@with_twin(rms_norm_reference)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich, 2019).

    x `[..., H]` bf16, fp16 or fp32, rows at any stride; weight `[H]` of any float dtype, or None for no scale; out as
    x. Arithmetic in float32, rounded once. Raises `ValueError` for shapes and strides, `TypeError` for dtypes.
    """
    require_dtype("x", x, *FLOATS)
    require_same_device(x, weight=weight)
    if weight is not None:
        require_shape("weight", weight, (x.shape[-1],))
        require_rows("weight", weight)
    out = result_like("out", out, tuple(x.shape), x)
    rows, out_rows = _as_rows("x", x), _as_rows("out", out)
    if rows.shape[0] == 0:
        return out
    tile = _tile(x.shape[-1])
    _rms_norm_kernel[(triton.cdiv(rows.shape[0], tile["ROWS"]),)](
        rows, weight, out_rows, rows.shape[0], rows.shape[1], rows.stride(0), out_rows.stride(0), eps,
        HAS_WEIGHT=weight is not None, **tile, **FUSED_MATH,
    )  # fmt: skip
    return out


@with_twin(residual_rms_norm_reference)
def residual_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """residual += x in place, then RMSNorm of the sum: two reads and two writes instead of three and three.

    x, residual `[T, H]`, weight `[H]`; out `[T, H]` as x (it may be x itself). The norm is taken of the sum as rounded
    to residual's dtype. Raises `ValueError` for shapes and strides, `TypeError` for dtypes.
    """
    require_dtype("x", x, *FLOATS)
    require_dtype("residual", residual, *FLOATS)
    require_shape("x", x, (None, None))
    require_shape("residual", residual, tuple(x.shape))
    require_shape("weight", weight, (x.shape[1],))
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        require_rows(name, tensor)
    require_same_device(x, residual=residual, weight=weight)
    out = result_like("out", out, tuple(x.shape), x)
    if x.shape[0] == 0:
        return out
    tile = _tile(x.shape[1])
    _residual_rms_norm_kernel[(triton.cdiv(x.shape[0], tile["ROWS"]),)](
        x, residual, weight, out, x.shape[0], x.shape[1], x.stride(0), residual.stride(0), out.stride(0), eps,
        **tile, **FUSED_MATH,
    )  # fmt: skip
    return out
