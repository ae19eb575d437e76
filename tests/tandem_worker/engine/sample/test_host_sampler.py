from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.sample.contract import NO_TOKEN
from tandem_worker.engine.sample.host_sampler import choose_tokens, compute_logprobs, score_prompt
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.params import SamplingParams, TokenLogprob
from tandem_worker.engine.schedule.request import Request, Sequence
from tandem_worker.host.philox import DrawKey, draw_words

VOCAB = 600
"""More than the sampler's candidates: both its paths are reached."""


def build_sequence(output: list[int] | None = None, *, choice: int = 0, prompt: int = 3, **params: Any) -> Sequence:
    sampling = SamplingParams(**({"max_tokens": 100} | params))
    request = Request(
        id="r", prompt=tuple(range(prompt)), sampling=sampling, arrival=0, chain_root=b"", prompt_chain=[]
    )
    sequence = Sequence(request, choice, (0, 0, 0))
    sequence.sampler_state = SamplingState(sampling, frozenset([2]))
    sequence.lockstep = sequence.sampler_state.needs_host
    sequence.output = output or []
    return sequence


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(seed)) * scale


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[list[int], dict[int, TokenLogprob]]:
    tokens = choose_tokens(logits, sequences).tolist()
    return tokens, compute_logprobs(logits, sequences, tokens)


def frequencies(logits: torch.Tensor, count: int = 2000, **params: Any) -> torch.Tensor:
    """How often each token is chosen over many positions."""
    sequences = [build_sequence([0] * position, **params) for position in range(count)]
    tokens, _ = sample(logits.expand(count, -1).clone(), sequences)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1]) / count


def test_greedy_takes_the_likeliest() -> None:
    logits = random_logits(5)
    tokens, logprobs = sample(logits, [build_sequence(temperature=0.0) for _ in range(5)])
    assert tokens == logits.argmax(-1).tolist()
    assert not logprobs


def test_a_temperature_near_zero_is_greedy_and_does_not_overflow() -> None:
    logits = random_logits(4) * 1000
    assert sample(logits, [build_sequence(temperature=1e-30 + 1e-8)] * 4)[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.7}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.76}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"min_p": 0.25}, [5 / 9, 2.5 / 9, 1.5 / 9, 0]),
        ({"top_k": 3, "top_p": 0.5}, [1, 0, 0, 0]),
        ({"top_k": 1}, [1, 0, 0, 0]),
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
        ({"logit_bias": {0: -100, 3: math.log(5)}}, [0, 0.25 / 0.9, 0.15 / 0.9, 0.5 / 0.9]),
    ],
)
def test_tokens_appear_as_often_as_they_should(params: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    observed = frequencies(logits, **params)
    assert observed[torch.tensor(expected) == 0].sum() == 0
    assert torch.allclose(observed, torch.tensor(expected, dtype=torch.float32), atol=0.04)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.01, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    temperature=st.floats(0.1, 3.0),
)
def test_the_choice_does_not_depend_on_the_batch(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = random_logits(6, seed % 1000)
    params = {"seed": seed, "top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    others = [build_sequence(temperature=0.0), build_sequence(top_k=3), build_sequence(), build_sequence(top_p=0.2)]
    mine = build_sequence([5, 6], choice=1, **params)
    alone, _ = sample(logits[:1].clone(), [mine])
    together, _ = sample(logits[[1, 2, 0, 3, 4]].clone(), [*others[:2], mine, *others[2:]])
    assert together[2] == alone[0]
    ranked = logits[0].sort(descending=True).indices.tolist()
    rank = ranked.index(alone[0])
    assert top_k == 0 or rank < top_k
    probs = torch.softmax(logits[0].double() / temperature, 0)
    assert probs[alone[0]] >= min_p * probs.max() * (1 - 1e-5)
    kept = probs[ranked[:top_k] if top_k else ranked]
    assert kept[:rank].sum() <= top_p * kept.sum() + 1e-5


CHI_SQUARE = {23: 54.0, 12: 36.1, 7: 26.0}
"""What of 10,000 true draws one exceeds, by degrees of freedom."""


@pytest.mark.parametrize(
    ("params", "kept"), [({}, 24), ({"temperature": 0.6, "top_k": 8}, 8), ({"min_p": 1 / 12.5}, 13)], ids=str
)
def test_draws_are_true_draws(params: dict[str, Any], kept: int) -> None:
    """Chi-square of 8,000 of them, by every token of a distribution with rare ones."""
    logits = torch.arange(1, 25).flip(0).float().log() if "min_p" not in params else -0.2 * torch.arange(24)
    check_distribution(logits, 8_000, params, kept)


@pytest.mark.full
@pytest.mark.parametrize("params", [{}, {"temperature": 0.6}, {"choice": 3}], ids=str)
def test_100_000_draws_are_true_draws(params: dict[str, Any]) -> None:
    check_distribution(torch.arange(1, 25).flip(0).float().log(), 100_000, params, 24)


def check_distribution(logits: torch.Tensor, count: int, params: dict[str, Any], kept: int) -> None:
    seen = torch.zeros(24)
    for start in range(0, count, 2000):
        sequences = [build_sequence(seed=start + place, **params) for place in range(2000)]
        tokens = choose_tokens(logits.repeat(2000, 1), sequences)
        seen += torch.bincount(tokens, minlength=24)
    assert seen[kept:].sum() == 0
    expected = count * torch.softmax(logits[:kept] / params.get("temperature", 1.0), 0)
    assert float(((seen[:kept] - expected) ** 2 / expected).sum()) < CHI_SQUARE[kept - 1]


def test_a_flat_distribution_is_sorted_whole() -> None:
    logits = torch.zeros(VOCAB)
    observed = frequencies(logits, count=1500, top_p=0.9)
    assert (observed > 0).sum() > 400, "more tokens than the sampler's candidates are within the top 90%"


@pytest.mark.parametrize("temperature", [1.0, 0.1, 0.01])
def test_a_top_p_that_rounded_weights_do_not_reach_leaves_what_weighs_anything(temperature: float) -> None:
    """Weights sum to a little less than 1, and at low temperatures those of the last tokens are 0."""
    logits = random_logits(40, seed=2, scale=6.0)
    rows = [build_sequence([0] * row, temperature=temperature, top_p=1 - 1e-15) for row in range(40)]
    unlimited = [build_sequence([0] * row, temperature=temperature) for row in range(40)]
    assert sample(logits, rows)[0] == sample(logits, unlimited)[0]


def test_noise_is_uniform_and_differs_by_every_key() -> None:
    words = np.concatenate([draw_words(DrawKey(1, 0, position), 20) for position in range(1000)])
    counts = np.histogram(words, bins=20, range=(0, 2**32))[0]
    assert 0.9 < counts.min() / 1000 < counts.max() / 1000 < 1.1
    keys = [DrawKey(s, c, p) for s in range(5) for c in range(5) for p in range(5)]
    assert len({draw_words(key, 1)[0] for key in keys}) == 125
    assert (draw_words(DrawKey(-1, 0, 0), 9) == draw_words(DrawKey(2**64 - 1, 0, 0), 9)).all()


def test_penalties_follow_their_definitions() -> None:
    logits = torch.tensor([[2.0, -1.0, 1.0, 0.5, 0.2]])
    sequence = build_sequence([3, 3, 4], prompt=2, presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=2)
    row = logits[0].clone()
    sequence.sampler_state.adjust(row, sequence)
    assert torch.allclose(row, torch.tensor([1.0, -2.0, 1.0, 0.25 - 0.5 - 0.5, 0.1 - 0.25 - 0.5]))


def test_penalties_are_kept_up_to_date_and_can_be_rebuilt() -> None:
    params = {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "temperature": 0.0}
    going_on = build_sequence(**params)
    logits = random_logits(1, scale=0.2)
    for _ in range(12):
        rebuilt = build_sequence(list(going_on.output), **params)
        (expected,), _ = sample(logits.clone(), [rebuilt])
        (token,), _ = sample(logits.clone(), [going_on])
        assert token == expected
        going_on.output.append(token)
    assert len(set(going_on.output)) > 1


def test_stop_tokens_are_impossible_before_the_minimum_length() -> None:
    logits = torch.zeros((1, VOCAB))
    logits[0, 2] = 50
    assert sample(logits, [build_sequence([9], temperature=0.0, min_tokens=2)])[0] != [2]
    assert sample(logits, [build_sequence([9, 9], temperature=0.0, min_tokens=2)])[0] == [2]


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(2)
    expected = torch.log_softmax(logits[0], -1)
    sequences = [build_sequence(temperature=0.7, top_k=5, num_logprobs=3, logit_bias={7: 100}), build_sequence()]
    tokens, logprobs = sample(logits, sequences)
    assert list(logprobs) == [0]
    assert logprobs[0].token_id == tokens[0] == 7
    assert logprobs[0].logprob == pytest.approx(float(expected[7]), abs=1e-5)
    assert [token for token, _ in logprobs[0].top] == expected.topk(3).indices.tolist()
    assert score_prompt(logits[:1], [4], 0)[0].logprob == pytest.approx(float(expected[4]), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prompts_tokens_have_their_ranks(dtype: torch.dtype) -> None:
    """In the order of all tokens, where of equals the lower id comes first."""
    logits = (random_logits(40) * 2).round().to(dtype)
    assert all(len(row.unique()) < len(row) for row in logits), "there are equals"
    targets = [(7 * row) % logits.shape[1] for row in range(40)]
    scores = score_prompt(logits, targets, 3)
    order = logits.sort(descending=True, stable=True).indices.tolist()
    assert [score.rank for score in scores] == [
        row.index(target) + 1 for row, target in zip(order, targets, strict=True)
    ]
    assert [[token for token, _ in score.top] for score in scores] == [row[:3] for row in order]


def test_no_token_where_nothing_is_possible() -> None:
    logits = random_logits(4)
    logits[1, 7] = torch.nan
    logits[2] = -torch.inf
    tokens, _ = sample(logits, [build_sequence(temperature=0.0), build_sequence(), build_sequence(), Forbidding.row()])
    assert tokens[0] != NO_TOKEN
    assert tokens[1:] == [NO_TOKEN] * 3


class Forbidding:
    """A grammar that allows what its words say."""

    def __init__(self, words: list[int] | None = None) -> None:
        self.words = words or []

    def new(self) -> Forbidding:
        return self

    def fill_mask(self, mask: object) -> None:
        assert isinstance(mask, torch.Tensor)
        mask.zero_()
        for index, word in enumerate(self.words):
            mask[index] = word

    def accept(self, token_id: int) -> None: ...

    @property
    def terminated(self) -> bool:
        return False

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def failed(self) -> bool:
        return False

    def give_up(self, reason: str) -> None: ...

    @classmethod
    def row(cls, words: list[int] | None = None) -> Sequence:
        return build_sequence(grammar=cls(words))


def test_a_grammar_leaves_only_what_its_bitmask_allows() -> None:
    words = [0b1001, -(2**31)]
    seen = {sample(random_logits(1, seed) * 0.01, [Forbidding.row(words)])[0][0] for seed in range(30)}
    tokens, _ = sample(torch.zeros((200, VOCAB)), [Forbidding.row(words) for _ in range(200)])
    sampled = {sample(torch.zeros((1, VOCAB)), [_at(Forbidding.row(words), position)])[0][0] for position in range(60)}
    assert seen | set(tokens) <= {0, 3, 63}
    assert sampled == {0, 3, 63}


def _at(sequence: Sequence, position: int) -> Sequence:
    sequence.output = [1] * position
    return sequence
