"""A head ranks with the noise of the draw that it guesses: where it knows the likelihoods it knows the token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.engine.drafting import rank_drawn
from tandem_worker.engine.guess.draft import Draw
from tandem_worker.engine.sample.host_sampler import choose_tokens

from tests.tandem_worker.engine.sample.test_host_sampler import VOCAB, build_sequence, random_logits

ALL = torch.arange(VOCAB)
LIMITS: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 300, "top_p": 0.99}]


def draw_of(params: dict[str, Any], choice: int = 1) -> Draw:
    whole = {"seed": 7, "choice": choice, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Draw(**(whole | params))


def share_right(logits: torch.Tensor, heads: torch.Tensor, params: dict[str, Any], tokens: torch.Tensor = ALL) -> float:
    """Of the tokens that are drawn from `logits`, how many a head with `heads` for likelihoods guesses."""
    sequences = [build_sequence([0] * row, choice=1, **({"seed": 7} | params)) for row in range(len(logits))]
    drawn = choose_tokens(logits.clone(), sequences).tolist()
    guessed = [
        int(tokens[rank_drawn(row, draw_of(params), sequence.next_position, tokens).argmax()])
        for row, sequence in zip(heads, sequences, strict=True)
    ]
    return sum(mine == theirs for mine, theirs in zip(guessed, drawn, strict=True)) / len(drawn)


@pytest.mark.parametrize("params", [*LIMITS, {"temperature": 0.7, "seed": -3}, {"temperature": 2.0}], ids=str)
def test_a_head_that_knows_the_likelihoods_guesses_every_token(params: dict[str, Any]) -> None:
    logits = random_logits(100)
    assert share_right(logits, logits, params) == 1.0


def test_a_head_of_a_part_of_the_vocabulary_guesses_what_it_can() -> None:
    logits = random_logits(300)
    known = torch.arange(1, VOCAB, 2)
    logits[:, ::2] -= 2.0
    odd = (logits.softmax(-1)[:, 1::2].sum(-1)).mean()
    assert share_right(logits, logits[:, known], {}, known) == pytest.approx(float(odd), abs=0.06)


@pytest.mark.parametrize("params", LIMITS[:4], ids=str)
def test_noise_is_worth_more_than_the_likeliest_token(params: dict[str, Any]) -> None:
    """Where the head's likelihoods are near the model's."""
    logits = random_logits(400, scale=2.0)
    heads = logits + random_logits(400, seed=1, scale=0.5)
    sequences = [build_sequence([0] * row, choice=1, **({"seed": 7} | params)) for row in range(len(logits))]
    drawn = choose_tokens(logits.clone(), sequences)
    likeliest = float((heads.argmax(-1) == drawn).float().mean())
    assert share_right(logits, heads, params) > likeliest + 0.1


@pytest.mark.parametrize("params", [*LIMITS, {"top_p": 1 - 1e-15, "temperature": 0.01}], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_a_head_that_computes_no_numbers_promises_nothing(params: dict[str, Any], value: float) -> None:
    """An error while a step is planned would end the engine."""
    logits = random_logits(1)[0]
    logits[:: 1 if value < 0 else 7] = value
    (confidence,) = rank_drawn(logits, draw_of(params), 3, ALL)[None].softmax(-1).amax(-1)
    assert not confidence.isfinite()
