from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts, ExpertWeights, MoE
from tandem_worker.model.layers.routers import Routing, SoftmaxRouter
from tandem_worker.parallel.collectives import Collective

from tests.tandem_worker.model.layers.closeness import assert_near, random
from tests.tandem_worker.model.layers.ranks import run_ranks

HIDDEN, WIDTH, EXPERTS = 12, 8, 4
LIMIT = 1.0


def build_weights(count: int = EXPERTS, *, biased: bool = False) -> list[ExpertWeights]:
    return [
        ExpertWeights(
            gate_up=random(2 * WIDTH, HIDDEN, seed=10 + expert),
            down=random(HIDDEN, WIDTH, seed=20 + expert),
            gate_up_bias=random(2 * WIDTH, seed=30 + expert) if biased else None,
            down_bias=random(HIDDEN, seed=40 + expert) if biased else None,
        )
        for expert in range(count)
    ]


def apply_expert(x: torch.Tensor, weights: ExpertWeights, limit: float | None) -> torch.Tensor:
    """One token `[hidden]` through one expert, in float64."""
    assert isinstance(weights.gate_up, torch.Tensor)
    assert isinstance(weights.down, torch.Tensor)
    hidden = weights.gate_up.double() @ x
    if weights.gate_up_bias is not None:
        hidden = hidden + weights.gate_up_bias.double()
    gate, up = hidden.chunk(2)
    if limit is None:
        acted = gate * gate.sigmoid() * up
    else:
        gate = gate.clamp(max=limit)
        acted = (up.clamp(-limit, limit) + 1) * gate * (1.702 * gate).sigmoid()
    out = weights.down.double() @ acted
    return out if weights.down_bias is None else out + weights.down_bias.double()


def apply_loop(
    x: torch.Tensor,
    routing: Routing,
    residual: torch.Tensor,
    weights: list[ExpertWeights],
    *,
    weigh_input: bool = False,
    limit: float | None = None,
) -> torch.Tensor:
    """Token by token and expert by expert, in float64."""
    out = residual.double().clone()
    for token, (experts, shares) in enumerate(zip(routing.experts.tolist(), routing.weights.double(), strict=True)):
        for expert, share in zip(experts, shares, strict=True):
            if expert < 0:
                continue
            given = x[token].double()
            if weigh_input:
                out[token] += apply_expert(given * share, weights[expert], limit)
            else:
                out[token] += share * apply_expert(given, weights[expert], limit)
    return out


@st.composite
def routings(draw: st.DrawFn) -> Routing:
    """Up to 9 tokens, each to k different experts or, as padding, to none."""
    num_tokens, width = draw(st.integers(0, 9)), draw(st.integers(1, EXPERTS))
    rows = [draw(st.permutations(range(EXPERTS)))[:width] for _ in range(num_tokens)]
    live = torch.tensor([draw(st.booleans()) for _ in range(num_tokens)], dtype=torch.bool)
    experts = torch.tensor(rows, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).view(num_tokens, width)
    routing = Routing(experts, torch.rand(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens)))
    return routing.only(live) if draw(st.booleans()) else routing


@settings(max_examples=30, deadline=None)
@given(routings(), st.booleans(), st.booleans(), st.sampled_from([None, LIMIT]))
def test_experts(routing: Routing, weigh_input: bool, biased: bool, limit: float | None) -> None:
    weights = build_weights(biased=biased)
    x, residual = random(routing.experts.shape[0], HIDDEN), random(routing.experts.shape[0], HIDDEN, seed=1)
    before = x.clone(), residual.clone()
    experts = Experts(weights, num_local=EXPERTS, ep=None, swiglu_limit=limit)
    found = experts.add_to(x, routing, residual, weigh_input=weigh_input)
    assert_near(found, apply_loop(x, routing, residual, weights, weigh_input=weigh_input, limit=limit))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_padding_rows_are_the_residual_whatever_stands_in_them() -> None:
    routing = Routing(torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5)).only(torch.tensor([True, False]))
    x, residual = random(2, HIDDEN), random(2, HIDDEN, seed=1)
    x[1] = float("nan")
    found = Experts(build_weights(), num_local=EXPERTS, ep=None).add_to(x, routing, residual)
    assert torch.equal(found[1], residual[1])
    assert bool(found.isfinite().all())


def route_to(*rows: tuple[int, ...]) -> Routing:
    return Routing(torch.tensor(rows), torch.rand(len(rows), len(rows[0]), generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("routing_of_0", "routing_of_1"),
    [
        (route_to((0, 3), (1, 2), (2, 3)), route_to((0, 1), (2, 0))),
        (route_to((2, 3), (3, 2)), route_to((0, 1))),
        (route_to((0, 1)), route_to((1, 0), (0, 1), (1, 0))),
        (route_to((0, 1), (2, 3)).only(torch.tensor([False, False])), route_to((3, 0))),
    ],
    ids=["both to both", "all to the other", "one rank's experts are idle", "one rank has padding alone"],
)
def test_expert_ranks_exchange_tokens(routing_of_0: Routing, routing_of_1: Routing) -> None:
    """Each rank has a batch of its own and half of the experts."""
    weights, routings = build_weights(biased=True), (routing_of_0, routing_of_1)

    def work(ranks: Collective) -> tuple[torch.Tensor, torch.Tensor]:
        routing = routings[ranks.rank]
        count = routing.experts.shape[0]
        x, residual = random(count, HIDDEN, seed=ranks.rank), random(count, HIDDEN, seed=5 + ranks.rank)
        mine = weights[2 * ranks.rank : 2 * ranks.rank + 2]
        found = Experts(mine, num_local=2, ep=ranks).add_to(x, routing, residual)
        return found, apply_loop(x, routing, residual, weights)

    for found, exact in run_ranks(2, work):
        assert_near(found, exact)


def step(live: torch.Tensor | None) -> Any:
    return cast("Any", SimpleNamespace(live=live))


def build_moe(tp: Collective | None, *, with_shared: bool, weigh_input: bool) -> MoE:
    """The layer of one tensor rank: its columns of every expert's intermediate width."""
    rank, size = (0, 1) if tp is None else (tp.rank, tp.size)
    mine = slice(rank * WIDTH // size, (rank + 1) * WIDTH // size)

    def cut(weights: ExpertWeights) -> ExpertWeights:
        assert isinstance(weights.gate_up, torch.Tensor)
        assert isinstance(weights.down, torch.Tensor)
        rows = torch.cat([half[mine] for half in weights.gate_up.chunk(2)])
        return dataclasses.replace(weights, gate_up=rows, down=weights.down[:, mine].contiguous())

    *routed, extra = (cut(weights) for weights in build_weights(EXPERTS + 1))
    assert isinstance(extra.gate_up, torch.Tensor)
    shared = GatedMLP(Linear(extra.gate_up), Linear(extra.down, reduce=tp)) if with_shared else None
    router = SoftmaxRouter(random(EXPERTS, HIDDEN, seed=7), 2, normalize=True)
    experts = Experts(routed, num_local=EXPERTS, ep=None)
    return MoE(router, experts, shared, tp, weigh_input=weigh_input)


def moe_loop(x: torch.Tensor, residual: torch.Tensor, live: torch.Tensor | None, **options: bool) -> torch.Tensor:
    weights = build_weights(EXPERTS + 1)
    routing = SoftmaxRouter(random(EXPERTS, HIDDEN, seed=7), 2, normalize=True)(x, live)
    if options["with_shared"]:
        residual = residual.double() + torch.stack([apply_expert(row, weights[-1], None) for row in x.double()])
    return apply_loop(x, routing, residual, weights, weigh_input=options["weigh_input"])


@pytest.mark.parametrize("with_shared", [True, False])
@pytest.mark.parametrize("weigh_input", [True, False])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("live", [None, torch.tensor([True, False, True, True])], ids=["whole", "padded"])
def test_moe(with_shared: bool, weigh_input: bool, size: int, live: torch.Tensor | None) -> None:
    """Under a tensor split too: residual and shared experts enter the sum of ranks once."""
    x, residual = random(4, HIDDEN), random(4, HIDDEN, seed=1)

    def work(ranks: Collective) -> torch.Tensor:
        tp = ranks if size > 1 else None
        layer = build_moe(tp, with_shared=with_shared, weigh_input=weigh_input)
        return layer.forward(x, residual, step(live))

    exact = moe_loop(x, residual, live, with_shared=with_shared, weigh_input=weigh_input)
    for found in run_ranks(size, work):
        assert_near(found, exact)
