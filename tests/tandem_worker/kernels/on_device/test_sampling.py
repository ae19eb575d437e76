"""Logit edits, draws, sampling and logprobs."""

from __future__ import annotations

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.host.philox import DrawKey, draw_words, philox4x32
from tandem_worker.kernels import reference, sampling


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks per row, without a large vocabulary."""
    monkeypatch.setattr(sampling, "_BLOCK", 128)


def per_row(device, *values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=device)


def test_philox_known_answers():
    """The vectors published with Random123."""
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox4x32((ones,) * 4, (ones,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)


def keys(device, count: int, first: int = 0):
    """Seeds, choices and positions of so many draws that have nothing in common."""
    numbers = torch.arange(first, first + count, dtype=torch.int64, device=device)
    return numbers * 0x9E3779B97F4A7C15 % (1 << 62), numbers % 3, 7 * numbers


def test_noise_is_philoxs():
    """Token by token, and so for any tokens alone."""
    key = DrawKey(-2, 3, 1 << 33 | 5)
    words = draw_words(key, 23)
    for token in range(23):
        counter = (5, 3, token // 4, 0)
        assert words[token] == philox4x32(counter, (0xFFFFFFFE, 0xFFFFFFFF))[token % 4]
    some = torch.tensor([22, 0, 7, 7, 12]).numpy()
    assert (draw_words(key, some) == words[some]).all()


def test_draws_depend_on_seed_choice_and_position_only(device):
    seeds = per_row(device, 0, 1, -1, 1 << 40, 0, 0, 0, dtype=torch.int64)
    choices = per_row(device, 0, 0, 0, 0, 1, 0, 0, dtype=torch.int64)
    positions = per_row(device, 0, 0, 5, 0, 0, 1, 0, dtype=torch.int64)
    ones = torch.ones(7, device=device)
    arguments = (torch.zeros(7, 300, device=device), seeds, choices, positions, ones, ones.int() * 0, ones, ones * 0)
    tokens = kernels.sample_tokens(*arguments)
    assert torch.equal(tokens, reference.sample_tokens_reference(*arguments))
    assert len(set(tokens.tolist())) == 6
    assert tokens[0] == tokens[6]


def test_penalties(randn, assert_matches, device, generator):
    logits = randn(3, 100)
    seen = (torch.rand(3, 100, generator=generator) < 0.3).to(device)
    counts = torch.randint(-3, 4, (3, 100), generator=generator).clamp_min(0).int().to(device)
    penalties = [per_row(device, 0.5, 0.0, -1.0), per_row(device, 0.2, 0.0, 0.7), per_row(device, 1.3, 1.0, 1.0)]
    expected = logits.clone()
    reference.apply_penalties_reference(expected, seen, counts, *penalties)
    kernels.apply_penalties(logits, seen, counts, *penalties)
    assert_matches(logits, expected, 1e-6)


def test_logit_bias(randn, device):
    logits, values = randn(2, 50), randn(2, 3)
    ids = torch.tensor([[4, 49, -1], [-1, -1, 0]], dtype=torch.int32, device=device)
    expected = logits.clone()
    reference.apply_logit_bias_reference(expected, ids, values)
    kernels.apply_logit_bias(logits, ids, values)
    assert torch.equal(logits, expected)


def test_bitmask(randn, device, generator):
    logits = randn(3, 75)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (3, 3), generator=generator, dtype=torch.int32).to(device)
    bitmask[1] = -1
    expected = logits.clone()
    reference.apply_bitmask_reference(expected, bitmask)
    kernels.apply_bitmask(logits, bitmask)
    assert torch.equal(logits, expected)


SETTINGS = [
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.7, 0.0),
    (0, 1.0, 0.1),
    (20, 0.8, 0.02),
    (1, 1.0, 0.0),
    (500, 0.01, 0.0),
]


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), SETTINGS)
def test_samples_equal_the_twins(randn, device, top_k, top_p, min_p):
    logits = randn(2, 150, scale=2.0)
    logits[0, 40:] = float("-inf")
    temperature = per_row(device, 0.6, 1.5)
    p, low = (torch.full((2,), value, device=device) for value in (top_p, min_p))
    ks = torch.full((2,), top_k, dtype=torch.int32, device=device)
    for first in range(0, 4 if device.type == "cuda" else 2, 2):
        arguments = (logits, *keys(device, 2, first), temperature, ks, p, low)
        assert torch.equal(kernels.sample_tokens(*arguments), reference.sample_tokens_reference(*arguments))


EQUALS = [(2, 1.0, 0.0), (0, 0.3, 0.0), (60, 0.9, 0.0), (0, 1.0, 0.2)]
GREEDY = [(1, 1.0, 0.0), (0, 0.0, 0.0), (0, 1e-6, 0.0), (0, 1.0, 1.0)]


@pytest.mark.parametrize("levels", [0, 1])
def test_equals_are_ranked_by_id(randn, device, levels):
    """Logits of few values, zeros of both signs, over several blocks: the same choice as the twin's, draw by draw."""
    rows = [*EQUALS, *GREEDY]
    logits = randn(len(rows), 150, scale=levels).round()
    logits[:, ::7] = logits[:, ::7].abs() * -1.0
    top_k, top_p, min_p = (per_row(device, *column) for column in zip(*rows, strict=True))
    arguments = (logits, *keys(device, len(rows)), torch.full_like(top_p, 0.8), top_k.long(), top_p, min_p)
    tokens = kernels.sample_tokens(*arguments)
    assert torch.equal(tokens, reference.sample_tokens_reference(*arguments))
    assert torch.equal(tokens[len(EQUALS) :], logits.argmax(-1)[len(EQUALS) :])


@pytest.mark.parametrize(("top_k", "top_p", "kept"), [(50, 1.0, 50), (140, 0.95, 133)])
def test_draws_among_equals_reach_the_lowest_ids_alone(device, top_k, top_p, kept):
    """Of what is kept of 150 equals in two blocks each comes up, and nothing else does."""
    tokens = draw_as_the_twin(device, torch.zeros(150, device=device), 1500, top_k=top_k, top_p=top_p)
    assert set(tokens.tolist()) == set(range(kept))


def test_draws_reproduce_the_distribution(device):
    """Weights of a token that is hardly ever drawn, too: chi-square at a chance of 1 in 10,000 to fail."""
    count, weights = 4000, torch.tensor([0.5, 0.25, 0.15, 0.09, 0.01], device=device)
    seen = torch.bincount(draw_as_the_twin(device, weights.log(), count), minlength=5)
    expected = weights.cpu() * count
    assert float(((seen - expected) ** 2 / expected).sum()) < 23.5


def draw_as_the_twin(device, logits, count: int, top_k: int = 0, top_p: float = 1.0):
    """So many of the twin's draws. The kernel draws the same: all of them where it is compiled, else the first ones."""
    rows, ones = logits.repeat(count, 1), torch.ones(count, device=device)
    arguments = [rows, *keys(device, count), ones, ones.int() * top_k, ones * top_p, ones * 0]
    expected = reference.sample_tokens_reference(*arguments)
    number = count if device.type == "cuda" else 4
    assert torch.equal(kernels.sample_tokens(*(each[:number] for each in arguments)), expected[:number])
    return expected.cpu()


def test_greedy_ties_and_rows_without_a_token(device):
    logits = torch.zeros(5, 130, device=device)
    logits[0, [7, 99]] = 3.0
    logits[1] = float("-inf")
    logits[2, 5] = float("nan")
    logits[3, 5] = float("inf")
    logits[4, 129] = 1e-3
    zeros = torch.zeros(5, device=device)
    tokens = kernels.sample_tokens(logits, *keys(device, 5), zeros, zeros.int(), zeros + 1, zeros)
    assert tokens.tolist() == [7, -1, -1, -1, 129]


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_logprobs(randn, assert_matches, device, num_top):
    logits = randn(3, 200, scale=3.0)
    logits[1, :64] = float("-inf")
    logits[2] = logits[2].round()
    logits[2, [3, 150]] = 40.0
    tokens = per_row(device, 0, 199, 3, dtype=torch.int64)
    own, top, ids = kernels.token_logprobs(logits, tokens, num_top)
    expected_own, expected_top, expected_ids = reference.token_logprobs_reference(logits, tokens, num_top)
    assert_matches(own, expected_own)
    assert torch.equal(ids, expected_ids)
    if num_top:
        assert_matches(top, expected_top)


def test_sampling_refuses_what_it_would_misread(randn, device):
    logits, ones = randn(2, 40), torch.ones(2, device=device)
    with pytest.raises(TypeError, match="logits must be float32"):
        kernels.apply_bitmask(logits.half(), torch.zeros(2, 2, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"bitmask must have shape \[2, 2\]"):
        kernels.apply_bitmask(logits, torch.zeros(2, 1, dtype=torch.int32, device=device))
    with pytest.raises(TypeError, match="top_k must be int32 or int64"):
        kernels.sample_tokens(logits, *keys(device, 2), ones, ones, ones, ones)
    with pytest.raises(ValueError, match="num_top must be 0 to 20, got 21"):
        kernels.token_logprobs(logits, ones.int(), 21)
