"""Plain weights in the forms of `kernels.quantized`: what the kernels are fed in tests."""

from __future__ import annotations

import torch
from tandem_worker.kernels.quantized import E2M1_VALUES, Fp8Weight, Int4Weight, Mxfp4Weight


def quantize_int4(weight: torch.Tensor, group: int) -> Int4Weight:
    """Round `[..., N, K]` to symmetric 4-bit groups."""
    groups = weight.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(dim=-1).clamp_min(1e-8) / 7.0
    nibbles = (groups / scale[..., None]).round().clamp(-8, 7).add(8).to(torch.int32).flatten(-2)
    shifts = torch.arange(0, 32, 4, device=weight.device, dtype=torch.int32)
    packed = (nibbles.unflatten(-1, (-1, 8)) << shifts).sum(dim=-1, dtype=torch.int32)
    return Int4Weight(packed=packed, scale=scale)


def quantize_fp8(weight: torch.Tensor, tile: int = 128) -> Fp8Weight:
    """Round `[..., N, K]` to e4m3 with one factor per tile; N and K are multiples of the tile."""
    tiles = weight.float().unflatten(-2, (-1, tile)).unflatten(-1, (-1, tile))
    scale = tiles.abs().amax(dim=(-3, -1)).clamp_min(1e-8) / 448.0
    data = (tiles / scale[..., None, :, None]).flatten(-2).flatten(-3, -2)
    return Fp8Weight(data=data.to(torch.float8_e4m3fn), scale=scale, tile=tile)


def quantize_mxfp4(weight: torch.Tensor) -> Mxfp4Weight:
    """Round `[..., N, K]` to the nearest e2m1 value with one power of two per 32."""
    groups = weight.float().unflatten(-1, (-1, 32))
    exponent = groups.abs().amax(dim=-1).clamp_min(1e-30).log2().floor() - 2.0
    scaled = groups / torch.exp2(exponent)[..., None]
    table = torch.tensor(E2M1_VALUES, device=weight.device)
    codes = (scaled.abs()[..., None] - table).abs().argmin(dim=-1) + 8 * (scaled < 0)
    codes = codes.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    packed = codes[..., 0] | (codes[..., 1] << 4)
    return Mxfp4Weight(packed=packed, scale=(exponent + 127).to(torch.uint8))
