"""Layers of torch's operations: the layers as they are, for any device and element type."""

from __future__ import annotations

from tandem_worker.model.backends.contract import Backend, BackendName
from tandem_worker.model.backends.torch.attention import TorchAttention
from tandem_worker.model.layers.attention import SelfAttention
from tandem_worker.model.layers.linear import HeadLinear, Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts
from tandem_worker.model.layers.norm import HeadNorm, RMSNorm
from tandem_worker.model.layers.rotary import Rotation

TORCH = Backend(
    name=BackendName.TORCH,
    keeps_packed=False,
    attention=TorchAttention,
    linear=Linear,
    head=HeadLinear,
    norm=RMSNorm,
    head_norm=HeadNorm,
    rotation=Rotation,
    self_attention=SelfAttention,
    mlp=GatedMLP,
    experts=Experts,
    route=lambda router: router,
    find_inexact=lambda layers: "torch's products take another path for one row than for several",
)
