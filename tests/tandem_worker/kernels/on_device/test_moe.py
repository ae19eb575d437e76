"""Routing, the block map and the fused experts."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import moe, reference
from tandem_worker.kernels.block_map import build_block_map

from tests.tandem_worker.kernels.quantizing import quantize_fp8, quantize_int4, quantize_mxfp4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scoring": "sigmoid", "renormalize": False},
        {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5, "biased": True},
    ],
    ids=["softmax", "sigmoid", "grouped"],
)
def test_routing(randn, assert_matches, options):
    options = dict(options)
    bias = randn(32, scale=0.1) if options.pop("biased", False) else None
    logits = randn(7, 32)
    weights, ids = kernels.moe_route(logits, 4, bias=bias, **options)
    expected_weights, expected_ids = reference.moe_route_reference(logits, 4, bias=bias, **options)
    assert torch.equal(ids, expected_ids)
    assert_matches(weights, expected_weights)


def test_routing_among_a_number_of_experts_that_is_no_power_of_two(randn):
    logits = randn(3, 24)
    assert torch.equal(kernels.moe_route(logits, 6)[1], reference.moe_route_reference(logits, 6)[1])


@pytest.mark.parametrize("options", [{}, {"scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "scale": 2.5}])
def test_padding_goes_to_no_expert(randn, device, options):
    logits = randn(7, 32)
    live = torch.tensor([True, False, True, True, False, False, True], device=device)
    weights, ids = kernels.moe_route(logits, 4, live=live, **options)
    expected_weights, expected_ids = reference.moe_route_reference(logits, 4, live=live, **options)
    assert torch.equal(ids, expected_ids)
    assert (ids[~live] == -1).all()
    assert (weights[~live] == 0).all()
    plain_weights, plain_ids = kernels.moe_route(logits, 4, **options)
    assert torch.equal(ids[live], plain_ids[live])
    assert torch.equal(weights[live], plain_weights[live])
    assert torch.equal(expected_weights[live], reference.moe_route_reference(logits, 4, **options)[0][live])


def test_the_block_map_has_no_block_for_padding(generator, device):
    ids = torch.randint(0, 7, (60, 3), generator=generator, dtype=torch.int32).to(device)
    ids[20:] = -1
    built, without = (build_block_map(some, 7, 4, first_expert=0) for some in (ids, ids[:20].contiguous()))
    live = built.experts >= 0
    assert live.sum() == (without.experts >= 0).sum()
    count = int(live.sum())
    listed = built.pairs[: count * 4]
    assert sorted(pair for pair in listed.tolist() if pair < ids.numel()) == list(range(60))
    assert not live[count:].any()
    nothing = build_block_map(torch.full_like(ids, -1), 7, 4, first_expert=0)
    assert (nothing.experts == -1).all()


@pytest.mark.parametrize("first_expert", [0, 1])
@pytest.mark.parametrize("mapped", [False, True])
def test_padding_reads_no_weight(randn, assert_matches, monkeypatch, generator, device, mapped, first_expert):
    """Experts that only padding would meet are not numbers: whoever multiplies by them shows it."""
    monkeypatch.setattr(moe, "_MAX_UNSORTED_PAIRS", 0 if mapped else 256)
    gate_up, down = randn(4, 64, 32, scale=0.2), randn(4, 32, 32, scale=0.2)
    gate_up[3], down[3] = float("nan"), float("nan")
    x, residual = randn(9, 32), randn(9, 32)
    x[5:] = float("nan")
    weights, ids = route(generator, device, 9, 3, 2)
    ids += first_expert
    ids[5:], weights[5:] = -1, 0.0
    options = {"residual": residual, "first_expert": first_expert}
    y = kernels.fused_moe(x, gate_up, down, weights, ids, **options)
    assert torch.equal(y[5:], residual[5:])
    expected = reference.fused_moe_reference(x.double(), gate_up.double(), down.double(), weights, ids, **options)
    assert_matches(y, expected)


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_block_map_lists_every_local_pair_once(generator, device, num_tokens):
    ids = torch.randint(0, 12, (num_tokens, 3), generator=generator, dtype=torch.int32).to(device)
    built = build_block_map(ids, 7, 4, first_expert=2)
    pairs, experts = built.pairs.view(-1, 4).tolist(), built.experts.tolist()
    flat = ids.flatten().tolist()
    listed = [
        pair for row, expert in zip(pairs, experts, strict=True) for pair in row if expert >= 0 and pair < len(flat)
    ]
    assert sorted(listed) == [pair for pair, expert in enumerate(flat) if 2 <= expert < 9]
    for row, expert in zip(pairs, experts, strict=True):
        assert all(flat[pair] - 2 == expert for pair in row if pair < len(flat))


def route(generator, device, num_tokens, num_experts, top_k):
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    weights, ids = scores.topk(top_k, dim=-1)
    return weights.to(device), ids.int().to(device)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("form", ["plain", "fp8", "int4", "mxfp4"])
def test_fused_moe(randn, assert_matches, monkeypatch, generator, device, half_dtype, mapped, form):
    monkeypatch.setattr(moe, "_MAX_UNSORTED_PAIRS", 0 if mapped else 256)
    x = randn(5, 128, dtype=half_dtype)
    gate_up, down = randn(4, 256, 128, scale=0.1), randn(4, 128, 128, scale=0.1)
    make = {"plain": lambda w: w.to(half_dtype), "fp8": quantize_fp8, "int4": lambda w: quantize_int4(w, 32),
            "mxfp4": quantize_mxfp4}[form]  # fmt: skip
    gate_up, down = make(gate_up), make(down)
    weights, ids = route(generator, device, 5, 4, 2)
    expected = reference.fused_moe_reference(x.double(), gate_up, down, weights, ids)
    assert_matches(kernels.fused_moe(x, gate_up, down, weights, ids), expected)


@pytest.mark.parametrize("mapped", [False, True])
def test_fused_moe_of_one_rank_with_biases(randn, assert_matches, monkeypatch, generator, device, dtype, mapped):
    """More pairs than a block of rows, experts of other ranks, biases, gpt-oss's activation."""
    monkeypatch.setattr(moe, "_MAX_UNSORTED_PAIRS", 0 if mapped else 256)
    x = randn(24, 64, dtype=dtype)
    gate_up, down = randn(3, 96, 64, dtype=dtype, scale=0.2), randn(3, 64, 48, dtype=dtype, scale=0.2)
    options = {"gate_up_bias": randn(3, 96), "down_bias": randn(3, 64), "swiglu_limit": 3.0, "first_expert": 2}
    options["residual"] = randn(24, 64, dtype=dtype)
    weights, ids = route(generator, device, 24, 4, 2)
    expected = reference.fused_moe_reference(x.double(), gate_up.double(), down.double(), weights, ids, **options)
    assert_matches(kernels.fused_moe(x, gate_up, down, weights, ids, **options), expected)


def test_moe_refuses_what_it_would_misread(randn, device):
    ids, weights = torch.zeros(2, 1, dtype=torch.int32, device=device), randn(2, 1)
    with pytest.raises(ValueError, match=r"down must have shape \[2, 32, 16\]"):
        kernels.fused_moe(randn(2, 32), randn(2, 32, 32), randn(2, 32, 32), weights, ids)
    with pytest.raises(TypeError, match="topk_ids must be int32"):
        kernels.fused_moe(randn(2, 32), randn(2, 32, 32), randn(2, 32, 16), weights, ids.long())
    with pytest.raises(TypeError, match="live must be bool"):
        kernels.moe_route(randn(2, 8), 2, live=ids[:, 0])
    with pytest.raises(ValueError, match="cannot choose 9 of 8 experts"):
        kernels.moe_route(randn(2, 8), 9)
