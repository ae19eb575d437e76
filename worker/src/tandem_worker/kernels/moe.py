"""Mixture-of-experts feed-forward: gate/up with activation, down, weighted sum, in three launches.

Decode is bound by reading the weights of the chosen experts: each is read once, by the program of the first pair that
chose it, which gathers that expert's other pairs itself (no sorting, no extra launch). Larger batches go through a
block map built on the device. Sums over a token's experts run in a fixed order, so results do not vary between runs.
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
from .block_map import BlockMap, build_block_map
from .checks import (
    FLOATS,
    require_contiguous,
    require_dtype,
    require_rows,
    require_same_device,
    require_shape,
    result_like,
)
from .dispatch import FUSED_MATH, with_twin
from .quantized import SplitByteWeight, Weight
from .reference.moe import fused_moe_reference
from .split_tiles import beside_stride
from .weight_tiles import check_weight, product, weight_arguments

_MAX_UNSORTED_PAIRS = 256  # beyond, gathering an expert's pairs in every program costs more than a map


@triton.jit
def _expert_rows(
    pairs, num_pairs, expert, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, topk_weights_ptr, out_ptr, width,
    num_columns, top_k, limit, stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale, stride_out,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one expert: gate/up with activation of the pairs' tokens, or down of the pairs, weighted."""
    outputs = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = outputs < width
    valid = pairs < num_pairs
    rows = pairs.to(tl.int64)
    expert = expert.to(tl.int64)
    w_ptr += expert * stride_w_expert
    scale_ptr += expert * stride_scale_expert
    if GATED:
        x_offsets = (rows // top_k) * stride_x
        num_rows = 2 * width
    else:
        x_offsets = rows * stride_x
        num_rows = width
    zero_ptr += expert * (beside_stride(num_rows) if FORMAT >= 4 else stride_scale_expert)
    y = product(
        x_ptr, x_offsets, valid, w_ptr, scale_ptr, zero_ptr, tl.where(inside, outputs, num_rows), num_rows, 0,
        num_columns, num_columns, stride_w, stride_scale,
        FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias_ptr += expert * num_rows
        y += tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = product(
            x_ptr, x_offsets, valid, w_ptr, scale_ptr, zero_ptr, outputs + width, num_rows, 0,
            num_columns, num_columns, stride_w, stride_scale,
            FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if HAS_BIAS:
            up += tl.load(bias_ptr + width + outputs, mask=inside, other=0.0).to(tl.float32)[None, :]
        y = gated(y, up, 1.702, limit, CLAMPED)
    else:
        y *= tl.load(topk_weights_ptr + rows, mask=valid, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + rows[:, None] * stride_out + outputs[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["num_pairs"])
def _expert_kernel(
    ids_ptr, map_pairs_ptr, map_experts_ptr, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, topk_weights_ptr, out_ptr,
    num_pairs, num_experts, first_expert, width, num_columns, top_k, limit,
    stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale, stride_out,
    MAPPED: tl.constexpr, GATED: tl.constexpr, CLAMPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    FORMAT: tl.constexpr, GROUP_N: tl.constexpr, GROUP_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    unit = tl.program_id(0)
    if MAPPED:
        expert = tl.load(map_experts_ptr + unit)
        if expert < 0:
            return
        pairs = tl.load(map_pairs_ptr + unit * BLOCK_M + tl.arange(0, BLOCK_M))
        _expert_rows(
            pairs, num_pairs, expert, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, topk_weights_ptr, out_ptr, width,
            num_columns, top_k, limit, stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale,
            stride_out, GATED, CLAMPED, HAS_BIAS, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        expert = tl.load(ids_ptr + unit) - first_expert
        candidates = tl.arange(0, BLOCK_P)
        ids = tl.load(ids_ptr + candidates, mask=candidates < num_pairs, other=-1) - first_expert
        same = ((ids == expert) & (candidates < num_pairs)).to(tl.int32)
        earlier = tl.sum(tl.where(candidates < unit, same, 0), axis=0)
        if (expert < 0) | (expert >= num_experts) | (earlier > 0):
            return
        rank = tl.cumsum(same, axis=0) - 1
        count = tl.sum(same, axis=0)
        slots = tl.arange(0, BLOCK_M)
        for start in range(0, count, BLOCK_M):
            chosen = (same > 0)[None, :] & (rank[None, :] == start + slots[:, None])
            pairs = tl.sum(tl.where(chosen, candidates[None, :], 0), axis=1)
            pairs = tl.where(start + slots < count, pairs, num_pairs)
            _expert_rows(
                pairs, num_pairs, expert, x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, topk_weights_ptr, out_ptr, width,
                num_columns, top_k, limit, stride_x, stride_w_expert, stride_w, stride_scale_expert, stride_scale,
                stride_out, GATED, CLAMPED, HAS_BIAS, FORMAT, GROUP_N, GROUP_K, HAS_ZERO, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip


@triton.jit
def _sum_experts_kernel(
    parts_ptr, ids_ptr, residual_ptr, out_ptr, num_experts, first_expert, width, stride_residual, stride_out,
    HAS_RESIDUAL: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + token * stride_residual + columns, mask=columns < width, other=0.0)
        total += residual.to(tl.float32)
    for choice in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + choice) - first_expert
        # Nobody wrote the part of an expert that lives on another rank.
        limit = tl.where((expert >= 0) & (expert < num_experts), width, 0)
        total += tl.load(parts_ptr + (token * TOP_K + choice) * width + columns, mask=columns < limit, other=0.0)
    tl.store(out_ptr + token * stride_out + columns, total.to(out_ptr.dtype.element_ty), mask=columns < width)


def _tile_shape(mapped: bool, rows_per_expert: int, element_size: int, *, decoded: bool) -> dict[str, int]:
    if element_size > 2:  # float32 serves tests
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if not mapped or rows_per_expert <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 3}
    if rows_per_expert <= 64:
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
    # Four warps would not have the registers for the sums and for weights that come in pairs of halves.
    return {"BLOCK_M": 64, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8 if decoded else 4, "num_stages": 3}


def _check_experts(
    x: torch.Tensor, gate_up: Weight, down: Weight, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[int, int]:
    """Experts held here and their intermediate size."""
    require_dtype("x", x, *FLOATS)
    require_shape("x", x, (None, None))
    require_rows("x", x)
    num_experts, twice, columns = check_weight("gate_up", gate_up, x.dtype, x.device, 3)
    require_shape("x", x, (None, columns))
    down_shape = check_weight("down", down, x.dtype, x.device, 3)
    if twice % 2 or down_shape != (num_experts, columns, twice // 2):
        raise ValueError(f"down must have shape [{num_experts}, {columns}, {twice / 2:g}], got {list(down_shape)}")
    require_shape("topk_ids", topk_ids, (x.shape[0], None))
    require_dtype("topk_ids", topk_ids, torch.int32)
    require_shape("topk_weights", topk_weights, tuple(topk_ids.shape))
    require_dtype("topk_weights", topk_weights, torch.float32)
    require_contiguous("topk_ids", topk_ids)
    require_contiguous("topk_weights", topk_weights)
    require_same_device(x, topk_weights=topk_weights, topk_ids=topk_ids)
    return num_experts, twice // 2


@with_twin(fused_moe_reference)
def fused_moe(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    swiglu_limit: float | None = None,
    residual: torch.Tensor | None = None,
    first_expert: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual plus the sum over each token's experts of weight * down(act(gate(x)) * up(x)).

    x `[T, H]`; gate_up `[E, 2I, H]` (gate rows first) and down `[E, H, I]` of x's dtype or in a form of `quantized`;
    topk_weights `[T, top_k]` float32 and topk_ids `[T, top_k]` int32 as `moe_route` returns them; biases `[E, 2I]` and
    `[E, H]`; `swiglu_limit` selects gpt-oss's clamped activation; residual `[T, H]` of any float dtype. The E experts
    held here are first_expert onward: others contribute nothing (expert parallelism sums over ranks), and the -1 of a
    padding row is no expert anywhere: it costs no tile and reads no weight. -> `[T, H]` as x. Raises `ValueError` for
    shapes, strides and group sizes, `TypeError` for dtypes and devices.
    """
    num_experts, width = _check_experts(x, gate_up, down, topk_weights, topk_ids)
    for name, bias, columns in (("gate_up_bias", gate_up_bias, 2 * width), ("down_bias", down_bias, x.shape[1])):
        if bias is not None:
            require_shape(name, bias, (num_experts, columns))
            require_contiguous(name, bias)
            require_same_device(x, **{name: bias})
    if residual is not None:
        require_shape("residual", residual, tuple(x.shape))
        require_dtype("residual", residual, *FLOATS)
        require_rows("residual", residual)
        require_same_device(x, residual=residual)
    out = result_like("out", out, tuple(x.shape), x)
    num_pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    if num_pairs == 0:
        return out.zero_() if residual is None else out.copy_(residual)
    mapped = num_pairs > _MAX_UNSORTED_PAIRS
    decoded = isinstance(gate_up, SplitByteWeight) or isinstance(down, SplitByteWeight)
    tile = _tile_shape(mapped, num_pairs // num_experts, x.element_size(), decoded=decoded)
    block_map = build_block_map(topk_ids, num_experts, tile["BLOCK_M"], first_expert) if mapped else None
    hidden = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, x.shape[1]), dtype=torch.float32, device=x.device)
    shared = (topk_weights, topk_ids, block_map, num_experts, first_expert, tile)
    _launch_experts(x, gate_up, gate_up_bias, hidden, *shared, is_gate_up=True, limit=swiglu_limit)
    _launch_experts(hidden, down, down_bias, parts, *shared, is_gate_up=False, limit=None)
    _sum_experts_kernel[(x.shape[0], triton.cdiv(x.shape[1], 1024))](
        parts, topk_ids, parts if residual is None else residual, out, num_experts, first_expert, x.shape[1],
        0 if residual is None else residual.stride(0), out.stride(0), HAS_RESIDUAL=residual is not None, TOP_K=top_k,
        BLOCK=1024, num_warps=4, **FUSED_MATH,
    )  # fmt: skip
    return out


def _launch_experts(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    block_map: BlockMap | None,
    num_experts: int,
    first_expert: int,
    tile: dict[str, int],
    *,
    is_gate_up: bool,
    limit: float | None,
) -> None:
    """One of the two products: gate/up with its activation (clamped where there is a limit), or down."""
    num_pairs = topk_ids.numel()
    units = num_pairs if block_map is None else block_map.experts.shape[0]
    pairs, experts = (topk_ids, topk_ids) if block_map is None else (block_map.pairs, block_map.experts)
    arguments = weight_arguments(weight)
    _expert_kernel[(units, triton.cdiv(out.shape[1], tile["BLOCK_N"]))](
        topk_ids, pairs, experts, x, *arguments.tensors, x if bias is None else bias, topk_weights, out,
        num_pairs, num_experts, first_expert, out.shape[1], x.shape[1], topk_ids.shape[1],
        limit or 0.0, x.stride(0), *arguments.strides, out.stride(0),
        MAPPED=block_map is not None, GATED=is_gate_up, CLAMPED=limit is not None, HAS_BIAS=bias is not None,
        BLOCK_P=triton.next_power_of_2(num_pairs) if block_map is None else 1,
        **arguments.constants, **tile, **FUSED_MATH,
    )  # fmt: skip
