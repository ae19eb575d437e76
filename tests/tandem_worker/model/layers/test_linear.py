from __future__ import annotations

import pytest
import torch
from tandem_worker.model.layers import linear
from tandem_worker.model.layers.linear import HeadLinear, Linear, can_pack, float32_product
from tandem_worker.parallel.collectives import Collective

from tests.tandem_worker.model.layers.closeness import assert_near, random
from tests.tandem_worker.model.layers.ranks import run_ranks

PACKED = [True, False]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case with `packed` false runs on the plain layout; one with true needs a CPU that has the other."""
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if params.get("packed") is False:
        monkeypatch.setattr(linear, "can_pack", lambda weight: False)
    elif params.get("packed") and not can_pack(torch.empty(1, 1, dtype=params.get("dtype", torch.float32))):
        pytest.skip("oneDNN has no packed layout of this type here")


def multiply(x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor | None) -> torch.Tensor:
    product = x.double() @ weight.double().t()
    return sum((part.double() for part in added if part is not None), start=product)


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("num_rows", [1, 3, 65])
def test_product(packed: bool, dtype: torch.dtype, biased: bool, num_rows: int) -> None:
    x, weight = random(num_rows, 40, dtype=dtype), random(24, 40, seed=1, dtype=dtype)
    bias = random(24, seed=2, dtype=dtype) if biased else None
    layer = Linear(weight, bias)
    assert (layer.packed, layer.in_features, layer.out_features) == (packed, 40, 24)
    assert_near(layer(x), multiply(x, weight, bias))


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("method", ["add_to", "add_partial"])
def test_residual_is_added_and_kept(packed: bool, dtype: torch.dtype, biased: bool, method: str) -> None:
    x, weight, residual = random(5, 40, dtype=dtype), random(24, 40, seed=1, dtype=dtype), random(5, 24, dtype=dtype)
    bias = random(24, seed=2, dtype=dtype) if biased else None
    before = residual.clone()
    found = getattr(Linear(weight, bias), method)(x, residual)
    assert_near(found, multiply(x, weight, bias, residual))
    assert torch.equal(residual, before)


def test_no_residual_adds_nothing() -> None:
    x, weight = random(5, 40), random(24, 40, seed=1)
    assert_near(Linear(weight).add_to(x, None), multiply(x, weight))


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("with_residual", [True, False])
def test_split_inputs_sum_to_the_whole(packed: bool, size: int, with_residual: bool) -> None:
    """Bias and residual enter the sum once, though every rank holds them."""
    x, weight, bias = random(5, 32), random(24, 32, seed=1), random(24, seed=2)
    residual = random(5, 24, seed=3) if with_residual else None

    def work(ranks: Collective) -> torch.Tensor:
        mine = slice(ranks.rank * 32 // size, (ranks.rank + 1) * 32 // size)
        layer = Linear(weight[:, mine].contiguous(), bias, reduce=ranks)
        return layer.add_to(x[:, mine].contiguous(), residual)

    for found in run_ranks(size, work):
        assert_near(found, multiply(x, weight, bias, residual))


@pytest.mark.parametrize("packed", PACKED)
def test_partial_sums_are_this_ranks_alone(packed: bool) -> None:
    x, weight, residual = random(5, 32), random(24, 32, seed=1), random(5, 24, seed=3)

    def work(ranks: Collective) -> torch.Tensor:
        mine = slice(16 * ranks.rank, 16 * ranks.rank + 16)
        return Linear(weight[:, mine].contiguous(), reduce=ranks).add_partial(x[:, mine].contiguous(), residual)

    for rank, found in enumerate(run_ranks(2, work)):
        mine = slice(16 * rank, 16 * rank + 16)
        assert_near(found, multiply(x[:, mine], weight[:, mine], residual))


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_is_summed_and_left_in_float32(packed: bool, dtype: torch.dtype) -> None:
    x, weight = random(3, 64, dtype=dtype), random(96, 64, seed=1, dtype=dtype)
    logits = HeadLinear(weight)(x)
    assert logits.dtype == torch.float32
    assert_near(logits, multiply(x, weight))
    assert_near(float32_product(x, weight), multiply(x, weight))


def test_head_tells_logits_apart_that_bfloat16_does_not() -> None:
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[:, 0], weight[1, 1] = 100.0, 0.25
    logits = HeadLinear(weight)(torch.ones(1, 64, dtype=torch.bfloat16))
    assert logits.tolist() == [[100.0, 100.25]]
    assert logits.bfloat16()[0, 0] == logits.bfloat16()[0, 1]


def test_types_without_a_packed_layout_stay_plain() -> None:
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))
    assert not can_pack(torch.empty(4, 4, dtype=torch.float64))
