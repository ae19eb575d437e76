"""Quantized layouts as published, brought into the forms that kernels multiply, without a change of value.

Functions return None where a layout has no such form; the caller then dequantizes. `tandem_worker.kernels.quantized`
describes the forms; this module is imported only where they are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem_worker.kernels.quantized import Fp8Weight, Int4Weight, Mxfp4Weight, SplitByteWeight, Weight
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.checkpoint.unpacking import awq_values, unpack_words

_LEAST_GROUP = 16
"""Columns under one scale that the kernels take, and powers of two only."""
_SYMMETRIC = 8
_MXFP4_GROUP = 32


def pack_words(values: torch.Tensor) -> torch.Tensor:
    """Four-bit values `[N, K]` to int32 words `[N, K / 8]`, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return (values.to(torch.int32).unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def int4_groups(packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None) -> Int4Weight | None:
    """compressed-tensors, already packed along K; `zeros` `[N / 8, K / group]` are packed along N."""
    zero = None if zeros is None else unpack_words(zeros.t().contiguous(), 4).t()[: packed.shape[0]]
    return _int4(packed, scale, zero)


def gptq(
    words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor | None, *, offset: int
) -> Int4Weight | None:
    """GPTQ, words `[K / 8, N]`: packed along K but transposed.

    None where rows were reordered (act order): groups are no runs then.
    """
    columns = words.shape[0] * 8
    size = columns // scales.shape[0]
    if groups is not None and not torch.equal(groups.long(), torch.arange(columns) // size):
        return None
    zero = unpack_words(zeros, 4)[:, : words.shape[1]] + offset
    return _int4(words.t(), scales.t(), zero.t())


def awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> Int4Weight | None:
    """AWQ, words `[K, N / 8]`: packed along N with columns interleaved."""
    return _int4(pack_words(awq_values(words).t()), scales.t(), awq_values(zeros).t())


def _int4(packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Int4Weight | None:
    columns = packed.shape[1] * 8
    if columns % scale.shape[1]:
        return None
    group = columns // scale.shape[1]
    taken = group & -group  # the largest power of two that divides it: scales are repeated over the smaller groups
    if taken < _LEAST_GROUP:
        return None
    scale = scale.repeat_interleave(group // taken, 1)
    if zero is not None:
        zero = None if bool((zero == _SYMMETRIC).all()) else zero.repeat_interleave(group // taken, 1)
    return Int4Weight(
        packed=packed.contiguous(),
        scale=scale.contiguous(),
        zero=None if zero is None else zero.to(torch.uint8).contiguous(),
    )


def fp8_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> Fp8Weight | None:
    """float8_e4m3fn `[N, K]` with a scale per square block whose side is a power of two."""
    tile = block[0]
    if weight.dtype != torch.float8_e4m3fn or block[1] != tile or tile < _LEAST_GROUP or tile & (tile - 1):
        return None
    return Fp8Weight(data=weight.contiguous(), scale=scale.float().contiguous(), tile=tile)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> Mxfp4Weight:
    """OCP MXFP4 blocks `[..., N, K / 32, 16]` with exponents `[..., N, K / 32]`."""
    return Mxfp4Weight(packed=blocks.flatten(-2).contiguous(), scale=scales.contiguous())


def narrow(weight: Weight, part: Slice | None) -> Weight | None:
    """Rows (dim 0) or columns (dim 1) of a `[N, K]` weight; None where a scale would be cut in two."""
    if part is None:
        return weight
    start, count = part.start, part.stop - part.start
    if isinstance(weight, torch.Tensor):
        return weight.narrow(part.dim, start, count)
    if isinstance(weight, Fp8Weight):
        tile = weight.tile
        if start % tile or (part.stop % tile and part.stop != weight.shape[part.dim]):
            return None
        scale = weight.scale.narrow(part.dim, start // tile, -(-count // tile)).contiguous()
        return replace(weight, data=weight.data.narrow(part.dim, start, count).contiguous(), scale=scale)
    assert not isinstance(weight, SplitByteWeight), "that is made of what this returns"
    per_word = 8 if isinstance(weight, Int4Weight) else 2
    group = weight.group if isinstance(weight, Int4Weight) else _MXFP4_GROUP
    if part.dim == 1 and (start % group or count % group):
        return None

    def cut(tensor: torch.Tensor, unit: int) -> torch.Tensor:
        unit = unit if part.dim == 1 else 1
        return tensor.narrow(part.dim, start // unit, count // unit).contiguous()

    narrowed = replace(weight, packed=cut(weight.packed, per_word), scale=cut(weight.scale, group))
    if isinstance(narrowed, Int4Weight) and narrowed.zero is not None:
        return replace(narrowed, zero=cut(narrowed.zero, group))
    return narrowed


def concatenate(weights: Sequence[Weight | None]) -> Weight | None:
    """`[N_i, K]` one below the other; None where forms or groups differ, or where scales would not line up."""
    first = weights[0]
    if first is None or any(type(weight) is not type(first) for weight in weights):
        return None
    if len(weights) == 1:
        return first
    if isinstance(first, Fp8Weight):
        rest = [weight for weight in weights if isinstance(weight, Fp8Weight)]
        if any(weight.tile != first.tile or weight.shape[0] % first.tile for weight in rest[:-1]):
            return None
        return replace(first, data=torch.cat([w.data for w in rest]), scale=torch.cat([w.scale for w in rest]))
    if isinstance(first, Int4Weight):
        parts = [weight for weight in weights if isinstance(weight, Int4Weight)]
        if any(weight.group != first.group or weight.scale.dtype != first.scale.dtype for weight in parts):
            return None
        zero = None
        if any(weight.zero is not None for weight in parts):
            zero = torch.cat([
                torch.full(w.scale.shape, _SYMMETRIC, dtype=torch.uint8) if w.zero is None else w.zero for w in parts
            ])  # fmt: skip
        packed, scale = torch.cat([w.packed for w in parts]), torch.cat([w.scale for w in parts])
        return Int4Weight(packed=packed, scale=scale, zero=zero)
    if isinstance(first, Mxfp4Weight):
        same = [weight for weight in weights if isinstance(weight, Mxfp4Weight)]
        return Mxfp4Weight(packed=torch.cat([w.packed for w in same]), scale=torch.cat([w.scale for w in same]))
    return torch.cat([weight for weight in weights if isinstance(weight, torch.Tensor)])


def select_rows(weight: Weight, rows: torch.Tensor) -> Weight:
    """Some rows of a `[N, K]` weight, in the order given. Weights scaled in tiles have no such rows."""
    assert isinstance(weight, Mxfp4Weight)
    return Mxfp4Weight(packed=weight.packed[rows], scale=weight.scale[rows])
