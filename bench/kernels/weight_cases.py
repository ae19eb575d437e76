"""Products with weights in every form, and experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace

import torch
from tandem_worker import kernels
from tandem_worker.kernels import reference
from tandem_worker.kernels.quantized import Fp8Weight, Int4Weight, Mxfp4Weight, SplitByteWeight, Weight
from tandem_worker.kernels.split_byte import BLOCK, HEAD, UNIT, num_blocks

from bench.kernels.case import HALF, Case, Place, Tensors, wide

_WEIGHTS_PER_ESCAPE = 7000
"""Of trained matrices."""
BYTES_PER_WEIGHT = {
    "bf16": 2.0,
    "fp8": 1.0,
    "int4": 0.5 + 2 / 32,
    "mxfp4": 0.5 + 1 / 32,
    "lossless": 1.5 + 8 / _WEIGHTS_PER_ESCAPE,
}


def random_weight(place: Place, form: str, *shape: int) -> Weight:
    """Random bits in a form; scales keep the products finite."""
    *lead, rows, columns = shape
    match form:
        case "bf16":
            return place.randn(*shape) * 0.02
        case "fp8":
            scale = torch.rand(*lead, -(-rows // 128), -(-columns // 128), device=place.device) * 0.02
            return Fp8Weight(data=place.randn(*shape).to(torch.float8_e4m3fn), scale=scale)
        case "int4":
            packed = place.integers(-(2**31), 2**31 - 1, (*lead, rows, columns // 8), torch.int32)
            return Int4Weight(packed=packed, scale=place.randn(*lead, rows, columns // 32) * 0.02)
        case "lossless":
            return _random_split_byte(place, lead, rows, columns)
    packed = place.integers(0, 256, (*lead, rows, columns // 2), torch.uint8)
    scale = place.integers(118, 122, (*lead, rows, columns // 32), torch.uint8)
    return Mxfp4Weight(packed=packed, scale=scale)


def _random_split_byte(place: Place, lead: list[int], rows: int, columns: int) -> SplitByteWeight:
    """Codes of magnitudes from 2**-23 to 2**-7, and in each block of rows as many escapes as training leaves: larger
    ones, which no sum can lack. It is what `split_byte.encode` makes of these values, without looking at them."""
    low = place.integers(-(1 << 15), 1 << 15, (*lead, rows, columns // 2), torch.int16)
    codes = place.integers(0, 256, (*lead, rows, columns // 2), torch.uint8)
    count, blocks, each = math.prod(lead), num_blocks(rows), max(1, BLOCK * columns // _WEIGHTS_PER_ESCAPE)
    table = torch.tensor(range(0x34, 0x3C), dtype=torch.uint8).view(torch.int32).to(place.device)
    matrix = torch.arange(count, device=place.device)
    # Where a matrix's own words end, those of the matrices behind it follow, then everybody's escapes.
    ahead = (count - matrix[:, None]) * (blocks + HEAD)
    starts = ahead + (matrix[:, None] * blocks + torch.arange(blocks + 1, device=place.device)) * 2 * each
    heads = torch.cat((table.expand(count, 2), starts.int()), 1)
    step = columns // each
    column = torch.arange(each, device=place.device) * step + place.integers(0, step, (count, blocks, each))
    block = torch.arange(blocks, device=place.device)[:, None]
    row = place.integers(0, BLOCK, (count, blocks, each)) % (rows - block * BLOCK)
    row = block * BLOCK + row.sort().values
    words = ((row % 256).int() << 24) | column.int()
    bits = place.integers(0x3C00, 0x3D00, (count, blocks, each), torch.int32)
    # The four pairs of an escape become the table's first value, which has to stand in its place.
    fours = (matrix[:, None, None], row, column // UNIT * (UNIT // 8) + column % (UNIT // 2) // 4)
    for part in (low, codes):
        part.view(count, rows, columns // 8, 4)[fours] = 0
    return SplitByteWeight(
        low=low, codes=codes, beside=torch.cat((heads.flatten(), torch.stack((words, bits), -1).flatten()))
    )


def products(place: Place) -> Iterator[Case]:
    yield from tables(place)
    narrow, deep = place.sizes.products
    for form, per_weight in BYTES_PER_WEIGHT.items():
        if form != "bf16":
            yield Case(
                name=f"widen {form} N={narrow} K={deep}", bytes=narrow * deep * (per_weight + 2),
                make=lambda f=form: (place.randn(1), random_weight(place, f, narrow, deep)),
                run=kernels.widen,
                expect=lambda like, weight: (reference.widen_reference(like.double(), weight),),
            )  # fmt: skip
        for rows in place.sizes.rows:
            yield Case(
                name=f"small_batch_linear {form} M={rows} N={narrow} K={deep}", bytes=narrow * deep * per_weight,
                flops=2 * rows * narrow * deep,
                make=lambda f=form, m=rows: (place.randn(m, deep), random_weight(place, f, narrow, deep)),
                run=kernels.small_batch_linear,
                expect=lambda x, weight: (reference.small_batch_linear_reference(x.double(), weight),),
            )  # fmt: skip
            yield Case(
                name=f"gate_up_silu {form} M={rows} I={deep} K={narrow}", bytes=2 * narrow * deep * per_weight,
                flops=4 * rows * narrow * deep,
                make=lambda f=form, m=rows: (place.randn(m, narrow), random_weight(place, f, 2 * deep, narrow)),
                run=kernels.gate_up_silu,
                expect=lambda x, weight: (reference.gate_up_silu_reference(x.double(), weight),),
            )  # fmt: skip


def tables(place: Place) -> Iterator[Case]:
    """Rows of an embedding table."""
    rows, columns, vocabulary = 64, place.sizes.hidden, place.sizes.vocabulary
    yield Case(
        name=f"look_up lossless T={rows} V={vocabulary}", bytes=rows * columns * (2 + BYTES_PER_WEIGHT["lossless"]),
        make=lambda: (place.integers(0, vocabulary, (rows,)), random_weight(place, "lossless", vocabulary, columns)),
        run=lambda ids, weight: kernels.look_up(ids, weight, HALF),
        expect=lambda ids, weight: (reference.look_up_reference(ids, weight, HALF),),
        limit=0.0,
    )  # fmt: skip


def experts(place: Place) -> Iterator[Case]:
    """All of a token's choices are local: as on a rank that every token chose."""
    for form in BYTES_PER_WEIGHT:
        yield from _experts_in(place, form)
    tokens, num_experts = place.sizes.routed
    yield Case(
        name=f"moe_route [{tokens}, {num_experts}]", bytes=tokens * (num_experts * 4 + 64),
        make=lambda: (place.randn(tokens, num_experts, dtype=torch.float32),),
        run=lambda logits: kernels.moe_route(logits, 8),
        expect=lambda logits: reference.moe_route_reference(logits, 8),
        limit=1e-4,  # scores that differ by a rounding may change places
    )  # fmt: skip


def _experts_in(place: Place, form: str) -> Iterator[Case]:
    """Prompts and decodes through experts whose weights have one form."""
    hidden, width, num_experts, top_k = place.sizes.experts
    for tokens in place.sizes.expert_tokens:
        touched = num_experts * (1 - (1 - top_k / num_experts) ** tokens)  # of random choices, on average

        def make(tokens: int = tokens) -> tuple:
            logits = place.randn(tokens, num_experts, dtype=torch.float32)
            gate_up = random_weight(place, form, num_experts, 2 * width, hidden)
            down = random_weight(place, form, num_experts, hidden, width)
            return place.randn(tokens, hidden), gate_up, down, *reference.moe_route_reference(logits, top_k)

        yield Case(
            name=f"fused_moe {form} T={tokens}",
            bytes=touched * 3 * hidden * width * BYTES_PER_WEIGHT[form],
            flops=2 * tokens * top_k * 3 * hidden * width,
            make=make,
            run=kernels.fused_moe,
            expect=_one_expert_after_another,
        )


def _one_expert_after_another(
    x: torch.Tensor, gate_up: Weight, down: Weight, weights: torch.Tensor, ids: torch.Tensor
) -> Tensors:
    """In float64; all of them at once would take a hundred GB."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in range(gate_up.shape[0]):
        own = (_expert(gate_up, expert), _expert(down, expert))
        total = reference.fused_moe_reference(*wide(x), *own, weights, ids, residual=total, first_expert=expert)
    return (total,)


def _expert(weight: Weight, expert: int) -> Weight:
    if isinstance(weight, torch.Tensor):
        return weight[expert : expert + 1]
    one = slice(expert, expert + 1)
    if isinstance(weight, SplitByteWeight):
        words = weight.beside[expert * (num_blocks(weight.shape[-2]) + HEAD) :]
        return SplitByteWeight(low=weight.low[one], codes=weight.codes[one], beside=words)
    values = {entry.name: getattr(weight, entry.name) for entry in fields(weight)}
    parts = {name: value[expert : expert + 1] for name, value in values.items() if isinstance(value, torch.Tensor)}
    return replace(weight, **parts)
