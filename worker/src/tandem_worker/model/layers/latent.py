"""A layer with latent attention taken apart, for those who attend by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem_worker.model.attention import LatentSpec
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.norm import RMSNorm
from tandem_worker.model.layers.pre_norm import MLPPart
from tandem_worker.model.layers.rotary import Rotation


class LatentPart(Protocol):
    """What comes before and behind the attention of a layer on this rank."""

    spec: LatentSpec
    out: Linear
    """The output projection, summed over tensor-parallel ranks."""

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of one block, for `block_size` tokens."""
        ...

    def make_latents(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """What is cached of `x` `[T, hidden]`, `[T, 1, rank + rope]`."""
        ...

    def make_both(self, x: torch.Tensor, rotation: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries `[T, num_heads, nope + rope]` of `x` `[T, hidden]`, and its latents."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentLayer:
    input_norm: RMSNorm
    attention: LatentPart
    mlp_norm: RMSNorm
    mlp: MLPPart
