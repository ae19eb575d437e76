"""Weights of bfloat16 in 12 bits: what comes back, and what is multiplied.

Products are exact sums where they are compared bit by bit: powers of two within 17 binary places, times -1, 0 or 1.
"""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import linear, moe, reference
from tandem_worker.kernels.dispatch import interpreting
from tandem_worker.kernels.quantized import SplitByteWeight
from tandem_worker.kernels.split_byte import BLOCK

ON_GPU = torch.cuda.is_available() and not interpreting()
TYPES = [torch.float32, *([torch.bfloat16] if ON_GPU else [])]
SERVED = [((rows, 4096, 12288), None) for rows in (1, 64)] if ON_GPU else []


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def pack(values: torch.Tensor) -> SplitByteWeight:
    packed = SplitByteWeight.pack(values)
    assert packed is not None
    assert packed.nbytes < 0.8 * 2 * values.numel()
    return packed


@pytest.fixture
def strange(generator, device):
    """`[N, 192]` of ordinary weights, and one in 128 of any bit pattern."""

    def draw(rows: int) -> torch.Tensor:
        values = (torch.randn(rows, 192, generator=generator) * 0.02).bfloat16()
        anything = torch.randint(-(1 << 15), 1 << 15, values.shape, generator=generator).to(torch.int16)
        replaced = torch.rand(values.shape, generator=generator) < 1 / 128
        return torch.where(replaced, anything.view(torch.bfloat16), values).to(device)

    return draw


@pytest.fixture
def powers(generator, device):
    """Signed powers of two whose high bytes have nine values, one of them rare: it is escaped."""

    def draw(*shape: int) -> torch.Tensor:
        exponents = torch.randint(-9, 7, shape, generator=generator)
        exponents[torch.rand(shape, generator=generator) < 1 / 200] = 7
        signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1
        return (signs * torch.exp2(exponents.float())).bfloat16().to(device)

    return draw


@pytest.fixture
def units(generator, device):
    def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(device, dtype)

    return draw


@pytest.mark.parametrize("rows", [3, 31, 70])
def test_every_bit_comes_back(strange, rows):
    values = strange(rows)
    packed = pack(values)
    like = torch.zeros(1, dtype=torch.bfloat16, device=values.device)
    assert torch.equal(bits(kernels.widen(like, packed)), bits(values))
    assert torch.equal(bits(packed.dequantize(torch.bfloat16)), bits(values))


def test_rows_of_a_table_come_back(strange, device):
    values = strange(300)
    ids = torch.tensor([0, 299, 31, 32, 31, 256, 255, 287], device=device)
    found = kernels.look_up(ids, pack(values), torch.bfloat16)
    assert torch.equal(bits(found), bits(values[ids]))
    assert kernels.look_up(ids[:0], pack(values), torch.bfloat16).shape == (0, 192)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("shape", "num_splits"), [((1, 40, 576), 1), ((3, 70, 576), 3), ((33, 65, 64), None), *SERVED])
def test_sums_are_those_of_the_twin_in_every_bit(powers, units, kind, shape, num_splits, device):
    rows, outputs, columns = shape
    weight, x = powers(outputs, columns), units(rows, columns, dtype=kind)
    packed = pack(weight)
    assert packed.beside.numel() > 3 + -(-outputs // BLOCK), "nothing is escaped"
    out = torch.empty(rows, outputs, device=device)
    kernels.small_batch_linear(x, packed, num_splits=num_splits, out=out)
    expected = reference.small_batch_linear_reference(x.double(), packed)
    assert torch.equal(out.double(), expected)
    assert torch.equal(expected, x.double() @ weight.double().t())


@pytest.mark.parametrize("rows", [1, 33])
def test_sums_in_tiles_of_bfloat16_whose_lists_take_many_turns(powers, units, monkeypatch, rows, device):
    """More than a thousand escapes a block, in 16 or 32 tiles of each split."""
    tile = linear.block_shape(rows, 2)
    monkeypatch.setattr(linear, "block_shape", lambda *args: tile)
    weight, x = powers(40, 8192), units(rows, 8192, dtype=TYPES[-1])
    out = torch.empty(rows, 40, device=device)
    kernels.small_batch_linear(x, pack(weight), num_splits=2, out=out)
    assert torch.equal(out.double(), x.double() @ weight.double().t())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("width", "columns"), [(40, 128), *([(12288, 4096)] if ON_GPU else [])])
def test_gate_and_up_whose_halves_begin_within_a_block(randn, assert_matches, powers, kind, width, columns):
    weight, x, bias = powers(2 * width, columns) / 64, randn(5, columns, dtype=kind), randn(2 * width)
    expected = reference.gate_up_silu_reference(x.double(), weight, bias)
    assert_matches(kernels.gate_up_silu(x, pack(weight), bias), expected)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("mapped", [False, True])
def test_experts(randn, assert_matches, monkeypatch, powers, generator, device, kind, mapped):
    """Each has a table and a list of its own."""
    monkeypatch.setattr(moe, "_MAX_UNSORTED_PAIRS", 0 if mapped else 256)
    scales = torch.tensor([0.25, 1.0, 16.0], device=device).bfloat16()[:, None, None] / 256
    gate_up, down = powers(3, 2 * 64, 128) * scales, powers(3, 128, 64) * scales
    x = randn(6, 128, dtype=kind)
    ids = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(6)]).int().to(device)
    weights = torch.rand(6, 2, generator=generator).to(device)
    expected = reference.fused_moe_reference(x.double(), gate_up, down, weights, ids)
    assert_matches(kernels.fused_moe(x, pack(gate_up), pack(down), weights, ids), expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_tile_over_the_edge_takes_no_escapes_of_rows_far_below(
    randn, assert_matches, monkeypatch, powers, device, kind
):
    """Of 320 gate rows a tile of 128 has 64 behind the last: what it names instead must not lengthen its list."""
    tile = {"BLOCK_M": 16, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 4, "num_stages": 2}
    monkeypatch.setattr(moe, "_tile_shape", lambda *args, **options: tile)
    gate_up, down, x = powers(1, 2 * 320, 64) / 64, powers(1, 64, 320) / 64, randn(2, 64, dtype=kind)
    ids, weights = torch.zeros(2, 1, dtype=torch.int32, device=device), torch.ones(2, 1, device=device)
    expected = reference.fused_moe_reference(x.double(), gate_up, down, weights, ids)
    assert_matches(kernels.fused_moe(x, pack(gate_up), pack(down), weights, ids), expected)


def test_what_cannot_be_multiplied_is_refused(strange, randn):
    packed = pack(strange(64))
    with pytest.raises(TypeError, match="float16 does not hold"):
        kernels.small_batch_linear(randn(1, 192, dtype=torch.float16), packed)
    with pytest.raises(ValueError, match=r"x must have shape \[any, 192\]"):
        kernels.small_batch_linear(randn(1, 128), packed)
    cut = SplitByteWeight(low=packed.low, codes=packed.codes, beside=packed.beside[:4])
    with pytest.raises(ValueError, match="5 words beside"):
        kernels.small_batch_linear(randn(1, 192), cut)
