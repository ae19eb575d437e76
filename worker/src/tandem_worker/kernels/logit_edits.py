"""What is done to logits before a token is chosen: penalties, bias, the grammar's bitmask. In place, on the device."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import INDEXES, require_dtype, require_rows, require_same_device, require_shape
from .dispatch import FUSED_MATH, with_twin
from .reference.sampling import apply_bitmask_reference, apply_logit_bias_reference, apply_penalties_reference

_BLOCK = 2048


@triton.jit
def _penalties_kernel(
    logits_ptr, seen_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, vocab,
    stride_logits, stride_seen, stride_counts, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    repetition = tl.load(repetition_ptr + row)
    if (presence == 0.0) & (frequency == 0.0) & (repetition == 1.0):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab
    logits = tl.load(logits_ptr + row * stride_logits + columns, mask=mask, other=0.0)
    counts = tl.load(counts_ptr + row * stride_counts + columns, mask=mask, other=0)
    seen = tl.load(seen_ptr + row * stride_seen + columns, mask=mask, other=0)
    emitted = counts > 0
    penalized = tl.where(logits > 0.0, logits / repetition, logits * repetition)
    logits = tl.where(emitted | (seen != 0), penalized, logits)
    logits = logits - frequency * counts.to(tl.float32) - tl.where(emitted, presence, 0.0)
    tl.store(logits_ptr + row * stride_logits + columns, logits, mask=mask)


@triton.jit(do_not_specialize=["num_entries", "stride_ids", "stride_values"])
def _logit_bias_kernel(
    logits_ptr, ids_ptr, values_ptr, num_entries, vocab, stride_logits, stride_ids, stride_values, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    entries = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + row * stride_ids + entries, mask=entries < num_entries, other=-1).to(tl.int64)
    values = tl.load(values_ptr + row * stride_values + entries, mask=entries < num_entries, other=0.0)
    mask = (ids >= 0) & (ids < vocab)
    logit_ptrs = logits_ptr + row * stride_logits + ids
    tl.store(logit_ptrs, tl.load(logit_ptrs, mask=mask, other=0.0) + values, mask=mask)


@triton.jit
def _bitmask_kernel(logits_ptr, bitmask_ptr, vocab, stride_logits, stride_bitmask, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < vocab
    words = tl.load(bitmask_ptr + row * stride_bitmask + columns // 32, mask=mask, other=-1)
    forbidden = ((words >> (columns % 32)) & 1) == 0
    # Only what is forbidden is written: a permissive mask costs a read of one bit per token.
    negative = tl.full((BLOCK,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride_logits + columns, negative, mask=mask & forbidden)


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Rows and vocabulary of logits, after refusing anything but `[N, V]` float32 with contiguous rows."""
    require_shape("logits", logits, (None, None))
    require_dtype("logits", logits, torch.float32)
    require_rows("logits", logits)
    return logits.shape[0], logits.shape[1]


@with_twin(apply_penalties_reference)
def apply_penalties(
    logits: torch.Tensor,
    prompt_seen: torch.Tensor,
    output_counts: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    repetition: torch.Tensor,
) -> None:
    """Repetition penalty on tokens seen anywhere, then OpenAI's frequency and presence penalties on emitted ones.

    logits `[B, V]` float32, changed in place; prompt_seen `[B, V]` bool or uint8; output_counts `[B, V]` int32 or
    int16; presence, frequency (0: off) and repetition (1: off; Keskar et al., CTRL, 2019) `[B]` float32. Rows with all
    three off are not touched. Raises `ValueError` for shapes and strides, `TypeError` for dtypes.
    """
    num_rows, vocab = check_logits(logits)
    for name, tensor, dtypes in (
        ("prompt_seen", prompt_seen, (torch.bool, torch.uint8)),
        ("output_counts", output_counts, (torch.int32, torch.int16)),
    ):
        require_shape(name, tensor, (num_rows, vocab))
        require_dtype(name, tensor, *dtypes)
        require_rows(name, tensor)
        require_same_device(logits, **{name: tensor})
    for name, tensor in (("presence", presence), ("frequency", frequency), ("repetition", repetition)):
        require_row_values(name, tensor, logits, torch.float32)
    if num_rows:
        _penalties_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits, prompt_seen.view(torch.uint8), output_counts, presence, frequency, repetition, vocab,
            logits.stride(0), prompt_seen.stride(0), output_counts.stride(0), BLOCK=_BLOCK, num_warps=4, **FUSED_MATH,
        )  # fmt: skip


def require_row_values(name: str, tensor: torch.Tensor, logits: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Refuse anything but one contiguous value per row of logits."""
    require_shape(name, tensor, (logits.shape[0],))
    require_dtype(name, tensor, *dtypes)
    require_rows(name, tensor)
    require_same_device(logits, **{name: tensor})


@with_twin(apply_logit_bias_reference)
def apply_logit_bias(logits: torch.Tensor, ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to the logits of given tokens, in place.

    logits `[B, V]` float32; ids `[B, N]` int32 or int64, -1 for unused entries, no id twice in a row; values `[B, N]`
    float32.
    """
    num_rows, vocab = check_logits(logits)
    require_shape("ids", ids, (num_rows, None))
    require_dtype("ids", ids, *INDEXES)
    require_rows("ids", ids)
    require_shape("values", values, tuple(ids.shape))
    require_dtype("values", values, torch.float32)
    require_rows("values", values)
    require_same_device(logits, ids=ids, values=values)
    if ids.numel():
        _logit_bias_kernel[(num_rows,)](
            logits, ids, values, ids.shape[1], vocab, logits.stride(0), ids.stride(0), values.stride(0),
            BLOCK=triton.next_power_of_2(ids.shape[1]), num_warps=1, **FUSED_MATH,
        )  # fmt: skip


@with_twin(apply_bitmask_reference)
def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Forbid the tokens whose bit is 0, in place: their logits become -inf.

    logits `[B, V]` float32; bitmask `[B, ceil(V / 32)]` int32, bit i of word w is token 32 w + i (the layout of the
    grammar libraries); a row of -1 allows everything.
    """
    num_rows, vocab = check_logits(logits)
    require_shape("bitmask", bitmask, (num_rows, triton.cdiv(vocab, 32)))
    require_dtype("bitmask", bitmask, torch.int32)
    require_rows("bitmask", bitmask)
    require_same_device(logits, bitmask=bitmask)
    if num_rows:
        _bitmask_kernel[(num_rows, triton.cdiv(vocab, _BLOCK))](
            logits, bitmask, vocab, logits.stride(0), bitmask.stride(0), BLOCK=_BLOCK, num_warps=4, **FUSED_MATH
        )
