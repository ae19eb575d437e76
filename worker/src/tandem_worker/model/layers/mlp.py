"""Gated MLP: `down(silu(gate(x)) * up(x))` (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from tandem_worker.model.layers.linear import Linear

if TYPE_CHECKING:
    from tandem_worker.model.layers.step import LiveRows


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

    def forward(self, x: torch.Tensor, residual: torch.Tensor, step: LiveRows) -> torch.Tensor:
        """`residual + mlp(x)` for `[T, hidden]`, as a new tensor, whatever the step."""
        del step
        return self.add_to(x, residual)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`residual + mlp(x)` for `[T, hidden]`, as a new tensor."""
        return self.down.add_to(self._hidden(x), residual)

    def forward_partial(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """As `forward`, but this rank's share of the sum; `residual` is added as given."""
        return self.down.add_partial(self._hidden(x), residual)

    def _hidden(self, x: torch.Tensor) -> torch.Tensor:
        """`silu(gate(x)) * up(x)`, `[T, I]`."""
        return silu_mul(self.gate_up(x))
