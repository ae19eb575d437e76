"""Split-KV: how many pieces a decode step's context is cut into, and how the pieces' results meet again.

Flash-Decoding (Dao et al., 2023): each split leaves its normalized output and the log-sum-exp of its scores; the sum of
outputs weighted by exp(lse - max) is the attention over all. Base 2 throughout.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from .dispatch import FUSED_MATH

_MAX_SPLITS = 128
_WAVES = 2  # programs per multiprocessor to aim for: hides the tail of uneven sequences
_INTERPRETED_SMS = 4  # the interpreter has no multiprocessors; a few splits exercise the merge


@lru_cache(maxsize=8)
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small constant under the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return _num_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def plan_num_splits(programs_per_split: int, max_tiles: int, device: torch.device) -> int:
    """Splits that fill the device, from shapes alone: the grid of a captured graph must not depend on lengths.

    `programs_per_split` programs run for each split, a sequence has at most `max_tiles` tiles of keys.
    """
    wanted = triton.cdiv(_WAVES * num_multiprocessors(device), max(1, programs_per_split))
    return max(1, min(wanted, max_tiles, _MAX_SPLITS))


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    partial_ptr, lse_ptr, sinks_ptr, out_ptr, num_heads, head_dim, num_splits, stride_out_row, stride_out_head,
    HAS_SINKS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    first = (row * num_heads + head) * num_splits
    lse = tl.load(lse_ptr + first + splits, mask=splits < num_splits, other=float("-inf"))
    maximum = tl.max(lse, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        maximum = tl.maximum(maximum, sink)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(lse - shift)
    total = tl.sum(weights, axis=0)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, num_splits, CHUNK):  # a few splits at a time: all at once would not fit the registers
        chunk = start + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(lse_ptr + first + chunk, mask=chunk < num_splits, other=float("-inf")) - shift)
        # A split without keys never wrote its part: it must not even be read, whatever lies there may be NaN.
        mask = (weight > 0.0)[:, None] & (dims < head_dim)[None, :]
        parts = tl.load(partial_ptr + (first + chunk)[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        merged += tl.sum(parts * weight[:, None], axis=0)
    merged = merged / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + dims
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=dims < head_dim)


def merge_splits(partial: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor) -> None:
    """Merge partial `[B, Hq, P, D]` and lse `[B, Hq, P]`, both float32 and contiguous, into out `[B, Hq, D]`."""
    num_rows, num_heads, num_splits, head_dim = partial.shape
    _merge_splits_kernel[(num_rows, num_heads)](
        partial, lse, lse if sinks is None else sinks, out, num_heads, head_dim, num_splits, out.stride(0),
        out.stride(1), HAS_SINKS=sinks is not None, BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        CHUNK=min(8, triton.next_power_of_2(num_splits)), BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4, **FUSED_MATH,
    )  # fmt: skip
