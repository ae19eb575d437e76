from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.mlp import GatedMLP, silu_mul, swiglu_clamped
from tandem_worker.parallel.collectives import Collective

from tests.tandem_worker.model.layers.closeness import assert_near, random
from tests.tandem_worker.model.layers.ranks import run_ranks

NO_STEP = cast("Any", None)
"""A dense MLP is the same in every step."""
HIDDEN, WIDTH = 24, 16


def silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.double() @ gate_up.double().t()).chunk(2, -1)
    return (silu(gate) * up) @ down.double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(7, 2 * WIDTH, dtype=dtype) * 4
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(silu_mul(gate_up), silu(gate) * up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("limit", [7.0, 1.5])
def test_swiglu_clamped(limit: float) -> None:
    gate_up = random(64, 2 * WIDTH) * 6  # beyond both limits
    gate, up = gate_up.double().chunk(2, -1)
    assert float(gate.max()) > limit
    assert float(up.abs().max()) > limit
    gate = gate.minimum(torch.tensor(limit))  # only from above
    up = up.clamp(-limit, limit)
    assert_near(swiglu_clamped(gate_up, limit=limit), (up + 1) * gate / (1 + torch.exp(-1.702 * gate)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_gated_mlp(dtype: torch.dtype, num_tokens: int) -> None:
    gate_up, down = random(2 * WIDTH, HIDDEN, seed=1, dtype=dtype), random(HIDDEN, WIDTH, seed=2, dtype=dtype)
    x, residual = random(num_tokens, HIDDEN, dtype=dtype), random(num_tokens, HIDDEN, seed=3, dtype=dtype)
    layer = GatedMLP(Linear(gate_up), Linear(down))
    exact = residual.double() + mlp(x, gate_up, down)
    within = None if dtype == torch.float32 else 2e-2  # three products, each rounded
    assert_near(layer.forward(x, residual, NO_STEP), exact, within=within)
    assert_near(layer.forward_partial(x, residual), exact, within=within)


def test_ranks_split_the_intermediate_width() -> None:
    gate_up, down = random(2 * WIDTH, HIDDEN, seed=1), random(HIDDEN, WIDTH, seed=2)
    x, residual = random(5, HIDDEN), random(5, HIDDEN, seed=3)

    def work(ranks: Collective) -> torch.Tensor:
        mine = slice(ranks.rank * WIDTH // 2, (ranks.rank + 1) * WIDTH // 2)
        rows = torch.cat([half[mine] for half in gate_up.chunk(2)])
        layer = GatedMLP(Linear(rows), Linear(down[:, mine].contiguous(), reduce=ranks))
        return layer.forward(x, residual, NO_STEP)

    for found in run_ranks(2, work):
        assert_near(found, residual.double() + mlp(x, gate_up, down))
