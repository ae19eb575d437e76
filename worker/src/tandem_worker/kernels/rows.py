"""Pieces of rows from one table to another, one of which may be pinned memory of the host.

Whole blocks of the host hold every layer, those of the device one: what is copied of a row is a piece of it, so a copy
engine would take a call for each. The kernel has few programs that go over all of it: the bus is slower than they are,
and the others' multiprocessors are computing.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import require_contiguous, require_dtype, require_shape
from .dispatch import FUSED_MATH, with_twin
from .reference.elementwise import copy_rows_reference

WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_PROGRAMS = 16
_BLOCK = 2048


@triton.jit(do_not_specialize=["num_tiles"])
def _copy_rows_kernel(
    pairs_ptr, source_ptr, target_ptr, num_tiles, tiles_per_row, width, source_column, target_column,
    stride_source, stride_target, BLOCK: tl.constexpr,
):  # fmt: skip
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = tile // tiles_per_row
        source_row = tl.load(pairs_ptr + 2 * row).to(tl.int64)
        target_row = tl.load(pairs_ptr + 2 * row + 1).to(tl.int64)
        columns = (tile % tiles_per_row) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < width
        words = tl.load(source_ptr + source_row * stride_source + source_column + columns, mask=mask)
        tl.store(target_ptr + target_row * stride_target + target_column + columns, words, mask=mask)


@with_twin(copy_rows_reference)
def copy_rows(
    pairs: torch.Tensor, source: torch.Tensor, source_column: int, target: torch.Tensor, target_column: int, width: int
) -> None:
    """Copy `width` words from column `source_column` of some rows of `source` to column `target_column` of `target`.

    pairs `[K, 2]` int64 (row of the source, row of the target; targets are distinct), on the device; source `[N, P]`
    and target `[M, Q]` contiguous, of one integer type, each on the device or in host memory that is pinned and mapped
    there. Raises `ValueError` for shapes and columns, `TypeError` for dtypes.
    """
    require_shape("pairs", pairs, (None, 2))
    require_dtype("pairs", pairs, torch.int64)
    require_contiguous("pairs", pairs)
    for name, table, column in (("source", source, source_column), ("target", target, target_column)):
        require_shape(name, table, (None, None))
        require_contiguous(name, table)
        require_dtype(name, table, source.dtype)
        if not 0 <= column <= column + width <= table.shape[1]:
            raise ValueError(f"columns {column} to {column + width} are not in {name}, which has {table.shape[1]}")
    require_dtype("source", source, *WORDS)
    if not len(pairs) or not width:
        return
    tiles_per_row = triton.cdiv(width, _BLOCK)
    num_tiles = tiles_per_row * len(pairs)
    _copy_rows_kernel[(min(num_tiles, _PROGRAMS),)](
        pairs, source, target, num_tiles, tiles_per_row, width, source_column, target_column,
        source.stride(0), target.stride(0), BLOCK=_BLOCK, num_warps=8, **FUSED_MATH,
    )  # fmt: skip
