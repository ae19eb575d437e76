"""Routing, the block map and the fused experts."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import moe, reference
from tandem_worker.kernels.block_map import build_block_map
from tandem_worker.kernels.quantized import quantize_fp8, quantize_int4, quantize_mxfp4


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
    with pytest.raises(ValueError, match="cannot choose 9 of 8 experts"):
        kernels.moe_route(randn(2, 8), 9)
