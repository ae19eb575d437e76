"""Twins of the attention kernels over the paged block space: one sequence after another, the whole score matrix."""

from __future__ import annotations

import torch

from .elementwise import compute_dtype


def visible(query_positions: torch.Tensor, num_keys: int, window: int | None, chunk: int | None) -> torch.Tensor:
    """Which of the keys 0..num_keys-1 each query may see, `[Q, K]` bool: causal, then window, then chunk.

    `window` counts keys including the query's own; `chunk` cuts the sequence into pieces that do not see each other.
    """
    keys = torch.arange(num_keys, device=query_positions.device)
    queries = query_positions[:, None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    if chunk is not None:
        mask &= keys >= queries // chunk * chunk
    return mask


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores `[H, Q, K]` where mask `[Q, K]`; a sink `[H]` adds exp(sink) to the sum and no value."""
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]


def gather_kv(kv_cache: torch.Tensor, block_table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values `[Hk, length, D]` of one sequence from kv_cache `[N, 2, Hk, S, D]`."""
    block_size = kv_cache.shape[3]
    blocks = block_table[: -(-length // block_size)].long()
    kv = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    return kv[0], kv[1]


def paged_prefill_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    context_lens: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `paged_prefill_attention`: q `[T, Hq, D]`, query_start `[B + 1]`, context_lens `[B]` -> `[T, Hq, D]`.

    Rows of T that belong to no sequence come back as zeros.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format) if out is None else out.zero_()
    wide = compute_dtype(q)
    group = q.shape[1] // kv_cache.shape[2]
    starts, lengths = query_start.tolist(), context_lens.tolist()
    for row, length in enumerate(lengths):
        start, end = starts[row], starts[row + 1]
        if length == 0 or start == end:
            continue
        k, v = (x.to(wide).repeat_interleave(group, dim=0) for x in gather_kv(kv_cache, block_tables[row], length))
        positions = torch.arange(length - (end - start), length, device=q.device)
        scores = q[start:end].to(wide).transpose(0, 1) @ k.transpose(1, 2) * scale
        weights = masked_softmax(scores, visible(positions, length, window, chunk), sinks)
        out[start:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def paged_decode_attention_reference(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_start: torch.Tensor | None = None,
    sequence_ids: torch.Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    work: object = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of `paged_decode_attention`: q `[T, Hq, D]`, the last tokens of each sequence -> `[T, Hq, D]`."""
    del num_splits, work, sequence_ids
    if query_start is None:
        query_start = torch.arange(q.shape[0] + 1, device=q.device)
    return paged_prefill_attention_reference(
        q,
        kv_cache,
        block_tables,
        query_start,
        context_lens,
        scale=scale,
        window=window,
        chunk=chunk,
        sinks=sinks,
        out=out,
    )
