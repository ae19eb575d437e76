"""Quantized layouts as published, back to plain matrices. Pure functions on whole tensors; results are float32.

Packed words are int32 that hold `32 / bits` values, lowest bits first.
"""

from __future__ import annotations

import torch

_AWQ_COLUMNS = (0, 4, 1, 5, 2, 6, 3, 7)  # place of column i among the values of its word
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 `[..., W]` to int32 values `[..., W * 32 / bits]`, unsigned."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return values.flatten(-2)


def fp8_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float8 `[N, K]` times one scale per block of rows and columns (DeepSeek-V3, arXiv:2412.19437, section 3.3)."""
    rows = scale.float().repeat_interleave(block[0], 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(block[1], 1)[:, : weight.shape[1]]


def scaled(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`[N, K]` times a scale per tensor (`[]`, `[1]`) or per row (`[N]`, `[N, 1]`)."""
    scale = scale.float()
    return weight.float() * (scale.view(-1, 1) if scale.numel() > 1 else scale.reshape(()))


def int_groups(
    packed: torch.Tensor, scale: torch.Tensor, zeros: torch.Tensor | None, shape: tuple[int, int], bits: int
) -> torch.Tensor:
    """compressed-tensors: words along K, one scale `[N, K / group]`; without zeros values are offset by half the range.

    `zeros` `[N * bits / 32, K / group]` are packed along N.
    """
    values = unpack_words(packed, bits)[:, : shape[1]]
    group = shape[1] // scale.shape[1]
    if zeros is None:
        offset = torch.full((1, 1), 1 << (bits - 1), dtype=torch.int32)
    else:
        offset = unpack_words(zeros.t().contiguous(), bits).t()[: shape[0]].repeat_interleave(group, 1)
    return (values - offset).float() * scale.float().repeat_interleave(group, 1)


def gptq(
    words: torch.Tensor,
    zeros: torch.Tensor,
    scales: torch.Tensor,
    groups: torch.Tensor | None,
    bits: int,
    *,
    offset: int,
) -> torch.Tensor:
    """GPTQ: words along K `[K * bits / 32, N]`, zeros along N, scales `[K / group, N]`; `[N, K]`.

    `groups` `[K]` names each row's group where they were reordered; `offset` 1 where zeros are stored less one.
    """
    values = unpack_words(words.t().contiguous(), bits).t()  # [K, N]
    if groups is None:
        groups = torch.arange(values.shape[0]) // (values.shape[0] // scales.shape[0])
    groups = groups.long()
    zero_points = unpack_words(zeros, bits)[:, : values.shape[1]] + offset
    return ((values - zero_points[groups]).float() * scales.float()[groups]).t()


def awq(words: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """AWQ, 4 bits: words along N `[K, N / 8]`, columns interleaved, zeros alike, scales `[K / group, N]`; `[N, K]`."""
    group = words.shape[0] // scales.shape[0]
    values = awq_values(words) - awq_values(zeros).repeat_interleave(group, 0)
    return (values.float() * scales.float().repeat_interleave(group, 0)).t()


def awq_values(words: torch.Tensor) -> torch.Tensor:
    """int32 `[R, N / 8]` to the values `[R, N]` in the matrix's own order of columns."""
    values = unpack_words(words, 4).unflatten(-1, (-1, 8))
    return values[..., list(_AWQ_COLUMNS)].flatten(-2)


def mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """OCP MXFP4: `[..., G, 16]` bytes of two values, low half first, and exponents `[..., G]`; `[..., G * 32]`."""
    table = torch.tensor(_FP4_VALUES)
    pairs = torch.stack((blocks & 0xF, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[pairs.long()], scales.to(torch.int32).unsqueeze(-1) - 127).flatten(-2)
