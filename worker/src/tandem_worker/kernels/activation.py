"""Gated activations over the fused gate/up projection; bound by memory (two reads, one write per output)."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, require_dtype, require_rows, require_shape, result_like
from .dispatch import FUSED_MATH, with_twin
from .reference.elementwise import silu_mul_reference, swiglu_clamped_reference

_BLOCK = 1024


@triton.jit
def gated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """silu(gate) * up, or gpt-oss's clamped form (up + 1) * gate * sigmoid(alpha * gate); float32 in and out."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        return up * gate / (1.0 + tl.exp(-alpha * gate))
    else:  # noqa: RET505 - Triton compiles both branches of a constexpr condition only in this form
        return up * gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gated_kernel(
    gate_up_ptr, out_ptr, width, stride_in, stride_out, alpha, limit, CLAMPED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up_ptr + row * stride_in + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride_in + width + columns, mask=mask, other=0.0).to(tl.float32)
    y = gated(gate, up, alpha, limit, CLAMPED)
    tl.store(out_ptr + row * stride_out + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(gate_up: torch.Tensor, out: torch.Tensor | None, alpha: float, limit: float, clamped: bool) -> torch.Tensor:
    require_dtype("gate_up", gate_up, *FLOATS)
    require_shape("gate_up", gate_up, (None, None))
    require_rows("gate_up", gate_up)
    num_rows, twice = gate_up.shape
    if twice % 2:
        raise ValueError(f"gate_up must have an even last axis (gate, then up), got {twice}")
    out = result_like("out", out, (num_rows, twice // 2), gate_up)
    if num_rows and twice:
        _gated_kernel[(num_rows, triton.cdiv(twice // 2, _BLOCK))](
            gate_up, out, twice // 2, gate_up.stride(0), out.stride(0), alpha, limit,
            CLAMPED=clamped, BLOCK=_BLOCK, num_warps=4, **FUSED_MATH,
        )  # fmt: skip
    return out


@with_twin(silu_mul_reference)
def silu_mul(gate_up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up (Shazeer, GLU Variants, 2020): gate_up `[T, 2I]`, gate in the first half -> `[T, I]`.

    Raises `ValueError` for shapes and strides, `TypeError` for dtypes other than bf16, fp16, fp32.
    """
    return _launch(gate_up, out, 0.0, 0.0, clamped=False)


@with_twin(swiglu_clamped_reference)
def swiglu_clamped(
    gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """gpt-oss's activation: gate `min(gate, limit)`, up clamped to ±limit, (up + 1) * gate * sigmoid(alpha * gate).

    gate_up `[T, 2I]`, gate in the first half (checkpoints interleave the two: de-interleave rows at load) -> `[T, I]`.
    """
    return _launch(gate_up, out, alpha, limit, clamped=True)
