"""Guesses on a GPU: what rows cost in a recorded step, and tokens per second where so many guesses are right.

Answers are one token again and again, which a bias sees to, so that it is known which guess is right, whatever rounds
otherwise in other company. What is accepted is then drawn: each guess is right with the same chance, and says so.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.execute.cuda_graphs import DecodeGraphs
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence as Choice
from tandem_worker.model.contract import CausalLM, allocate_kv_cache

from bench.gpu.item import Figures
from bench.gpu.steps import BLOCK_SIZE, build_decode_batch, build_recorder
from bench.kernels.measure import median_seconds

MOST_GUESSES = 7
STEP_GOAL = 1.15
"""Steps of one row that a step with `MOST_GUESSES` may take."""
CHANCE = 0.7
"""A draft head's, place for place: of seven guesses 2.1 are right in the mean."""
GOALS = {1: 1.95, 8: 1.62, 64: 1.38, 256: 1.0}
"""Tokens per second over those without guesses, by streams."""
_TOKEN, _OTHER = 7, 8
ANSWER: Mapping[str, Any] = {"logit_bias": {_TOKEN: 100.0}}
"""Sampling of requests whose answers are known."""


class DrawnGuesser:
    """Guesses that are right with a given chance; none where it is 0. A `guess.contract.Guesser`."""

    def __init__(self) -> None:
        self.chance = 0.0
        self._random = random.Random(5)

    def propose(self, sequences: Sequence[Choice], most: Mapping[Choice, int], plan: StepPlan) -> dict[Choice, Guess]:
        """As the protocol says; what was said before does not matter."""
        del plan
        if not self.chance:
            return {}
        return {sequence: self._draw(most[sequence]) for sequence in sequences}

    def _draw(self, count: int) -> Guess:
        tokens = tuple(_TOKEN if self._random.random() < self.chance else _OTHER for _ in range(count))
        return Guess(tokens, Source.TEXT, (self.chance,) * count)

    def forget(self, sequence: Choice) -> None:
        """There is nothing to forget."""


class KnowingGuesser:
    """Guesses that are those of known answers, but for some. A `guess.contract.Guesser`."""

    def __init__(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._answers = {tuple(prompt): list(answer) for prompt, answer in zip(prompts, answers, strict=True)}
        self._vocab_size = vocab_size
        self._random = random.Random(6)
        self.guessed = 0

    def propose(self, sequences: Sequence[Choice], most: Mapping[Choice, int], plan: StepPlan) -> dict[Choice, Guess]:
        """As the protocol says."""
        del plan
        found: dict[Choice, Guess] = {}
        for sequence in sequences:
            rest = self._answers[tuple(sequence.prompt)][len(sequence.output) :][: most[sequence]]
            tokens = tuple((token + (self._random.random() > CHANCE)) % self._vocab_size for token in rest)
            if tokens:
                found[sequence] = Guess(tokens, Source.TEXT, (CHANCE,) * len(tokens))
                self.guessed += len(tokens)
        return found

    def forget(self, sequence: Choice) -> None:
        """There is nothing to forget."""


def measure_guessed_steps(model: CausalLM, context: int) -> Figures:
    """Recorded steps of a lone sequence, without guesses and with seven."""
    device, blocks = model.device, -(-context // BLOCK_SIZE)
    cache = allocate_kv_cache(model.kv_cache_spec(BLOCK_SIZE), blocks + 1, device)
    generator = torch.Generator().manual_seed(5)
    tables = (torch.randperm(blocks, generator=generator) + 1)[None]
    milliseconds: list[float] = []
    with torch.inference_mode():
        for layer in cache.layers:
            layer[1:].normal_()
        graphs = DecodeGraphs(
            model, cache, max_blocks=blocks, batch_sizes=[1, 1 + MOST_GUESSES], recorder=build_recorder(device)
        )
        for width in (1, 1 + MOST_GUESSES):
            batch = build_decode_batch(model, tables, [context], generator, [width])
            assert graphs.run(batch) is not None, "no recording fits the step"
            milliseconds.append(1e3 * median_seconds(lambda batch=batch: graphs.run(batch), device))
    share = milliseconds[1] / milliseconds[0]
    return {
        "milliseconds": milliseconds[1],
        "milliseconds without": milliseconds[0],
        "steps": share,
        "ratio": STEP_GOAL / share,
        "of": f"{STEP_GOAL} steps",
        "met": share <= STEP_GOAL,
    }


def measure_guesses(
    engine: EngineCore, guesser: DrawnGuesser, batch: int, rounds: int, measure_rate: Callable[[int], float]
) -> Figures:
    """Tokens per second with guesses and without, in turns; `measure_rate` answers `batch` prompts, others for each
    number."""
    rates: dict[float, list[float]] = {0.0: [], CHANCE: []}
    before = engine.stats()
    for number in range(rounds + 1):  # the first one warms up, and costs of rows are learned
        for chance, found in rates.items():
            guesser.chance = chance
            found.append(measure_rate(number))
    guesser.chance = 0.0
    after = engine.stats()
    plain, guessed = (statistics.median(found[1:]) for found in rates.values())
    drafted, accepted = (
        sum(now.values()) - sum(then.values())
        for now, then in (
            (after.draft_tokens_total, before.draft_tokens_total),
            (after.accepted_draft_tokens_total, before.accepted_draft_tokens_total),
        )
    )
    goal = GOALS.get(batch, 1.0)
    return {
        "tokens_per_s": guessed,
        "tokens_per_s without": plain,
        "gain": guessed / plain,
        "chance": CHANCE,
        "checked": drafted,
        "accepted": accepted,
        "ratio": guessed / plain / goal,
        "of": f"{goal} times the tokens without guesses",
        "met": guessed >= goal * plain,
    }
