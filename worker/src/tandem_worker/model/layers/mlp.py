"""Gated MLP: `down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem_worker.model.checkpoint.loader import Part, WeightLoader, shard
from tandem_worker.model.layers.linear import Linear
from tandem_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from tandem_worker.model.layers.step import Step


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` for `[T, 2I]`, gate first."""
    width = gate_up.shape[-1] // 2
    return functional.silu(gate_up.narrow(-1, 0, width)).mul_(gate_up.narrow(-1, width, width))


def swiglu_clamped(gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """gpt-oss's activation for `[T, 2I]`: clamped, a sigmoid sharpened by alpha, and one added to `up`."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(gate * alpha)


class GatedMLP:
    """Gate and up are one matrix; ranks split the intermediate width."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def load(
        cls,
        loader: WeightLoader,
        context: ParallelContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
    ) -> GatedMLP:
        """`bias` says that all three projections have one."""
        rank, size = context.tp_rank, context.tp_size
        what = "intermediate_size"
        rows = shard(0, intermediate_size, rank, size, what=what)
        shape = (intermediate_size, hidden_size)
        names = [f"{prefix}{name}_proj" for name in ("gate", "up")]
        gate_up = loader.matrix([Part(name=f"{name}.weight", shape=shape, piece=rows) for name in names])
        columns = shard(1, intermediate_size, rank, size, what=what)
        down = loader.matrix(
            [Part(name=f"{prefix}down_proj.weight", shape=(hidden_size, intermediate_size), piece=columns)]
        )
        gate_up_bias = down_bias = None
        if bias:
            gate_up_bias = loader.stack([Part(name=f"{name}.bias", shape=shape[:1], piece=rows) for name in names])
            down_bias = loader.load(f"{prefix}down_proj.bias", (hidden_size,))
        backend = loader.backend
        return backend.mlp(backend.linear(gate_up, gate_up_bias), backend.linear(down, down_bias, reduce=context.tp))

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: Step) -> torch.Tensor:
        """`residual + mlp(x)`, whatever the step."""
        del step
        return self.down.add_to(self._hidden(x), residual)

    def forward_partial(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As `forward`, but this rank's share of the sum; `residual` is added as given."""
        return self.down.add_partial(self._hidden(x), residual)

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(gate(x)) * up(x)`, `[T, I]`."""
        return silu_mul(self.gate_up(x))
