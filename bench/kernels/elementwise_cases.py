"""Norms, activations, rotation and writes to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference

from bench.kernels.case import Case, Place, Tensors, wide

_UNTOUCHED = 7.0
"""What lies in a cache before it is written to."""


def elementwise(place: Place) -> Iterator[Case]:
    hidden, width = place.sizes.hidden, place.sizes.intermediate
    for tokens in place.sizes.tokens:
        size = tokens * hidden * 2
        yield Case(
            name=f"rms_norm [{tokens}, {hidden}]", bytes=2 * size,
            make=lambda t=tokens: (place.randn(t, hidden), place.randn(hidden)),
            run=lambda x, w: kernels.rms_norm(x, w, 1e-5),
            expect=lambda x, w: (reference.rms_norm_reference(*wide(x, w), 1e-5),),
        )  # fmt: skip
        yield Case(
            name=f"residual_rms_norm [{tokens}, {hidden}]", bytes=4 * size, writes=(1,),
            make=lambda t=tokens: (place.randn(t, hidden), place.randn(t, hidden), place.randn(hidden)),
            run=lambda x, r, w: kernels.residual_rms_norm(x, r, w, 1e-5),
            outputs=lambda result, x, r, w: (result, r),
            expect=_residual_norm,
        )  # fmt: skip
        wide_size = tokens * width * 2
        for op, twin in (
            (kernels.silu_mul, reference.silu_mul_reference),
            (kernels.swiglu_clamped, reference.swiglu_clamped_reference),
        ):
            yield Case(
                name=f"{op.__name__} [{tokens}, 2 x {width}]", bytes=3 * wide_size,
                make=lambda t=tokens: (place.randn(t, 2 * width),), run=op,
                expect=lambda x, twin=twin: (twin(*wide(x)),),
            )  # fmt: skip
        yield from _attention_inputs(place, tokens)
        yield _row_copies(place, tokens, hidden)


def _row_copies(place: Place, rows: int, width: int) -> Case:
    """Blocks on their way to host memory: pieces of rows into other rows, twice as wide."""

    def make() -> tuple[torch.Tensor, ...]:
        pairs = torch.stack([torch.randperm(rows, device=place.device) for _ in range(2)], 1)
        source = place.integers(0, 1 << 30, (rows, width), dtype=torch.int32)
        return pairs, source, place.integers(0, 1 << 30, (rows, 2 * width), dtype=torch.int32)

    def expect(pairs: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> Tensors:
        copied = target.clone()
        reference.copy_rows_reference(pairs, source, 0, copied, width, width)
        return (copied,)

    return Case(
        name=f"copy_rows [{rows}, {width}]", bytes=2 * rows * width * 4, make=make, writes=(2,),
        run=lambda pairs, source, target: kernels.copy_rows(pairs, source, 0, target, width, width),
        outputs=lambda result, pairs, source, target: (target,), expect=expect, limit=0.0,
    )  # fmt: skip


def _residual_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """The sum is rounded to the stream's type before its norm is taken: everything after reads it so."""
    total = (x.double() + residual.double()).to(residual.dtype)
    return reference.rms_norm_reference(*wide(total, weight), 1e-5), total


def _attention_inputs(place: Place, tokens: int) -> Iterator[Case]:
    """Rotary embedding, KV writes and their fusion for the first model."""
    sizes = place.sizes
    _, heads, kv_heads, dim = sizes.models[0]
    latent, block_size = sum(sizes.latent), sizes.block_size
    blocks = 4 * tokens // block_size + 8
    row = tokens * dim * 2
    angles = tokens * dim // 2 * 2 * 4

    def tables() -> tuple:
        shape = (sizes.positions, dim // 2)
        cos, sin = (place.randn(*shape, dtype=torch.float32) for _ in range(2))
        return cos, sin, place.integers(0, sizes.positions, (tokens,))

    def slots() -> torch.Tensor:
        return torch.randperm(blocks * block_size, device=place.device)[:tokens]

    def cache(*shape: int) -> torch.Tensor:
        return torch.full(shape, _UNTOUCHED, dtype=torch.bfloat16, device=place.device)

    def paged() -> torch.Tensor:
        return cache(blocks, 2, kv_heads, block_size, dim)

    def norms() -> tuple:
        return place.randn(dim), place.randn(dim)

    yield Case(
        name=f"rope [{tokens}, {heads} + {kv_heads}, {dim}]", bytes=2 * (heads + kv_heads) * row + angles,
        make=lambda: (place.randn(tokens, heads, dim), place.randn(tokens, kv_heads, dim), *tables()),
        run=kernels.rope, writes=(0, 1), outputs=lambda result, q, k, *rest: (q, k),
        expect=_in_place(reference.rope_reference, 0, 1),
    )  # fmt: skip
    yield Case(
        name=f"kv_write [{tokens}, {kv_heads}, {dim}]", bytes=4 * kv_heads * row,
        make=lambda: (*(place.randn(tokens, kv_heads, dim) for _ in range(2)), paged(), slots()),
        run=kernels.kv_write, writes=(2,), outputs=lambda result, k, v, written, slots: (written,),
        expect=_in_place(reference.kv_write_reference, 2), limit=0.0,
    )  # fmt: skip
    yield Case(
        name=f"latent_write [{tokens}, {latent}]", bytes=2 * tokens * latent * 2,
        make=lambda: (place.randn(tokens, latent), cache(blocks, block_size, latent), slots()),
        run=kernels.latent_write, writes=(1,), outputs=lambda result, new, written, slots: (written,),
        expect=_in_place(reference.latent_write_reference, 1), limit=0.0,
    )  # fmt: skip
    fused = heads + 2 * kv_heads
    yield Case(
        name=f"fused_qkv_norm_rope_kv_write [{tokens}, {fused}, {dim}]", bytes=2 * fused * row + angles,
        make=lambda: (place.randn(tokens, fused * dim), *tables(), paged(), slots(), *norms()),
        run=lambda *values: kernels.fused_qkv_norm_rope_kv_write(*values[:6], q_norm=values[6], k_norm=values[7]),
        writes=(4,), outputs=lambda result, *values: (result, values[4]), expect=_fused,
    )  # fmt: skip


def _in_place(twin: Callable[..., None], *places: int) -> Callable[..., Tensors]:
    """What the twin leaves in float64 copies of these arguments."""

    def expect(*values: torch.Tensor) -> Tensors:
        exact = wide(*values)
        twin(*exact)
        return tuple(exact[place] for place in places)

    return expect


def _fused(*values: torch.Tensor) -> Tensors:
    exact = wide(*values)
    q = reference.fused_qkv_norm_rope_kv_write_reference(*exact[:6], q_norm=exact[6], k_norm=exact[7])
    return q, exact[4]
