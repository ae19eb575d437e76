from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.host.errors import StartupError
from tandem_worker.kernels.reference import moe_route_reference
from tandem_worker.model.layers.routers import (
    ChosenSoftmaxRouter,
    GroupedSigmoidRouter,
    Router,
    Routing,
    SigmoidRouter,
    SoftmaxRouter,
)

from tests.tandem_worker.model.layers.closeness import random

HIDDEN, EXPERTS = 12, 8
WEIGHT, BIAS = random(EXPERTS, HIDDEN, seed=1), random(EXPERTS, seed=2)

Choice = dict[int, float]
"""A token's experts and their weights."""


def read(routing: Routing) -> list[Choice]:
    return [
        dict(zip(experts, weights, strict=True))
        for experts, weights in zip(routing.experts.tolist(), routing.weights.tolist(), strict=True)
    ]


def sigmoid(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).sigmoid())


def best(scores: Sequence[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda expert: -scores[expert])[:count]


def softmax(scores: list[float]) -> list[float]:
    return torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()


def choose_softmax(logits: list[float], top_k: int, *, normalize: bool) -> Choice:
    weights = softmax(logits)
    chosen = best(logits, top_k)
    total = sum(weights[expert] for expert in chosen) if normalize else 1.0
    return {expert: weights[expert] / total for expert in chosen}


def choose_grouped(
    logits: list[float], top_k: int, *, groups: int, top_groups: int, normalize: bool, scale: float
) -> Choice:
    scores = [sigmoid(logit) for logit in logits]
    biased = [score + bias for score, bias in zip(scores, BIAS.double().tolist(), strict=True)]
    size = len(scores) // groups
    worth = [sum(sorted(biased[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
    kept = best(worth, top_groups)
    allowed = [value if expert // size in kept else float("-inf") for expert, value in enumerate(biased)]
    chosen = best(allowed, top_k)
    total = sum(scores[expert] for expert in chosen) if normalize else 1.0
    return {expert: scale * scores[expert] / total for expert in chosen}


def assert_same(router: Router, x: torch.Tensor, expected: list[Choice]) -> None:
    found = read(router(x))
    assert [set(choice) for choice in found] == [set(choice) for choice in expected]
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def exact_logits(x: torch.Tensor, bias: torch.Tensor | None = None) -> list[list[float]]:
    logits = x.double() @ WEIGHT.double().t()
    return (logits if bias is None else logits + bias.double()).tolist()


TOKENS = st.integers(0, 1 << 16).map(lambda seed: random(5, HIDDEN, seed=seed))
FEW = settings(max_examples=25, deadline=None)


@FEW
@given(TOKENS, st.integers(1, EXPERTS), st.booleans())
def test_softmax_over_all_experts(x: torch.Tensor, top_k: int, normalize: bool) -> None:
    expected = [choose_softmax(logits, top_k, normalize=normalize) for logits in exact_logits(x)]
    assert_same(SoftmaxRouter(WEIGHT, top_k, normalize=normalize), x, expected)


@FEW
@given(TOKENS, st.integers(1, EXPERTS))
def test_softmax_over_the_chosen(x: torch.Tensor, top_k: int) -> None:
    expected = [choose_softmax(logits, top_k, normalize=True) for logits in exact_logits(x, BIAS)]
    assert_same(ChosenSoftmaxRouter(WEIGHT, BIAS, top_k), x, expected)


@FEW
@given(TOKENS, st.integers(1, EXPERTS))
def test_each_chosen_by_its_own_sigmoid(x: torch.Tensor, top_k: int) -> None:
    expected = [{expert: sigmoid(row[expert]) for expert in best(row, top_k)} for row in exact_logits(x)]
    assert_same(SigmoidRouter(WEIGHT, top_k), x, expected)


GROUPS = st.sampled_from([(1, 1, 8), (2, 1, 4), (2, 2, 8), (4, 2, 4), (4, 3, 6)])
"""Groups, groups taken, and experts that are left."""


@FEW
@given(TOKENS, GROUPS, st.integers(1, EXPERTS), st.booleans(), st.sampled_from([1.0, 2.5]))
def test_groups_are_chosen_first(
    x: torch.Tensor, groups: tuple[int, int, int], top_k: int, normalize: bool, scale: float
) -> None:
    num_groups, top_groups, left = groups
    router = GroupedSigmoidRouter(
        WEIGHT, BIAS, top_k=min(top_k, left), num_groups=num_groups, top_groups=top_groups, normalize=normalize,
        scale=scale,
    )  # fmt: skip
    expected = [
        choose_grouped(
            row, router.top_k, groups=num_groups, top_groups=top_groups, normalize=normalize, scale=scale
        )
        for row in exact_logits(x)
    ]  # fmt: skip
    assert_same(router, x, expected)


def grouped(num_groups: int, top_groups: int) -> GroupedSigmoidRouter:
    return GroupedSigmoidRouter(
        WEIGHT, BIAS, top_k=3, num_groups=num_groups, top_groups=top_groups, normalize=True, scale=2.5
    )


def test_groups_must_divide_the_experts() -> None:
    with pytest.raises(StartupError, match="8 experts do not divide into n_group = 3"):
        grouped(3, 1)


@pytest.mark.parametrize(
    "router",
    [
        SoftmaxRouter(WEIGHT, 3, normalize=True),
        SoftmaxRouter(WEIGHT, 3, normalize=False),
        ChosenSoftmaxRouter(WEIGHT, BIAS, 3),
        SigmoidRouter(WEIGHT, 3),
        grouped(1, 1),
        grouped(4, 2),
    ],
    ids=["softmax", "softmax, not normalized", "chosen", "sigmoid", "one group", "groups"],
)
def test_the_kernels_rule_is_the_routers(router: Router) -> None:
    x = random(40, HIDDEN, seed=9)
    rule = router.rule()
    assert rule is not None
    logits = router.logits(x)
    weights, experts = moe_route_reference(logits, router.top_k, **rule)
    assert_same(router, x, read(Routing(experts, weights)))


def test_groups_that_no_kernel_has_are_torchs() -> None:
    router = GroupedSigmoidRouter(
        random(12, HIDDEN), random(12), top_k=2, num_groups=3, top_groups=2, normalize=True, scale=1.0
    )
    assert router.rule() is None


def test_padding_goes_nowhere() -> None:
    live = torch.tensor([True, False, True])
    routing = SoftmaxRouter(WEIGHT, 2, normalize=True)(random(3, HIDDEN), live)
    assert routing.has_padding
    assert routing.experts[1].tolist() == [-1, -1]
    assert routing.weights[1].tolist() == [0.0, 0.0]
    whole = SoftmaxRouter(WEIGHT, 2, normalize=True)(random(3, HIDDEN))
    assert not whole.has_padding
    assert torch.equal(whole.experts[live], routing.experts[live])
