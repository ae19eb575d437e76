"""Split-KV: where a decode step's contexts are cut into pieces, and how the pieces' results meet again.

A row's cuts follow from its context alone, and pieces meet in their order, eight at a time: neither the rows beside it
nor the width of a recording's block table change a bit of its result.

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

_MAX_SPLITS = 32  # also what bounds the memory of partial results
_SPLIT_KEYS = 256  # at least: below, writing and reading a partial result costs a tenth of reading its keys
_MERGED_TOGETHER = 8  # all at once would not fit the registers
_INTERPRETED_SMS = 4  # the interpreter has no multiprocessors; a few splits exercise the merge


@lru_cache(maxsize=8)
def _num_multiprocessors(device_index: int) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; a small constant under the interpreter."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return _num_multiprocessors(torch.cuda.current_device() if device.index is None else device.index)


def plan_splits(max_tiles: int, keys_per_tile: int, num_splits: int | None) -> tuple[int, int, int]:
    """The grid's splits, the fewest tiles of a split, and the splits among which a longer context is divided.

    From shapes alone, as a captured graph needs it: a sequence has at most `max_tiles` tiles of `keys_per_tile` keys.
    `num_splits` divides every context among so many.
    """
    if num_splits is not None:
        return num_splits, 1, num_splits
    fewest = max(1, _SPLIT_KEYS // keys_per_tile)
    return max(1, min(triton.cdiv(max_tiles, fewest), _MAX_SPLITS)), fewest, _MAX_SPLITS


@triton.jit
def tiles_of_split(num_tiles, fewest_tiles, max_splits):
    """How many tiles a split of a context of `num_tiles` has."""
    return tl.maximum(fewest_tiles, (num_tiles + max_splits - 1) // max_splits)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_splits_kernel(
    partial_ptr, lse_ptr, sinks_ptr, pieces_ptr, out_ptr,
    num_heads, head_dim, num_splits, stride_out_row, stride_out_head,
    HAS_SINKS: tl.constexpr, HAS_PIECES: tl.constexpr, BLOCK_SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pieces = num_splits
    if HAS_PIECES:
        pieces = tl.load(pieces_ptr + row)
        if not HAS_SINKS and pieces <= 1:
            return
    splits = tl.arange(0, BLOCK_SPLITS)
    dims = tl.arange(0, BLOCK_D)
    first = (row * num_heads + head) * num_splits
    lse = tl.load(lse_ptr + first + splits, mask=splits < pieces, other=float("-inf"))
    maximum = tl.max(lse, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        maximum = tl.maximum(maximum, sink)
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.full([], 0.0, tl.float32)
    if HAS_SINKS:
        total += tl.exp2(sink - shift)
    merged = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, pieces, TOGETHER):
        chunk = start + tl.arange(0, TOGETHER)
        weight = tl.exp2(tl.load(lse_ptr + first + chunk, mask=chunk < pieces, other=float("-inf")) - shift)
        # A split without keys never wrote its part: it must not even be read, whatever lies there may be NaN.
        mask = (weight > 0.0)[:, None] & (dims < head_dim)[None, :]
        parts = tl.load(partial_ptr + (first + chunk)[:, None] * head_dim + dims[None, :], mask=mask, other=0.0)
        merged += tl.sum(parts * weight[:, None], axis=0)
        total += tl.sum(weight, axis=0)
    merged = merged / tl.where(total > 0.0, total, 1.0)
    out_ptrs = out_ptr + row * stride_out_row + head * stride_out_head + dims
    tl.store(out_ptrs, merged.to(out_ptr.dtype.element_ty), mask=dims < head_dim)


def merge_splits(
    partial: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    pieces: torch.Tensor | None = None,
) -> None:
    """Merge partial `[B, Hq, P, D]` and lse `[B, Hq, P]`, both float32 and contiguous, into out `[B, Hq, D]`.

    pieces `[B]` int32: how many of the P a row has; rows of one, without sinks, are in `out` already.
    """
    num_rows, num_heads, num_splits, head_dim = partial.shape
    _merge_splits_kernel[(num_rows, num_heads)](
        partial, lse, lse if sinks is None else sinks, lse if pieces is None else pieces, out,
        num_heads, head_dim, num_splits, out.stride(0), out.stride(1),
        HAS_SINKS=sinks is not None, HAS_PIECES=pieces is not None, BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        TOGETHER=_MERGED_TOGETHER, BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4, **FUSED_MATH,
    )  # fmt: skip
