"""How near a layer must come to the same formula in float64."""

from __future__ import annotations

from typing import Final

import torch

TOLERANCE: Final = {torch.float32: 2e-6, torch.bfloat16: 8e-3}
"""Largest error as a share of the largest value: a few roundings of the type."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal values that the type holds exactly, so that the float64 formula starts from the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(found: torch.Tensor, exact: torch.Tensor, *, within: float | None = None) -> None:
    """`found` is `exact` `float64` of the same shape, but for roundings of its type."""
    assert found.shape == exact.shape
    assert bool(found.isfinite().all())
    if not exact.numel():
        return
    error = float((found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30))
    assert error <= (within or TOLERANCE[found.dtype]), f"relative error {error:.2e}"
