"""Which experts a token goes to: scores, optional bias and groups, the best few, their weights."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, require_contiguous, require_dtype, require_rows, require_same_device, require_shape
from .dispatch import FUSED_MATH, with_twin
from .reference.moe import moe_route_reference


@triton.jit
def _moe_route_kernel(
    logits_ptr, bias_ptr, live_ptr, weights_ptr, ids_ptr, num_experts, stride_logits, scale,
    SIGMOID: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIVE: tl.constexpr, RENORMALIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    inside = experts < num_experts
    logits = tl.load(logits_ptr + row * stride_logits + experts, mask=inside, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-tl.where(inside, logits, 0.0)))
    else:
        scores = tl.exp(logits - tl.max(logits, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if NUM_GROUPS > 1:
        grouped = choice.reshape(NUM_GROUPS, BLOCK // NUM_GROUPS)
        first = tl.max(grouped, axis=1)
        member = tl.arange(0, BLOCK // NUM_GROUPS)
        best = tl.argmax(grouped, axis=1)
        second = tl.max(tl.where(member[None, :] == best[:, None], float("-inf"), grouped), axis=1)
        group_score = first + second
        group = tl.arange(0, NUM_GROUPS)
        # A group's rank is the number of groups before it; of equal groups the lower index comes first.
        beaten = (group_score[None, :] > group_score[:, None]) | (
            (group_score[None, :] == group_score[:, None]) & (group[None, :] < group[:, None])
        )
        rank = tl.sum(beaten.to(tl.int32), axis=1)
        choice = tl.where((rank < TOP_GROUPS)[:, None], grouped, float("-inf")).reshape(BLOCK)

    slots = tl.arange(0, BLOCK_K)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    for slot in tl.static_range(TOP_K):
        winner = tl.argmax(choice, axis=0)
        weight = tl.sum(tl.where(experts == winner, scores, 0.0), axis=0)
        weights = tl.where(slots == slot, weight, weights)
        ids = tl.where(slots == slot, winner, ids)
        choice = tl.where(experts == winner, float("-inf"), choice)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    if HAS_LIVE:
        live = tl.load(live_ptr + row) != 0
        weights = tl.where(live, weights, 0.0)
        ids = tl.where(live, ids, -1)
    tl.store(weights_ptr + row * TOP_K + slots, weights * scale, mask=slots < TOP_K)
    tl.store(ids_ptr + row * TOP_K + slots, ids, mask=slots < TOP_K)


@with_twin(moe_route_reference)
def moe_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    live: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose `top_k` experts per token, likeliest first; of equal scores the lower id.

    logits `[T, E]`; scoring "softmax" (Qwen3, and gpt-oss with renormalize) or "sigmoid" (DeepSeek-V3, Kimi, Llama 4);
    bias `[E]` takes part in the choice, not in the weights; with groups, experts outside the `top_groups` best of
    `num_groups` groups (by their two best experts) are out (DeepSeek-V3, 2024); weights are divided by their sum with
    `renormalize` and multiplied by `scale`. Rows that `live` `[T]` bool leaves out are padding: they get expert -1,
    which is none, and weight 0. -> weights `[T, top_k]` float32, ids `[T, top_k]` int32.
    Raises `ValueError` for shapes and counts, `TypeError` for dtypes.
    """
    require_shape("logits", logits, (None, None))
    require_dtype("logits", logits, *FLOATS)
    require_rows("logits", logits)
    num_rows, num_experts = logits.shape
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f'scoring must be "softmax" or "sigmoid", got {scoring!r}')
    if not 0 < top_groups <= num_groups or num_experts % num_groups:
        raise ValueError(f"{top_groups} of {num_groups} groups cannot be chosen among {num_experts} experts")
    if not 0 < top_k <= num_experts // num_groups * top_groups:
        raise ValueError(f"cannot choose {top_k} of {num_experts // num_groups * top_groups} experts")
    block = triton.next_power_of_2(num_experts)
    if num_groups > 1 and (block != num_experts or num_groups & (num_groups - 1)):
        raise ValueError(f"grouped routing needs powers of two, got {num_experts} experts in {num_groups} groups")
    if bias is not None:
        require_shape("bias", bias, (num_experts,))
        require_rows("bias", bias)
        require_same_device(logits, bias=bias)
    if live is not None:
        require_shape("live", live, (num_rows,))
        require_dtype("live", live, torch.bool)
        require_contiguous("live", live)
        require_same_device(logits, live=live)
    weights = torch.empty((num_rows, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_rows, top_k), dtype=torch.int32, device=logits.device)
    if num_rows:
        _moe_route_kernel[(num_rows,)](
            logits, logits if bias is None else bias, logits if live is None else live, weights, ids, num_experts,
            logits.stride(0), scale,
            SIGMOID=scoring == "sigmoid", HAS_BIAS=bias is not None, HAS_LIVE=live is not None, RENORMALIZE=renormalize,
            NUM_GROUPS=num_groups, TOP_GROUPS=top_groups, TOP_K=top_k, BLOCK=block,
            BLOCK_K=triton.next_power_of_2(top_k), num_warps=1 if block <= 256 else 4, **FUSED_MATH,
        )  # fmt: skip
    return weights, ids
