"""Which rows meet which expert: a map built on the device, so that a mixture-of-experts layer never waits for the host.

A pair is one (token, choice); pair p belongs to token p // top_k. Pairs of an expert are listed together, each expert's
list padded to whole blocks of rows, and every block knows its expert. Sizes follow from shapes alone.
"""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .dispatch import FUSED_MATH

_CHUNK = 1024
_BLOCK_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """`pairs[b * rows_per_block ...]` are the rows of block b; `num_pairs` stands for no row."""

    pairs: torch.Tensor
    """`[max_blocks * rows_per_block]` int32."""
    experts: torch.Tensor
    """`[max_blocks]` int32, expert of each block, -1 for blocks without work."""


@triton.jit(do_not_specialize=["num_pairs", "max_blocks"])
def _count_pairs_kernel(
    ids_ptr, offsets_ptr, experts_ptr, pairs_ptr, num_pairs, num_experts, first_expert, max_blocks,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, BLOCK_CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: counts per expert, where each expert's list starts, the expert of each block."""
    experts = tl.arange(0, BLOCK_E)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) - first_expert
        # Foreign pairs and padding are counted in the one bin beyond the experts.
        local = (ids >= 0) & (ids < num_experts) & (pairs < num_pairs)
        counts += tl.histogram(tl.where(local, ids, BLOCK_E - 1), BLOCK_E)
    counts = tl.where(experts < num_experts, counts, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    ends = tl.cumsum(blocks, axis=0)
    tl.store(offsets_ptr + experts, (ends - blocks) * BLOCK_M, mask=experts < num_experts)
    total = tl.sum(blocks, axis=0)
    for start in range(0, max_blocks, BLOCK_CHUNK):
        block = start + tl.arange(0, BLOCK_CHUNK)
        expert = tl.sum((ends[None, :] <= block[:, None]).to(tl.int32), axis=1)
        tl.store(experts_ptr + block, tl.where(block < total, expert, -1), mask=block < max_blocks)
    for start in range(0, max_blocks * BLOCK_M, CHUNK):
        slots = start + tl.arange(0, CHUNK)
        tl.store(pairs_ptr + slots, tl.zeros((CHUNK,), tl.int32) + num_pairs, mask=slots < max_blocks * BLOCK_M)


@triton.jit(do_not_specialize=["num_pairs"])
def _place_pairs_kernel(ids_ptr, offsets_ptr, pairs_ptr, num_pairs, first_expert, CHUNK: tl.constexpr):
    """One program per expert: its pairs in their order, so that results do not vary between runs."""
    expert = tl.program_id(0)
    position = tl.load(offsets_ptr + expert)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1) - first_expert
        mine = (ids == expert) & (pairs < num_pairs)
        rank = tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(pairs_ptr + position + rank, pairs, mask=mine)
        position += tl.sum(mine.to(tl.int32), axis=0)


def build_block_map(topk_ids: torch.Tensor, num_experts: int, rows_per_block: int, first_expert: int) -> BlockMap:
    """Map of contiguous topk_ids `[T, top_k]` int32 for experts [first_expert, first_expert + num_experts)."""
    num_pairs = topk_ids.numel()
    max_blocks = num_pairs // rows_per_block + min(num_experts, num_pairs)
    device = topk_ids.device
    pairs = torch.empty(max_blocks * rows_per_block, dtype=torch.int32, device=device)
    experts = torch.empty(max_blocks, dtype=torch.int32, device=device)
    offsets = torch.empty(num_experts, dtype=torch.int32, device=device)
    _count_pairs_kernel[(1,)](
        topk_ids, offsets, experts, pairs, num_pairs, num_experts, first_expert, max_blocks,
        BLOCK_M=rows_per_block, BLOCK_E=triton.next_power_of_2(num_experts + 1), CHUNK=_CHUNK, BLOCK_CHUNK=_BLOCK_CHUNK,
        num_warps=8, **FUSED_MATH,
    )  # fmt: skip
    _place_pairs_kernel[(num_experts,)](
        topk_ids, offsets, pairs, num_pairs, first_expert, CHUNK=_CHUNK, num_warps=4, **FUSED_MATH
    )
    return BlockMap(pairs=pairs, experts=experts)
