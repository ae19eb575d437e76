"""Attention on the CPU: blocks are gathered into runs, then torch's fused kernel attends.

Sequences with one new token are attended together, in groups of similar context length so that padding stays small.
The query heads that share a KV head stand in for query positions, so each key is read once per KV head. Sequences with
several new tokens are attended one by one; each is work enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from tandem_worker.attention.base import AttentionSpec
from tandem_worker.attention.visibility import first_visible, visible_mask
from tandem_worker.models.base import ForwardBatch

_MAX_PADDING = 0.25  # share of gathered keys that may be padding before a group is split
_MIN_SAVING = 512  # keys; a further group costs about as much as attending over this many


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indexes into `lengths`, longest first, split where padding to the longest would waste much."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    longest = waste = 0
    for index in order:
        length = lengths[index]
        padding = waste + longest - length
        if groups and (padding <= _MIN_SAVING or padding <= _MAX_PADDING * longest * (len(groups[-1]) + 1)):
            groups[-1].append(index)
            waste = padding
        else:
            groups.append([index])
            longest, waste = length, 0
    return groups


@dataclass(slots=True)
class _DecodeGroup:
    """Sequences with one new token. `rows` None: they are the whole batch, in order."""

    rows: torch.Tensor | None  # [G] their tokens in T
    blocks: torch.Tensor  # [G * blocks per sequence] int64
    mask: torch.Tensor | None  # [G, 1, 1, length] additive; None when nothing is hidden
    size: int
    length: int  # keys attended over, at most blocks * block_size


@dataclass(slots=True)
class _PrefillSequence:
    """A sequence with several new tokens. `blocks` None: its whole context is in this batch."""

    start: int
    stop: int
    blocks: torch.Tensor | None  # [blocks] int64
    mask: torch.Tensor | None  # [queries, length] additive; None means plain causal
    length: int


@dataclass(slots=True)
class _Layout:
    """How the batch is attended under one window and chunk."""

    decodes: list[_DecodeGroup]
    prefills: list[_PrefillSequence]


class CPUAttention:
    """Backend for CPUs."""

    def begin(self, batch: ForwardBatch, block_size: int) -> CPUStepAttention:
        return CPUStepAttention(batch, block_size)


class CPUStepAttention:
    """One step's attention; layouts are built when the first layer of a kind asks."""

    def __init__(self, batch: ForwardBatch, block_size: int) -> None:
        self._batch = batch
        self._block_size = block_size
        self._tables = batch.block_tables.to(torch.int64)
        self._layouts: dict[tuple[int | None, int | None, torch.dtype], _Layout] = {}

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        slots = kv_layer.view(-1, *kv_layer.shape[2:])
        slots.index_copy_(0, self._batch.slot_mapping, kv)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        key = (spec.window, spec.chunk, q.dtype)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._build_layout(spec, q.dtype)
        if not layout.prefills and len(layout.decodes) == 1:
            return _attend_decodes(layout.decodes[0], q, kv_layer, spec)
        out = q.new_empty(q.shape[0], spec.num_heads * spec.head_dim)
        for group in layout.decodes:
            assert group.rows is not None
            out.index_copy_(0, group.rows, _attend_decodes(group, q.index_select(0, group.rows), kv_layer, spec))
        for sequence in layout.prefills:
            out[sequence.start : sequence.stop] = _attend_prefill(sequence, q, kv, kv_layer, spec)
        return out

    def _build_layout(self, spec: AttentionSpec, dtype: torch.dtype) -> _Layout:
        batch = self._batch
        starts = [0]
        for length in batch.query_lens_host:
            starts.append(starts[-1] + length)
        decodes = [index for index, length in enumerate(batch.query_lens_host) if length == 1]
        prefills = [
            self._plan_prefill(index, starts[index], starts[index + 1], spec, dtype)
            for index, length in enumerate(batch.query_lens_host)
            if length > 1
        ]
        firsts = [first_visible(batch.context_lens_host[index] - 1, spec.window, spec.chunk) for index in decodes]
        lengths = [
            batch.context_lens_host[index] - first // self._block_size * self._block_size
            for index, first in zip(decodes, firsts, strict=True)
        ]
        groups = group_by_length(lengths)
        whole = len(groups) == 1 and not prefills
        return _Layout(
            decodes=[
                self._plan_decodes(
                    [decodes[member] for member in sorted(members)],
                    [firsts[member] for member in sorted(members)],
                    None if whole else [starts[decodes[member]] for member in sorted(members)],
                    dtype,
                )
                for members in groups
            ],
            prefills=prefills,
        )

    def _plan_decodes(
        self, sequences: list[int], firsts: list[int], rows: list[int] | None, dtype: torch.dtype
    ) -> _DecodeGroup:
        """Gather list and mask of sequences `sequences` whose oldest visible keys are `firsts`."""
        size = self._block_size
        contexts = [self._batch.context_lens_host[index] for index in sequences]
        skipped = [first // size for first in firsts]
        longest = max(context - skip * size for context, skip in zip(contexts, skipped, strict=True))
        num_blocks = -(-longest // size)
        if any(skipped) or len(sequences) != self._tables.shape[0]:
            columns = torch.tensor(skipped).unsqueeze(1) + torch.arange(num_blocks)
            columns.clamp_(max=self._tables.shape[1] - 1)
            blocks = self._tables[torch.tensor(sequences)].gather(1, columns)
        else:
            blocks = self._tables[:, :num_blocks]
        hidden_heads = [first - skip * size for first, skip in zip(firsts, skipped, strict=True)]
        ends = [context - skip * size for context, skip in zip(contexts, skipped, strict=True)]
        mask = None
        if any(hidden_heads) or any(end != longest for end in ends):
            keys = torch.arange(longest)
            hidden = keys >= torch.tensor(ends).unsqueeze(1)
            hidden |= keys < torch.tensor(hidden_heads).unsqueeze(1)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None, None]
        return _DecodeGroup(
            rows=None if rows is None else torch.tensor(rows),
            blocks=blocks.flatten(),
            mask=mask,
            size=len(sequences),
            length=longest,
        )

    def _plan_prefill(
        self, index: int, start: int, stop: int, spec: AttentionSpec, dtype: torch.dtype
    ) -> _PrefillSequence:
        context = self._batch.context_lens_host[index]
        position = context - (stop - start)
        hides = (spec.window is not None and context > spec.window) or (spec.chunk is not None and context > spec.chunk)
        if position == 0 and not hides:
            return _PrefillSequence(start=start, stop=stop, blocks=None, mask=None, length=context)
        size = self._block_size
        skipped = first_visible(position, spec.window, spec.chunk) // size
        blocks = self._tables[index, skipped : -(-context // size)]
        queries, keys = torch.arange(position, context), torch.arange(skipped * size, context)
        mask = visible_mask(queries, keys, spec.window, spec.chunk, dtype)
        return _PrefillSequence(start=start, stop=stop, blocks=blocks, mask=mask, length=context - skipped * size)


def _attend_decodes(group: _DecodeGroup, q: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """`q` `[G, Hq, D]` to `[G, Hq * D]`."""
    gathered = kv_layer.index_select(0, group.blocks)
    gathered = gathered.view(group.size, -1, *kv_layer.shape[2:])[:, : group.length].permute(2, 0, 3, 1, 4)
    shared = q.view(group.size, spec.num_kv_heads, -1, spec.head_dim)
    out = _fused_attention(shared, gathered[0], gathered[1], group.mask, spec, causal=False)
    return out.reshape(group.size, -1)


def _attend_prefill(
    sequence: _PrefillSequence, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """The sequence's rows of the output, `[queries, Hq * D]`."""
    if sequence.blocks is None:
        context = kv[sequence.start : sequence.stop]
    else:
        context = kv_layer.index_select(0, sequence.blocks).flatten(0, 1)[: sequence.length]
    heads = context.permute(1, 2, 0, 3).unsqueeze(1)  # [2, 1, Hk, length, D]
    queries = q[sequence.start : sequence.stop].transpose(0, 1).unsqueeze(0)
    out = _fused_attention(queries, heads[0], heads[1], sequence.mask, spec, causal=sequence.mask is None)
    return out.squeeze(0).transpose(0, 1).flatten(1)


def _fused_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
    *,
    causal: bool,
) -> torch.Tensor:
    """`[B, H, Q, D]` over `[B, Hk, K, D]`; with sinks the output shrinks by their share of the softmax."""
    grouped = q.shape[1] != k.shape[1]
    if spec.sinks is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    if mask is not None:
        mask = mask.expand(q.shape[0], 1, q.shape[2], k.shape[2])
    out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=causal, attn_mask=mask, scale=spec.scale
    )
    sinks = spec.sinks.float().view(1, *((-1, 1) if causal or q.shape[1] == spec.num_heads else (k.shape[1], -1)))
    kept = torch.sigmoid(logsumexp.view(*out.shape[:3]) - sinks)
    return (
        (out * kept.unsqueeze(-1).to(out.dtype))
        if out.dtype == torch.float32
        else (out * kept.unsqueeze(-1)).to(out.dtype)
    )
