"""Attention on the CPU: blocks are gathered into runs per head, then attended by batched matrix products.

The query heads that share a KV head stand in one matrix, so each key is read once per KV head. Measured on two AVX-512
cores, 32 sequences of 256 keys: 0.4 ms for the products and the softmax where torch's fused kernel takes 2 ms.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from tandem_worker.model.attention import AttentionSpec, LatentSpec
from tandem_worker.model.backends.torch.layout import DecodeGroup, Layout, LayoutBuilder, PrefillSequence, QueryTile
from tandem_worker.model.contract import ForwardBatch

_FUSED_KEYS = 640  # torch's fused kernel has less to launch; beyond so many keys in a decode group it is the slower one
_APART_KEYS = 1024  # from so many keys on, heads of a prefill tile are attended one by one
_GROUP_BYTES = 4 << 20  # gathered keys and values of a decode group: they should stay in the cache


class TorchAttention:
    """Backend for CPUs. Holds the buffer that blocks are gathered into, so that steps touch no fresh memory."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def begin(self, batch: ForwardBatch, block_size: int) -> TorchStepAttention:
        return TorchStepAttention(self, batch, block_size)

    def gather(self, kv_layer: torch.Tensor, runs: torch.Tensor) -> torch.Tensor:
        """Runs of keys or values, `[len(runs), block_size * head_dim]`. Valid until the next call."""
        source = kv_layer.view(-1, kv_layer.shape[-2] * kv_layer.shape[-1])
        count = runs.shape[0] * source.shape[1]
        if self._buffer.dtype != source.dtype or self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=source.dtype)
        out = self._buffer[:count].view(runs.shape[0], source.shape[1])
        return torch.index_select(source, 0, runs, out=out)


class TorchStepAttention:
    """One step's attention; layouts are built when the first layer of a kind asks."""

    def __init__(self, backend: TorchAttention, batch: ForwardBatch, block_size: int) -> None:
        self._backend = backend
        self._batch = batch
        self._block_size = block_size
        self._layouts: dict[tuple[int | None, int | None], Layout] = {}
        self._rows: torch.Tensor | None = None

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        if self._rows is None:
            self._rows = self._target_rows(kv.shape[1] * kv.shape[2])
        dim = kv.shape[-1]
        kv_layer.view(-1, dim).index_copy_(0, self._rows, kv.reshape(-1, dim))

    def _target_rows(self, num_heads: int) -> torch.Tensor:
        """Rows of the layer seen as `[N * 2 * Hk * S, D]`, for each new token and head."""
        slots, size = self._batch.slot_mapping, self._block_size
        blocks = slots.div(size, rounding_mode="floor")
        heads = blocks.unsqueeze(1) * num_heads + torch.arange(num_heads)
        return (heads * size + (slots - blocks * size).unsqueeze(1)).flatten()

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        layout = self._layouts.get((spec.window, spec.chunk))
        if layout is None:
            builder = LayoutBuilder(self._batch, self._block_size, spec, q.dtype)
            layout = builder.build(_GROUP_BYTES // (2 * spec.num_kv_heads * spec.head_dim * q.itemsize))
            self._layouts[spec.window, spec.chunk] = layout
        if not layout.prefills and len(layout.decodes) == 1:
            return self._attend_decodes(layout.decodes[0], q, kv_layer, spec)
        out = q.new_empty(q.shape[0], spec.num_heads * (spec.value_dim or spec.head_dim))
        for group in layout.decodes:
            assert group.rows is not None
            out.index_copy_(0, group.rows, self._attend_decodes(group, q.index_select(0, group.rows), kv_layer, spec))
        for sequence in layout.prefills:
            out[sequence.start : sequence.stop] = self._attend_prefill(sequence, q, kv, kv_layer, spec)
        return out

    def attend_latents(
        self, queries: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: LatentSpec
    ) -> torch.Tensor:
        attended = self.attend(spec.absorb(queries), kv, kv_layer, spec.attention)
        return spec.bring_out(attended.view(queries.shape[0], spec.attention.num_heads, -1))

    def _attend_decodes(
        self, group: DecodeGroup, q: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """`q` `[G, Hq, D]` to `[G, Hq * D]`."""
        gathered = self._backend.gather(kv_layer, group.runs)
        if group.unwritten is not None:
            gathered.view(-1, spec.head_dim).index_fill_(0, group.unwritten, 0.0)
        if group.size * group.num_keys <= _FUSED_KEYS and spec.sinks is None and spec.value_dim is None:
            return _fused_decodes(group, q, gathered, spec)
        keys, values = _keys_and_values(
            gathered.view(-1, group.size * spec.num_kv_heads, group.num_keys, spec.head_dim), spec
        )
        scores = _scores(q.reshape(keys.shape[0], -1, spec.head_dim), keys, spec.scale)
        if group.mask is not None:
            scores.view(group.size, spec.num_heads, -1).add_(group.mask)
        sinks = None if spec.sinks is None else spec.sinks.view(spec.num_kv_heads, -1, 1).repeat(group.size, 1, 1)
        return _weigh(_softmax(scores, sinks), values).view(group.size, -1)

    def _attend_prefill(
        self, sequence: PrefillSequence, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """The sequence's rows of the output, `[queries, Hq * D]`."""
        if sequence.runs is None:
            context = kv[sequence.start : sequence.stop].permute(1, 2, 0, 3)
        else:
            gathered = self._backend.gather(kv_layer, sequence.runs)
            num_keys = -(-sequence.length // self._block_size) * self._block_size
            context = gathered.view(-1, spec.num_kv_heads, num_keys, spec.head_dim)[:, :, : sequence.length]
        queries = q[sequence.start : sequence.stop]
        if q.dtype == torch.float32 and sequence.runs is None and _is_plain_causal(sequence, spec):
            return _fused_causal(queries, context, spec)
        return _attend_tiles(sequence, queries, context.contiguous(), spec)


def _keys_and_values(context: torch.Tensor, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Both from `[2, batch, K, D]`, or from MLA's `[1, batch, K, D]`."""
    if spec.value_dim is None:
        return context[0], context[1]
    return context[0], context[0, ..., : spec.value_dim]


def _fused_decodes(group: DecodeGroup, q: torch.Tensor, gathered: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """`q` `[G, Hq, D]` to `[G, Hq * D]` by torch's kernel: the heads that share a KV head are its queries."""
    context = gathered.view(2, group.size, spec.num_kv_heads, group.num_keys, spec.head_dim)
    mask = None if group.mask is None else group.mask.unsqueeze(1)
    queries = q.unflatten(1, (spec.num_kv_heads, -1))
    out = functional.scaled_dot_product_attention(queries, context[0], context[1], attn_mask=mask, scale=spec.scale)
    return out.reshape(group.size, -1)


def _is_plain_causal(sequence: PrefillSequence, spec: AttentionSpec) -> bool:
    """Whether every query sees all keys before it, and nothing but keys takes part in the softmax."""
    narrowest = min(spec.window or sequence.length, spec.chunk or sequence.length)
    return sequence.length <= narrowest and spec.sinks is None and spec.value_dim is None


def _fused_causal(q: torch.Tensor, context: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Causal attention of `[n, Hq, D]` over `[2, Hk, n, D]` by torch's kernel: in float32 it is the faster one."""
    out = functional.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        context[0].unsqueeze(0),
        context[1].unsqueeze(0),
        is_causal=True,
        scale=spec.scale,
        enable_gqa=spec.num_heads != spec.num_kv_heads,
    )
    return out.squeeze(0).transpose(0, 1).flatten(1)


def _attend_tiles(
    sequence: PrefillSequence, q: torch.Tensor, context: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """`q` `[n, Hq, D]` over `[2 or 1, Hk, length, D]`, a tile of queries at a time, to `[n, Hq * D]`."""
    keys, values = _keys_and_values(context, spec)
    num_kv_heads, dim = spec.num_kv_heads, values.shape[-1]
    grouped = q.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).contiguous()  # [Hk, n, group, D]
    out = grouped.new_empty(*grouped.shape[:-1], dim)
    for tile in sequence.tiles:
        # A run of keys of several heads is not contiguous, and is copied before a batched product: of few keys that
        # costs less than the products one by one.
        apart = num_kv_heads > 1 and tile.last - tile.first >= _APART_KEYS
        for first, last in [(head, head + 1) for head in range(num_kv_heads)] if apart else [(0, num_kv_heads)]:
            _attend_tile(
                tile,
                grouped[first:last, tile.start : tile.stop],
                keys[first:last, tile.first : tile.last],
                values[first:last, tile.first : tile.last],
                None if spec.sinks is None else spec.sinks.view(num_kv_heads, 1, -1, 1)[first:last],
                spec.scale,
                out[first:last, tile.start : tile.stop],
            )
    return out.transpose(0, 1).reshape(q.shape[0], -1)


def _attend_tile(
    tile: QueryTile,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
    scale: float,
    out: torch.Tensor,
) -> None:
    """`q` `[heads, queries, group, D]` over `[heads, keys, D]` into `out`; `sinks` `[heads, 1, group, 1]`."""
    heads, count = q.shape[:2]
    scores = _scores(q.flatten(1, 2), keys, scale)
    if tile.mask is not None:
        scores.view(heads, count, -1, scores.shape[-1])[..., -tile.mask.shape[-1] :].add_(tile.mask)
    if sinks is not None:
        sinks = sinks.expand(-1, count, -1, -1).reshape(heads, -1, 1)
    out.copy_(_weigh(_softmax(scores, sinks), values).view_as(out))


def _scores(q: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * q keys^T` for `[batch, Q, D]` and `[batch, K, D]`."""
    if q.shape[0] == 1:  # torch copies the one operand of a batched product that is a part of a larger tensor
        return torch.addmm(q.new_zeros(1, 1), q[0], keys[0].t(), beta=0, alpha=scale).unsqueeze(0)
    return torch.baddbmm(q.new_zeros(1, 1, 1), q, keys.transpose(1, 2), beta=0, alpha=scale)


def _weigh(shares: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`shares values` for `[batch, Q, K]` and `[batch, K, D]`."""
    if shares.shape[0] == 1:
        return torch.mm(shares[0], values[0]).unsqueeze(0)
    return torch.bmm(shares, values)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over keys; `sinks` `[batch, Q, 1]` are one further logit each, whose share is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.to(scores.dtype)), dim=-1).softmax(-1)[..., :-1]
