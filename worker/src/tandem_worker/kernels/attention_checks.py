"""What the paged attention launchers refuse, and what they share on the device."""

# Kernel bodies are Triton's language in Python's syntax, which its annotations do not describe:
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INDEXES, require_dtype, require_rows, require_same_device, require_shape
from .kv import check_kv_cache

LOG2E = 1.4426950408889634


def check_paged_inputs(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    sinks: torch.Tensor | None,
    window: int | None,
    chunk: int | None,
) -> int:
    """The number of query heads per KV head, after refusing what the kernels would misread."""
    require_dtype("q", q, *FLOATS)
    require_shape("q", q, (None, None, None))
    require_rows("q", q)
    check_kv_cache(kv_cache, None, q.shape[2])
    require_dtype("kv_cache", kv_cache, q.dtype)
    check_sequences(block_tables, context_lens)
    num_q_heads, num_kv_heads = q.shape[1], kv_cache.shape[2]
    if num_q_heads % num_kv_heads:
        raise ValueError(f"{num_q_heads} query heads cannot be grouped over {num_kv_heads} KV heads")
    check_sinks(sinks, num_q_heads)
    for name, extent in (("window", window), ("chunk", chunk)):
        if extent is not None and extent <= 0:
            raise ValueError(f"{name} must be positive or None, got {extent}")
    require_same_device(q, kv_cache=kv_cache, block_tables=block_tables, context_lens=context_lens, sinks=sinks)
    return num_q_heads // num_kv_heads


def check_sequences(block_tables: torch.Tensor, context_lens: torch.Tensor) -> None:
    """Refuse anything but block tables `[B, W]` int32 and context lengths `[B]` of an index type."""
    require_shape("block_tables", block_tables, (None, None))
    require_dtype("block_tables", block_tables, torch.int32)
    require_rows("block_tables", block_tables)
    require_shape("context_lens", context_lens, (block_tables.shape[0],))
    require_dtype("context_lens", context_lens, *INDEXES)


def check_sinks(sinks: torch.Tensor | None, num_q_heads: int) -> None:
    """Refuse sinks that are not one logit per query head, `[Hq]`."""
    if sinks is not None:
        require_shape("sinks", sinks, (num_q_heads,))
        require_dtype("sinks", sinks, *FLOATS)
        require_rows("sinks", sinks)


@triton.jit
def first_visible(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Oldest key that a query at `position` sees; 0 stands for no window and no chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def online_softmax(scores, maximum, total):
    """One step of the running softmax in base 2 (Milakov and Gimelshein, 2018).

    scores `[M, N]` with -inf where masked, maximum and total `[M]`. Returns the weights, the factor for what was
    accumulated before, and the new maximum and total. A row that has seen nothing yet keeps its -inf maximum.
    """
    new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
    # -inf minus -inf is NaN: shift such rows by 0, their weights are exp2(-inf) = 0 all the same.
    shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = tl.exp2(scores - shift[:, None])
    decay = tl.exp2(maximum - shift)
    return weights, decay, new_maximum, total * decay + tl.sum(weights, axis=1)


@triton.jit
def cdiv(a, b):
    """The quotient rounded up, for positive numbers."""
    return (a + b - 1) // b
