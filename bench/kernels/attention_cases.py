"""Attention over the paged cache as the engine lays it out: `[N, 2, Hk, S, D]`, and MLA's `[N, S, L + R]`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference
from torch.nn import functional

from bench.kernels.case import Case, Place, Tensors, wide

_HEADS_AT_ONCE = 16
"""Of an oracle that holds a whole score matrix per head in float64."""


def decode_attention(place: Place) -> Iterator[Case]:
    sizes = place.sizes
    for name, heads, kv_heads, dim in sizes.models:
        for batch, context in sizes.decodes:
            yield _decode(place, f"{name} B={batch} C={context}", (heads, kv_heads, dim), [context] * batch)
    name, heads, kv_heads, dim = sizes.models[0]
    batch, shortest, longest = sizes.ragged
    step = (longest - shortest) // max(1, batch - 1)
    contexts = [shortest + row * step for row in range(batch - 1)] + [longest]
    yield _decode(place, f"{name} B={batch} C={shortest} to {longest}", (heads, kv_heads, dim), contexts)
    for batch, context, width in sizes.guessed:
        title = f"{name} B={batch} C={context} tokens={width}"
        yield _decode(place, title, (heads, kv_heads, dim), [context] * batch, width)
    for batch, context, longest in sizes.recorded:
        title = f"{name} B={batch} C={context} of {longest}"
        yield _decode(place, title, (heads, kv_heads, dim), [context] * batch, longest=longest)
    for heads in sizes.latent_heads:
        for batch, context in sizes.latent_decodes:
            yield _latent_decode(place, heads, batch, context)


def _decode(
    place: Place, name: str, shape: tuple[int, int, int], contexts: list[int], width: int = 1, longest: int = 0
) -> Case:
    """The last `width` tokens of each sequence. What is to be read has been listed for other layers of the step."""
    heads, kv_heads, dim = shape
    block_size = place.sizes.block_size

    def make() -> tuple:
        tables, num_blocks = place.tables(contexts, block_size)
        tables = functional.pad(tables, (0, max(0, longest // block_size - tables.shape[1])))
        cache = place.randn(num_blocks, 2, kv_heads, block_size, dim)
        starts = place.ints(*range(0, width * len(contexts) + 1, width))
        ids = place.ints(*(sequence for sequence in range(len(contexts)) for _ in range(width)))
        return place.randn(len(ids), heads, dim), cache, tables, place.ints(*contexts), starts, ids, {}

    scale = dim**-0.5
    return Case(
        name=f"paged_decode_attention {name}",
        bytes=sum(contexts) * kv_heads * dim * 2 * 2,
        flops=4 * width * sum(contexts) * heads * dim,
        make=make,
        run=lambda *values, **options: kernels.paged_decode_attention(
            *values[:-1], scale=scale, work=values[-1], **options
        ),
        expect=lambda q, cache, tables, lens, *rest: _decode_rows(q, cache, tables, lens, scale, width),
    )


def _decode_rows(
    q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, scale: float, width: int
) -> Tensors:
    """One sequence's blocks at a time in float64: the whole cache would take four times its memory."""
    rows = []
    starts = torch.tensor([0, width], dtype=torch.int32, device=q.device)
    for row, length in enumerate(lens.tolist()):
        used = tables[row, : -(-length // cache.shape[3])].long()
        table = torch.arange(len(used), dtype=torch.int32, device=q.device)[None]
        own = q[row * width : (row + 1) * width].double(), cache[used].double(), table, lens[row : row + 1], starts
        rows.append(reference.paged_decode_attention_reference(*own, scale=scale))
    return (torch.cat(rows),)


def _latent_decode(place: Place, heads: int, batch: int, context: int) -> Case:
    latent, rope = place.sizes.latent
    block_size, contexts = place.sizes.latent_block_size, [context] * batch
    scale = (latent + rope) ** -0.5

    def make() -> tuple:
        tables, num_blocks = place.tables(contexts, block_size)
        cache = place.randn(num_blocks, block_size, latent + rope)
        return place.randn(batch, heads, latent + rope), cache, tables, place.ints(*contexts)

    def expect(q: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> Tensors:
        return (
            reference.mla_decode_attention_reference(*wide(q, cache), tables, lens, latent_dim=latent, scale=scale),
        )

    return Case(
        name=f"mla_decode_attention H={heads} B={batch} C={context}",
        bytes=batch * context * (latent + rope) * 2,
        flops=2 * batch * context * heads * (2 * latent + rope),
        make=make,
        run=lambda *values, **options: kernels.mla_decode_attention(*values, latent_dim=latent, scale=scale, **options),
        expect=expect,
    )


def prefill_attention(place: Place) -> Iterator[Case]:
    sizes = place.sizes
    shapes = dict.fromkeys((heads, kv_heads, dim) for _, heads, kv_heads, dim in (sizes.models[0], sizes.models[-1]))
    for heads, kv_heads, dim in shapes:
        for new, context in sizes.prefills:
            yield _prefill(place, (heads, kv_heads, dim), new, context)
    yield _latent_prefill(place)
    latent, context = sum(sizes.latent), sizes.latent_gather

    def make() -> tuple:
        tables, num_blocks = place.tables([context], sizes.latent_block_size)
        return place.randn(num_blocks, sizes.latent_block_size, latent), tables, place.ints(0, context)

    yield Case(
        name=f"latent_gather C={context}", bytes=2 * context * latent * 2, make=make,
        run=lambda cache, tables, starts: kernels.latent_gather(cache, tables, starts, context),
        expect=lambda cache, tables, starts: (
            reference.latent_gather_reference(cache, tables, starts, context),
        ),
        limit=0.0,
    )  # fmt: skip


def _prefill(place: Place, shape: tuple[int, int, int], new: int, context: int) -> Case:
    heads, kv_heads, dim = shape
    group, block_size, scale = heads // kv_heads, place.sizes.block_size, dim**-0.5

    def make() -> tuple:
        tables, num_blocks = place.tables([context], block_size)
        cache = place.randn(num_blocks, 2, kv_heads, block_size, dim)
        return place.randn(new, heads, dim), cache, tables, place.ints(0, new), place.ints(context)

    def expect(q: torch.Tensor, cache: torch.Tensor, *batch: torch.Tensor) -> Tensors:
        """One KV head at a time: the scores of all would not fit."""
        parts = [
            reference.paged_prefill_attention_reference(
                *wide(q[:, head * group : (head + 1) * group], cache[:, :, head : head + 1]), *batch, scale=scale
            )
            for head in range(kv_heads)
        ]
        return (torch.cat(parts, dim=1),)

    seen = new * (context - new) + new * (new + 1) / 2
    return Case(
        name=f"paged_prefill_attention {heads}/{kv_heads} D={dim} new={new} C={context}",
        bytes=(2 * new * heads + 2 * context * kv_heads) * dim * 2,
        flops=4 * seen * heads * dim,
        make=make,
        run=lambda q, cache, *batch: kernels.paged_prefill_attention(q, cache, *batch, scale=scale),
        expect=expect,
    )


def _latent_prefill(place: Place) -> Case:
    sizes, new = place.sizes, place.sizes.latent_prefill
    heads, rope, (key_dim, value_dim) = sizes.latent_heads[0], sizes.latent[1], sizes.latent_head_dims
    scale = (key_dim + rope) ** -0.5

    def make() -> tuple:
        starts = place.ints(0, new)
        kv = place.randn(new, heads, key_dim + value_dim)
        return place.randn(new, heads, key_dim + rope), kv, place.randn(new, rope), starts, starts

    def expect(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, *starts: torch.Tensor) -> Tensors:
        parts = [
            reference.mla_prefill_attention_reference(
                *wide(q[:, head : head + _HEADS_AT_ONCE], kv[:, head : head + _HEADS_AT_ONCE], k_rope),
                *starts,
                scale=scale,
            )
            for head in range(0, heads, _HEADS_AT_ONCE)
        ]
        return (torch.cat(parts, dim=1),)

    return Case(
        name=f"mla_prefill_attention H={heads} new={new}",
        bytes=new * (heads * (key_dim + rope + key_dim + 2 * value_dim) + rope) * 2,
        flops=2 * new * (new + 1) / 2 * heads * (key_dim + rope + value_dim),
        make=make,
        run=lambda q, kv, k_rope, *starts: kernels.mla_prefill_attention(q, kv, k_rope, *starts, scale=scale),
        expect=expect,
    )
