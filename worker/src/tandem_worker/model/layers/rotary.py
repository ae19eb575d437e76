"""Rotary position embedding (RoFormer, arXiv:2104.09864) and the scalings that published checkpoints use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tandem_worker.host.errors import StartupError
from tandem_worker.model.rope import RopeConfig


def build_inverse_frequencies(
    rope: RopeConfig, dim: int, *, max_position_embeddings: int = 0
) -> tuple[torch.Tensor, float]:
    """Angular frequency of each pair, `[dim / 2]` float32 in radians per position, and the factor on cos and sin."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    if rope.kind == "default":
        return plain, 1.0
    try:
        if rope.kind == "linear":
            return plain / float(rope.scaling["factor"]), 1.0
        if rope.kind == "llama3":
            return _llama3(plain, rope.scaling), 1.0
        if rope.kind == "yarn":
            return _yarn(rope, dim, max_position_embeddings)
    except (KeyError, TypeError) as error:
        raise StartupError(
            "ConfigInvalid", f"The model's rope scaling of type {rope.kind} lacks a usable value: {error}"
        ) from error
    raise StartupError("UnsupportedArchitecture", f"Rope scaling of type {rope.kind!r} is not supported.")


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / factor + keep * plain


def _yarn(rope: RopeConfig, dim: int, max_position_embeddings: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv:2309.00071): blend by number of turns within the original context, and scale attention."""
    scaling = rope.scaling
    original = float(scaling["original_max_position_embeddings"])
    factor = float(scaling.get("factor") or max_position_embeddings / original)
    bounds = [
        dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1))
    ]
    if scaling.get("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    periods = rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    frequencies = ramp / (factor * periods) + (1 - ramp) / periods
    return frequencies, _yarn_attention_factor(scaling, factor)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all)
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Growth of attention's temperature with the context's extension, eq. 22 of the YaRN paper."""
    return 1.0 if factor <= 1 else 0.1 * float(mscale) * math.log(factor) + 1.0


class RotaryEmbedding:
    """Cosines and sines of a step's positions, computed once per step and shared by all layers."""

    def __init__(
        self,
        rope: RopeConfig,
        dim: int,
        *,
        max_position_embeddings: int,
        device: torch.device,
        rotation: type[Rotation],
    ) -> None:
        frequencies, self.factor = build_inverse_frequencies(rope, dim, max_position_embeddings=max_position_embeddings)
        self.inverse_frequencies = frequencies.to(device)
        self._rotation = rotation

    def scale_frequencies(self, divisors: torch.Tensor) -> None:
        """Divide each frequency, `[dim / 2]`: GGUF files carry Llama 3's scaling in this form."""
        self.inverse_frequencies = self.inverse_frequencies / divisors.to(self.inverse_frequencies)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Rotation by `positions` `[T]`; angles are computed in float32."""
        angles = torch.outer(positions.float(), self.inverse_frequencies)
        cos, sin = angles.cos() * self.factor, angles.sin() * self.factor
        return self._rotation(cos.to(dtype), sin.to(dtype))


class Rotation:
    """Cosines and sines `[T, D / 2]` of a step; `rotate_*` turn the first D dimensions of every head in place."""

    __slots__ = ("_wide", "cos", "sin")

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.cos = cos
        self.sin = sin
        self._wide: tuple[torch.Tensor, torch.Tensor] | None = None

    def rotate_half_(self, heads: torch.Tensor) -> None:
        """`[T, H, D]` where element i pairs with i + D / 2."""
        if self._wide is None:
            cos = torch.cat((self.cos, self.cos), dim=-1).unsqueeze(1)
            self._wide = cos, torch.cat((-self.sin, self.sin), dim=-1).unsqueeze(1)
        cos, sin = self._wide
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(cos).addcmul_(swapped, sin)

    def rotate_interleaved_(self, heads: torch.Tensor) -> None:
        """`[T, H, D]` where element 2i pairs with 2i + 1."""
        even, odd = heads[..., 0::2].float(), heads[..., 1::2].float()
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        rotated = even * cos - odd * sin, odd * cos + even * sin
        heads[..., 0::2], heads[..., 1::2] = rotated
