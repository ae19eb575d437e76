"""Products of few rows with large weights, where reading the weight once is all that counts.

Decode multiplies 1 to 64 rows with every weight of the model. Each weight tile goes from device memory to the tensor
cores once and is widened there, so four-bit weights take a quarter of the time of 16-bit ones. Where the output is too
narrow to occupy the device, K is split, by the weight's shape alone; the pieces are summed in a fixed order, so a row's
result varies neither between runs nor, up to 32 rows, with their number.
Large batches belong to cuBLAS.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activation import gated
from .checks import FLOATS, require_dtype, require_rows, require_same_device, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .quantized import Weight
from .reference.linear import gate_up_silu_reference, small_batch_linear_reference
from .split_merge import num_multiprocessors
from .weight_tiles import check_weight, product, weight_arguments

_MAX_SPLITS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _small_batch_linear_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, out_ptr, partial_ptr, num_rows, num_outputs, num_columns,
    columns_per_split, stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale, stride_residual,
    stride_out, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SPLIT: tl.constexpr,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k_begin = split * columns_per_split
    k_end = tl.minimum(k_begin + columns_per_split, num_columns)
    y = product(
        x_ptr, rows * stride_x, rows < num_rows, w_ptr, scale_ptr, zero_ptr, outputs, num_outputs, k_begin, k_end,
        num_columns, stride_w, stride_scale, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    mask = (rows < num_rows)[:, None] & (outputs < num_outputs)[None, :]
    if SPLIT:
        partial_ptrs = partial_ptr + (split * num_rows + rows)[:, None] * num_outputs + outputs[None, :]
        tl.store(partial_ptrs, y, mask=mask)
    else:
        if HAS_BIAS:
            y += tl.load(bias_ptr + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[None, :]
        if HAS_RESIDUAL:
            residual_ptrs = residual_ptr + rows[:, None] * stride_residual + outputs[None, :]
            y += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
        out_ptrs = out_ptr + rows[:, None] * stride_out + outputs[None, :]
        tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _sum_splits_kernel(
    partial_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, num_outputs, num_splits, stride_residual, stride_out,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(num_splits):
        total += tl.load(partial_ptr + (split * num_rows + row) * num_outputs + outputs, mask=mask, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + row * stride_residual + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + outputs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gate_up_silu_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, num_rows, width, num_columns,
    stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale, stride_out, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = rows < num_rows
    gate = product(
        x_ptr, rows * stride_x, valid, w_ptr, scale_ptr, zero_ptr, outputs, width, 0, num_columns,
        num_columns, stride_w, stride_scale, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    up = product(
        x_ptr, rows * stride_x, valid, w_ptr, scale_ptr, zero_ptr, outputs + width, 2 * width, 0, num_columns,
        num_columns, stride_w, stride_scale, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    inside = outputs < width
    if HAS_BIAS:
        gate += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + width + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    y = gated(gate, up, 0.0, 0.0, False)
    out_ptrs = out_ptr + rows[:, None] * stride_out + outputs[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])


def block_shape(num_rows: int, element_size: int) -> dict[str, int]:
    """Tile of a product of `num_rows` rows: wide along K for few rows, so that many weight bytes are in flight."""
    if element_size > 2:  # float32 serves tests
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if num_rows <= 32:
        block_m = 16 if num_rows <= 16 else 32
        return {"BLOCK_M": block_m, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}


def _check_inputs(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> int:
    """The number of output features."""
    require_dtype("x", x, *FLOATS)
    require_shape("x", x, (None, None))
    require_rows("x", x)
    num_outputs, num_columns = check_weight("weight", weight, x.dtype, x.device, 2)
    require_shape("x", x, (None, num_columns))
    if bias is not None:
        require_shape("bias", bias, (num_outputs,))
        require_rows("bias", bias)
        require_same_device(x, bias=bias)
    return num_outputs


@with_twin(small_batch_linear_reference)
def small_batch_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual + x @ weight.T + bias for few rows (up to about 64), weight in any form of `quantized`.

    x `[M, K]` bf16, fp16 or fp32; weight `[N, K]` of x's dtype or quantized; bias `[N]`; residual `[M, N]` of any float
    dtype (`out` may be it). -> `[M, N]` as x; a float32 `out` takes the sums of any x unrounded. K is split where N
    alone does not fill the device (`num_splits` overrides). Products accumulate in float32. Raises `ValueError` for
    shapes, strides and group sizes, `TypeError` for dtypes and devices.
    """
    num_outputs = _check_inputs(x, weight, bias)
    num_rows, num_columns = x.shape
    if residual is not None:
        require_shape("residual", residual, (num_rows, num_outputs))
        require_dtype("residual", residual, *FLOATS)
        require_rows("residual", residual)
        require_same_device(x, residual=residual)
    bias_or_x, residual_or_x = (x if tensor is None else tensor for tensor in (bias, residual))
    sums = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None}
    out = result_like("out", out, (num_rows, num_outputs), x, torch.float32)
    if num_rows == 0:
        return out
    tile = block_shape(num_rows, x.element_size())
    few = block_shape(1, x.element_size())  # the splits of one row are those of all
    k_tiles = triton.cdiv(num_columns, few["BLOCK_K"])
    if num_splits is None:
        programs = triton.cdiv(num_outputs, few["BLOCK_N"])
        num_splits = max(1, min(_MAX_SPLITS, k_tiles // 2, 2 * num_multiprocessors(x.device) // programs))
    columns_per_split = triton.cdiv(k_tiles, num_splits) * few["BLOCK_K"]
    num_splits = triton.cdiv(num_columns, columns_per_split)
    partial = out
    if num_splits > 1:
        partial = torch.empty((num_splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
    arguments = weight_arguments(weight)
    grid = (triton.cdiv(num_outputs, tile["BLOCK_N"]), num_splits, triton.cdiv(num_rows, tile["BLOCK_M"]))
    _small_batch_linear_kernel[grid](
        x, *arguments.tensors, bias_or_x, residual_or_x, out, partial, num_rows, num_outputs, num_columns,
        columns_per_split, x.stride(0), *arguments.strides, residual_or_x.stride(0), out.stride(0),
        SPLIT=num_splits > 1, **sums, **arguments.constants, **tile, **FUSED_MATH,
    )  # fmt: skip
    if num_splits > 1:
        _sum_splits_kernel[(num_rows, triton.cdiv(num_outputs, 1024))](
            partial, bias_or_x, residual_or_x, out, num_rows, num_outputs, num_splits, residual_or_x.stride(0),
            out.stride(0), **sums, BLOCK=1024, num_warps=4, **FUSED_MATH,
        )  # fmt: skip
    return out


@with_twin(gate_up_silu_reference)
def gate_up_silu(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) for few rows: the `[M, 2I]` projection never reaches device memory.

    x `[M, K]`; weight `[2I, K]` in any form of `quantized`, gate rows first; bias `[2I]`. -> `[M, I]`. Errors as in
    `small_batch_linear`.
    """
    twice = _check_inputs(x, weight, bias)
    if twice % 2:
        raise ValueError(f"weight must have an even number of rows (gate, then up), got {twice}")
    out = result_like("out", out, (x.shape[0], twice // 2), x)
    if x.shape[0] == 0:
        return out
    tile = block_shape(x.shape[0], x.element_size())
    arguments = weight_arguments(weight)
    _gate_up_silu_kernel[(triton.cdiv(twice // 2, tile["BLOCK_N"]), triton.cdiv(x.shape[0], tile["BLOCK_M"]))](
        x, *arguments.tensors, x if bias is None else bias, out, x.shape[0], twice // 2, x.shape[1],
        x.stride(0), *arguments.strides, out.stride(0), HAS_BIAS=bias is not None,
        **arguments.constants, **tile, **FUSED_MATH,
    )  # fmt: skip
    return out
