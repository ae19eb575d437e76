"""What is expected of guesses is what comes of them, for texts that repeat much, little and nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate
from operator import mul
from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.engine.guess.costs import StepCosts
from tandem_worker.engine.guess.lookup import LookupGuesser
from tandem_worker.engine.guess.speculator import SpeculationSettings, Speculator
from tandem_worker.engine.schedule.plan import StepPlan

VOCAB = 5000
Text = tuple[list[int], list[int]]
"""Prompt and answer."""


class Choice:
    """As much of a `Sequence` as guessers by text look at."""

    def __init__(self, text: Text) -> None:
        prompt, self.answer = text
        self.prompt = tuple(prompt)
        self.lead = 0.0
        self.request = SimpleNamespace(
            prompt=self.prompt, cache_salt="", prediction=(), literals=None, prompt_index=None, prediction_index=None
        )
        self.output = self.answer[:1]
        self.guessing: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def most_guesses(self) -> int:
        return len(self.answer) - len(self.output) - 1

    def go_on(self, guessed: tuple[int, ...]) -> int:
        """Say what was guessed right, and a token more. Returns how many were right."""
        right = 0
        for guess, token in zip(guessed, self.answer[len(self.output) :], strict=False):
            if guess != token:
                break
            right += 1
        self.output.extend(self.answer[len(self.output) : len(self.output) + right + 1])
        return right


def edited(chance: random.Random) -> Text:
    """A copy of the prompt, some tokens of which are others."""
    prompt = [chance.randrange(VOCAB) for _ in range(200)]
    return prompt, [chance.randrange(VOCAB) if chance.random() < 0.04 else token for token in prompt]


def repeated(chance: random.Random) -> Text:
    """Rows that are alike but for two tokens."""
    row = [chance.randrange(VOCAB) for _ in range(16)]
    rows = [[*row, chance.randrange(VOCAB), chance.randrange(40)] for _ in range(12)]
    return [chance.randrange(VOCAB) for _ in range(30)], [token for each in rows for token in each]


def baited(chance: random.Random) -> Text:
    """Rows that begin like those of the prompt, and end otherwise."""
    heads = [[chance.randrange(VOCAB) for _ in range(5)] for _ in range(20)]
    prompt, answer = ([token for head in heads for token in (*head, *(chance.randrange(VOCAB) for _ in range(4)))]
                      for _ in range(2))  # fmt: skip
    return prompt, answer


def drawn(chance: random.Random) -> Text:
    prompt, answer = ([chance.randrange(VOCAB) for _ in range(150)] for _ in range(2))
    return prompt, answer


def mixed(chance: random.Random) -> Text:
    return chance.choice((edited, repeated, baited, drawn))(chance)


def replay(kind: Callable[[random.Random], Text], together: int, rounds: int) -> tuple[float, float, float]:
    """Tokens of a step as they were expected and as they came, each over what the step cost, and guesses checked for
    each token; of the second half of the rounds, when the first one has taught something."""
    chance = random.Random(together)
    speculator = Speculator(LookupGuesser(), SpeculationSettings(), max_rows=256, costs=StepCosts())
    expected = came = checked = tokens = 0.0
    for number in range(rounds):
        live = [Choice(kind(chance)) for _ in range(together)]
        while live:
            plan = StepPlan(decodes=list(live))  # pyright: ignore[reportArgumentType]
            found: Any = speculator._choose(plan, 256)
            guesses = sum(len(guess.tokens) for guess in found.values())
            cost = speculator.costs.relative(len(live) + guesses) / speculator.costs.relative(len(live))
            hoped = sum(sum(accumulate(guess.chances[: len(guess.tokens)], mul)) for guess in found.values())
            right = sum(choice.go_on(found[choice].tokens if choice in found else ()) for choice in live)
            if number >= rounds // 2:
                expected += (1 + hoped / len(live)) / cost
                came += (1 + right / len(live)) / cost
                checked += guesses
                tokens += len(live) + right
            live = [choice for choice in live if len(choice.output) < len(choice.answer)]
    return expected, came, checked / tokens


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("kind", [edited, repeated, baited, drawn, mixed])
def test_the_gain_that_is_predicted_comes(kind: Callable[[random.Random], Text], together: int) -> None:
    expected, came, checked = replay(kind, together, 40 if together == 1 else 6)
    assert expected == pytest.approx(came, rel=0.05 if together > 1 else 0.06), "many guesses in a row are worth more"
    if kind is drawn:
        assert checked < 0.01, "nothing is checked in vain"
