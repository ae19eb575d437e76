"""Published quantized layouts, packed here by their definition and unpacked again."""

from __future__ import annotations

import pytest
import torch
from tandem_worker.model.checkpoint import unpacking

GENERATOR = torch.Generator().manual_seed(3)


def pack(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values `[..., n * 32 / bits]` into int32 words along the last axis, lowest bits first."""
    grouped = values.long().unflatten(-1, (-1, 32 // bits))
    words = (grouped << torch.arange(0, 32, bits)).sum(-1)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def integers(*shape: int, bits: int = 4) -> torch.Tensor:
    return torch.randint(0, 1 << bits, shape, generator=GENERATOR)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_unpack_unsigned(bits: int) -> None:
    values = integers(3, 16, bits=bits)
    assert torch.equal(unpacking.unpack_words(pack(values, bits), bits).long(), values)


def test_fp8_blocks_with_ragged_edges() -> None:
    weight = torch.randn(5, 7, generator=GENERATOR).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, generator=GENERATOR)
    result = unpacking.fp8_blocks(weight, scale, (2, 4))
    for row in range(5):
        for column in range(7):
            assert result[row, column] == weight[row, column].float() * scale[row // 2, column // 4]


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_groups(symmetric: bool) -> None:
    values, scale, zeros = integers(8, 32), torch.rand(8, 2, generator=GENERATOR), integers(8, 2)
    packed_zeros = None if symmetric else pack(zeros.t().contiguous(), 4).t().contiguous()
    result = unpacking.int_groups(pack(values, 4), scale, packed_zeros, (8, 32), 4)
    offset = torch.tensor(8) if symmetric else zeros.repeat_interleave(16, 1)
    assert torch.equal(result, (values - offset).float() * scale.repeat_interleave(16, 1))


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq(reordered: bool, offset: int) -> None:
    values, zeros, scales = integers(32, 16), integers(4, 16), torch.rand(4, 16, generator=GENERATOR)
    groups = torch.arange(32) // 8
    if reordered:
        groups = groups[torch.randperm(32, generator=GENERATOR)]
    words = pack(values.t().contiguous(), 4).t().contiguous()
    result = unpacking.gptq(words, pack(zeros, 4), scales, groups.int() if reordered else None, 4, offset=offset)
    assert torch.equal(result, ((values - zeros[groups] - offset).float() * scales[groups]).t())


def test_awq_columns_are_interleaved() -> None:
    values, zeros, scales = integers(16, 16), integers(2, 16), torch.rand(2, 16, generator=GENERATOR)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the packer puts column order[i] at place i

    def packed(matrix: torch.Tensor) -> torch.Tensor:
        return pack(matrix.unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    result = unpacking.awq(packed(values), packed(zeros), scales)
    groups = torch.arange(16) // 8
    assert torch.equal(result, ((values - zeros[groups]).float() * scales[groups]).t())


def test_mxfp4() -> None:
    blocks = torch.tensor([[[0x21, 0x9A] + [0] * 14]], dtype=torch.uint8)
    result = unpacking.mxfp4(blocks, torch.tensor([[129]], dtype=torch.uint8))
    assert result.shape == (1, 32)
    assert result[0, :4].tolist() == [2.0, 4.0, -4.0, -2.0]
