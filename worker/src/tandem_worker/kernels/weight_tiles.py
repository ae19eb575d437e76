"""One tile of a weight, whatever its form, on its way from device memory into the tensor cores."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .checks import FLOATS, require_contiguous, require_dtype, require_same_device, require_shape
from .dispatch import interpreting
from .quantized import Fp8Weight, Int4Weight, Mxfp4Weight, SplitByteWeight, Weight
from .split_byte import HEAD, UNIT, num_blocks
from .split_tiles import pair_product

PLAIN, FP8, INT4, MXFP4, SPLIT_BYTE, SPLIT_BYTE_PLAIN = range(6)
"""The last is decoded without assembly, for the interpreter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightArguments:
    """A weight as kernels take it: pointers and strides, then the constants that select the form."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """data, scale, zero; data stands in where the form has none. Of 12 bits: low, codes, beside."""
    strides: tuple[int, int, int, int]
    """Strides of data (expert, row), then of scale and zero (expert, row)."""
    constants: dict[str, int | bool]


def check_weight(name: str, weight: Weight, dtype: torch.dtype, device: torch.device, rank: int) -> tuple[int, ...]:
    """The weight's shape, after refusing what the kernels would misread."""
    shape = weight.shape
    if len(shape) != rank:
        raise ValueError(f"{name} must have {rank} axes, got {list(shape)}")
    parts: dict[str, torch.Tensor] = {}
    rows, columns = shape[-2:]
    if isinstance(weight, torch.Tensor):
        require_dtype(name, weight, dtype)
        parts["data"] = weight
    elif isinstance(weight, Fp8Weight):
        require_dtype(f"{name}.data", weight.data, torch.float8_e4m3fn)
        require_dtype(f"{name}.scale", weight.scale, torch.float32)
        tiles = (triton.cdiv(rows, weight.tile), triton.cdiv(columns, weight.tile))
        require_shape(f"{name}.scale", weight.scale, (*shape[:-2], *tiles))
        _require_group(name, weight.tile)
        parts |= {"data": weight.data, "scale": weight.scale}
    elif isinstance(weight, Int4Weight):
        require_dtype(f"{name}.packed", weight.packed, torch.int32)
        require_dtype(f"{name}.scale", weight.scale, *FLOATS)
        require_shape(f"{name}.scale", weight.scale, (*shape[:-1], None))
        _require_group(name, weight.group)
        if columns % weight.group:
            raise ValueError(f"{name} has {columns} columns, not a multiple of its group of {weight.group}")
        parts |= {"packed": weight.packed, "scale": weight.scale}
        if weight.zero is not None:
            require_dtype(f"{name}.zero", weight.zero, torch.uint8)
            require_shape(f"{name}.zero", weight.zero, tuple(weight.scale.shape))
            parts["zero"] = weight.zero
    elif isinstance(weight, SplitByteWeight):
        parts |= _check_split_byte(name, weight, dtype)
    else:
        require_dtype(f"{name}.packed", weight.packed, torch.uint8)
        require_dtype(f"{name}.scale", weight.scale, torch.uint8)
        require_shape(f"{name}.scale", weight.scale, (*shape[:-1], columns // 32))
        parts |= {"packed": weight.packed, "scale": weight.scale}
    for part, tensor in parts.items():
        require_contiguous(f"{name}.{part}", tensor)
        if tensor.device != device:
            require_same_device(torch.empty(0, device=device), **{f"{name}.{part}": tensor})
    return tuple(shape)


def _check_split_byte(name: str, weight: SplitByteWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if dtype == torch.float16:
        raise TypeError(f"{name} is bfloat16, whose values float16 does not hold: multiply it with another type")
    require_dtype(f"{name}.low", weight.low, torch.int16)
    require_dtype(f"{name}.codes", weight.codes, torch.uint8)
    require_dtype(f"{name}.beside", weight.beside, torch.int32)
    require_shape(f"{name}.codes", weight.codes, tuple(weight.low.shape))
    *lead, rows, columns = weight.shape
    least = (lead[0] if lead else 1) * (num_blocks(rows) + HEAD)
    if columns % UNIT or weight.beside.dim() != 1 or weight.beside.numel() < least:
        raise ValueError(
            f"{name} must have columns in units of {UNIT} and {least} words beside, got {list(weight.shape)}"
        )
    return {"low": weight.low, "codes": weight.codes, "beside": weight.beside}


def _require_group(name: str, group: int) -> None:
    if group < 16 or group & (group - 1):
        raise ValueError(f"{name} must be quantized in groups of a power of two from 16, got {group}")


def weight_arguments(weight: Weight) -> WeightArguments:
    """Launch arguments of a checked weight."""
    if isinstance(weight, torch.Tensor):
        data, scale, zero = weight, weight, weight
        constants = {"FORMAT": PLAIN, "GROUP_N": 1, "GROUP_K": 1, "HAS_ZERO": False}
    elif isinstance(weight, Fp8Weight):
        data, scale, zero = weight.data, weight.scale, weight.scale
        constants = {"FORMAT": FP8, "GROUP_N": weight.tile, "GROUP_K": weight.tile, "HAS_ZERO": False}
    elif isinstance(weight, Int4Weight):
        data, scale = weight.packed, weight.scale
        zero = weight.scale if weight.zero is None else weight.zero
        constants = {"FORMAT": INT4, "GROUP_N": 1, "GROUP_K": weight.group, "HAS_ZERO": weight.zero is not None}
    elif isinstance(weight, SplitByteWeight):
        data, scale, zero = weight.low, weight.codes, weight.beside
        form = SPLIT_BYTE_PLAIN if interpreting() else SPLIT_BYTE
        constants = {"FORMAT": form, "GROUP_N": 1, "GROUP_K": 1, "HAS_ZERO": False}
    else:
        assert isinstance(weight, Mxfp4Weight)
        data, scale, zero = weight.packed, weight.scale, weight.scale
        constants = {"FORMAT": MXFP4, "GROUP_N": 1, "GROUP_K": 32, "HAS_ZERO": False}
    strides = (*_expert_and_row(data), *_expert_and_row(scale))
    return WeightArguments(tensors=(data, scale, zero), strides=strides, constants=constants)


def _expert_and_row(tensor: torch.Tensor) -> tuple[int, int]:
    return (tensor.stride(0) if tensor.dim() == 3 else 0), tensor.stride(-2)


@triton.jit
def widen_e2m1(codes):
    """Four-bit floats (int32 codes) as float32, by placing exponent and mantissa bits."""
    magnitude = codes & 7
    bits = ((magnitude >> 1) + 126) << 23 | (magnitude & 1) << 22
    value = bits.to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, value)  # zero and the subnormal 0.5
    return tl.where(codes >= 8, -value, value)


@triton.jit
def scale_tile(
    scale_ptr, zero_ptr, rows, num_rows, k_start, num_columns, stride_scale_row,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scales and zero points of one tile as stored, `[BLOCK_N, steps]`; zeros where the form has none, and outside.

    A wide group's scale is there several times: of a tile with fewer elements than threads every thread would load one
    for each of its weights.
    """
    WIDEST: tl.constexpr = 32 if FORMAT > 1 and BLOCK_K > 32 else BLOCK_K
    STEP: tl.constexpr = GROUP_K if GROUP_K < WIDEST else WIDEST
    starts = k_start + tl.arange(0, BLOCK_K // STEP) * STEP
    if FORMAT == 0:
        scale = tl.zeros((1, 1), tl.float32)
        return scale, scale
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        offsets = (rows // GROUP_N)[:, None] * stride_scale_row + (starts // GROUP_K)[None, :]
        mask = (rows < num_rows)[:, None] & (starts < num_columns)[None, :]
        scale = tl.load(scale_ptr + offsets, mask=mask, other=0)
        zero = tl.load(zero_ptr + offsets, mask=mask, other=0) if HAS_ZERO else scale
        return scale, zero


@triton.jit
def weight_tile(
    w_ptr, scale, zero, rows, num_rows, k_start, num_columns, stride_row,
    FORMAT: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Rows `[BLOCK_N]` (int64), columns k_start.. of a weight as `[BLOCK_N, BLOCK_K]` of DTYPE; zeros outside.

    `scale` and `zero` are that tile's, of `scale_tile`.
    """
    inside = rows < num_rows
    columns = k_start + tl.arange(0, BLOCK_K)
    if FORMAT == 0:
        mask = inside[:, None] & (columns < num_columns)[None, :]
        return tl.load(w_ptr + rows[:, None] * stride_row + columns[None, :], mask=mask, other=0.0)
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        STEPS: tl.constexpr = scale.shape[1]
        STEP: tl.constexpr = BLOCK_K // STEPS
        factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) if FORMAT == 3 else scale.to(tl.float32)
        if FORMAT == 1:
            mask = inside[:, None] & (columns < num_columns)[None, :]
            data = tl.load(w_ptr + rows[:, None] * stride_row + columns[None, :], mask=mask, other=0.0)
            values = data.to(tl.float32).reshape(BLOCK_N, STEPS, STEP)
        else:
            PER_WORD: tl.constexpr = 8 if FORMAT == 2 else 2
            words = k_start // PER_WORD + tl.arange(0, BLOCK_K // PER_WORD)
            mask = inside[:, None] & (words < num_columns // PER_WORD)[None, :]
            packed = tl.load(w_ptr + rows[:, None] * stride_row + words[None, :], mask=mask, other=0).to(tl.int32)
            shifts = 4 * tl.arange(0, PER_WORD)
            codes = ((packed[:, :, None] >> shifts[None, None, :]) & 15).reshape(BLOCK_N, STEPS, STEP)
            if FORMAT == 3:
                values = widen_e2m1(codes)
            elif HAS_ZERO:
                values = (codes - zero.to(tl.int32)[:, :, None]).to(tl.float32)
            else:
                values = (codes - 8).to(tl.float32)
        return (values * factor[:, :, None]).reshape(BLOCK_N, BLOCK_K).to(DTYPE)


@triton.jit
def _tile_product(
    x_ptr, x_offsets, x_valid, w_ptr, scale_ptr, zero_ptr, rows, num_rows, k_begin, k_end, num_columns,
    stride_row, stride_scale_row,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `product`, of forms whose tiles hold every weight.

    Scales of 4-bit forms are too narrow for Triton's pipeline: the next tile's are asked for by hand before this one is
    used. Those of FP8 are float32, which the pipeline brings by itself.
    """
    accumulated = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    scale, zero = scale_tile(
        scale_ptr, zero_ptr, rows, num_rows, k_begin, num_columns, stride_scale_row,
        FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_K,
    )  # fmt: skip
    for k_start in range(k_begin, k_end, BLOCK_K):
        next_scale, next_zero = scale_tile(
            scale_ptr, zero_ptr, rows, num_rows, k_start + (BLOCK_K if FORMAT >= 2 else 0), num_columns,
            stride_scale_row, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_K,
        )  # fmt: skip
        if FORMAT == 1:
            scale, zero = next_scale, next_zero
        columns = k_start + tl.arange(0, BLOCK_K)
        x_mask = x_valid[:, None] & (columns < num_columns)[None, :]
        x = tl.load(x_ptr + x_offsets[:, None] + columns[None, :], mask=x_mask, other=0.0)
        w = weight_tile(
            w_ptr, scale, zero, rows, num_rows, k_start, num_columns, stride_row,
            FORMAT, HAS_ZERO, BLOCK_N, BLOCK_K, x_ptr.dtype.element_ty,
        )  # fmt: skip
        accumulated = tl.dot(x, tl.trans(w), accumulated, input_precision="ieee")
        scale, zero = next_scale, next_zero
    return accumulated


@triton.jit
def product(
    x_ptr, x_offsets, x_valid, w_ptr, scale_ptr, zero_ptr, rows, num_rows, k_begin, k_end, num_columns,
    stride_row, stride_scale_row,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x rows times weight rows over columns [k_begin, k_end), `[BLOCK_M, BLOCK_N]` float32; k_begin on a tile edge."""
    if FORMAT >= 4:
        return pair_product(
            x_ptr, x_offsets, x_valid, w_ptr, scale_ptr, zero_ptr, rows, num_rows, k_begin, k_end, num_columns,
            stride_row, FORMAT == 4, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        return _tile_product(
            x_ptr, x_offsets, x_valid, w_ptr, scale_ptr, zero_ptr, rows, num_rows, k_begin, k_end, num_columns,
            stride_row, stride_scale_row, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
