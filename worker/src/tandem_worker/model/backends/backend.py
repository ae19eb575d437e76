"""What a model is built from: torch's operations, the CPU kernels, or the Triton kernels.

This is the one place that chooses. A `WeightLoader` carries the choice to the families and layers, which build their
parts from its classes and never ask where a tensor lives. Torch's and Triton's run on any device, the kernels through
their twins where no GPU is and Triton does not interpret, so the wiring of one is tested against the other on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from tandem_worker.model.backends import native
from tandem_worker.model.layers.linear import HeadLinear, Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts
from tandem_worker.model.layers.norm import HeadNorm, RMSNorm
from tandem_worker.model.layers.rotary import Rotation
from tandem_worker.model.layers.routers import Route, Router

if TYPE_CHECKING:
    from tandem_worker.model.backends.attention import AttentionBackend
    from tandem_worker.model.layers.attention import SelfAttention


class BackendName(StrEnum):
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The classes that layers are made of."""

    name: BackendName
    keeps_packed: bool
    """Quantized weights stay as they are; otherwise they are dequantized at load."""
    attention: Callable[[], AttentionBackend]
    linear: type[Linear]
    head: type[HeadLinear]
    norm: type[RMSNorm]
    head_norm: type[HeadNorm]
    rotation: type[Rotation]
    self_attention: type[SelfAttention]
    mlp: type[GatedMLP]
    experts: type[Experts]
    route: Callable[[Router], Route]
    """The function that chooses experts by a router's rule."""
    dtype: torch.dtype | None = None
    """The one element type it computes in; None: any."""
    layer: Callable[..., Any] | None = None
    """In place of `PreNormLayer`, with its arguments."""


@lru_cache(maxsize=3)
def build_backend(name: BackendName) -> Backend:
    """The backend of that name. Triton is imported only for its own."""
    from tandem_worker.model.layers.attention import SelfAttention

    if name is BackendName.TRITON:
        from tandem_worker.model.backends.triton.layers import TRITON

        return TRITON
    if name is BackendName.NATIVE:
        from tandem_worker.model.backends.native.layers import NATIVE

        return NATIVE
    from tandem_worker.model.backends.torch.attention import CPUAttention

    return Backend(
        name=name,
        keeps_packed=False,
        attention=CPUAttention,
        linear=Linear,
        head=HeadLinear,
        norm=RMSNorm,
        head_norm=HeadNorm,
        rotation=Rotation,
        self_attention=SelfAttention,
        mlp=GatedMLP,
        experts=Experts,
        route=lambda router: router,
    )


def select_backend(device: torch.device, dtype: torch.dtype) -> BackendName:
    """The Triton kernels on a GPU, the CPU kernels for bfloat16 where they run, torch elsewhere."""
    if device.type == "cuda":
        return BackendName.TRITON
    if dtype == torch.bfloat16 and native.find_obstacle() is None:
        return BackendName.NATIVE
    return BackendName.TORCH
