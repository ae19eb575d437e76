from __future__ import annotations

import pytest
import torch
from tandem_worker.model.layers.norm import HeadNorm, RMSNorm

from tests.tandem_worker.model.layers.closeness import assert_near, random

EPS = 1e-5


def normalize(x: torch.Tensor, weight: torch.Tensor | None, eps: float = EPS) -> torch.Tensor:
    """The formula of arXiv:1910.07467 in float64."""
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("scaled", [True, False])
def test_rms_norm(dtype: torch.dtype, num_tokens: int, scaled: bool) -> None:
    x = random(num_tokens, 48, dtype=dtype) * 3
    weight = random(48, seed=1, dtype=dtype) if scaled else None
    norm = RMSNorm(weight, EPS, dim=None if scaled else 48)
    assert_near(norm(x), normalize(x, weight))


def test_rms_norm_keeps_the_precision_of_large_values() -> None:
    """The mean of squares is taken in float32: in bfloat16's neighbour float16 it would be infinite."""
    x = torch.full((2, 32), 3e4, dtype=torch.float16)
    torch.testing.assert_close(RMSNorm(torch.ones(32, dtype=torch.float16), EPS)(x), torch.ones_like(x))


def test_eps_holds_for_rows_of_zeros() -> None:
    assert torch.equal(RMSNorm(torch.ones(8), EPS)(torch.zeros(3, 8)), torch.zeros(3, 8))


def test_width_of_its_own_normalizes_heads_apart() -> None:
    x = random(5, 4, 16)
    assert_near(RMSNorm(None, EPS, dim=16)(x), normalize(x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (3, 3), (1, 1)])
def test_head_norm(dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> None:
    query, key = random(16, seed=1, dtype=dtype), random(16, seed=2, dtype=dtype)
    heads = random(6, num_heads + num_kv_heads, 16, dtype=dtype)
    exact = torch.cat((normalize(heads[:, :num_heads], query), normalize(heads[:, num_heads:], key)), 1)
    HeadNorm(query, key, num_heads, num_kv_heads, EPS).normalize_(heads, num_heads)
    assert_near(heads, exact)


def test_head_norm_leaves_values_of_the_same_projection_alone() -> None:
    projected = random(3, 5, 8)  # two query heads, one key head, one value head, one more
    before = projected.clone()
    HeadNorm(torch.ones(8), torch.ones(8), 2, 1, EPS).normalize_(projected[:, :3], 2)
    assert torch.equal(projected[:, 3:], before[:, 3:])
    assert not torch.equal(projected[:, :3], before[:, :3])
