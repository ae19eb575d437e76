"""Tokens are drawn from the model's distribution at each depth of a step's guesses, however often these are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from statistics import NormalDist
from typing import Any

import pytest
import torch
from tandem_api.launch import SpeculativeConfig
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_speculation import replace_guesser

SHARES = torch.tensor([0.72, 0.12, 0.06, 0.04, 0.03, 0.02, 0.01])
"""Of the tokens, whatever stands before."""
DEPTH = 4
TOGETHER = 32
CHANCE = 1e-4
"""Of a distribution that is right to be found wrong."""


class Constant(HistoryModel):
    """Says the same of every place."""

    def __init__(self) -> None:
        super().__init__(len(SHARES))

    def forward(self, batch: Any, kv_cache: Any) -> torch.Tensor:
        self._check(batch)
        return SHARES.log().repeat(len(batch.logits_rows), 1)


class Likeliest:
    """Guesses the likeliest token again and again. A `guess.contract.Guesser`."""

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        return {one: Guess((0,) * most[one], Source.TEXT, (0.7,) * most[one]) for one in sequences}

    def forget(self, sequence: Sequence) -> None: ...


def draw(make_rig: Callable[..., Rig], count: int) -> list[Counter[int]]:
    """Tokens by the depth that they were drawn at, `count` or more at each."""
    config = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=DEPTH - 1)
    rig = make_rig(Constant(), num_blocks=6000, speculative=config)
    replace_guesser(rig, Likeliest())  # pyright: ignore[reportArgumentType]
    drawn = [Counter[int]() for _ in range(DEPTH)]
    seed = 0
    while drawn[-1].total() < count:
        names = [f"{seed + place}" for place in range(TOGETHER)]
        for place, name in enumerate(names):
            rig.submit(name, (place % 7,), 500, temperature=1.0, seed=seed + place, ignore_eos=True)
        rig.wait()
        for name in names:
            for delta in rig.out.deltas.pop((name, 0)):
                for depth, token in enumerate(delta.token_ids):
                    drawn[depth][token] += 1
        seed += TOGETHER
    return drawn


def chi_square(drawn: Counter[int]) -> float:
    """Pearson's statistic against `SHARES`."""
    total = drawn.total()
    return sum((drawn[token] - total * share) ** 2 / (total * share) for token, share in enumerate(SHARES.tolist()))


def critical(freedom: int) -> float:
    """Value that the statistic exceeds with `CHANCE` (Wilson and Hilferty, 1931)."""
    deviate, part = NormalDist().inv_cdf(1 - CHANCE), 2 / (9 * freedom)
    return freedom * (1 - part + deviate * part**0.5) ** 3


def check(drawn: list[Counter[int]]) -> None:
    for depth, counts in enumerate(drawn):
        assert chi_square(counts) < critical(len(SHARES) - 1), f"depth {depth}: {counts}"


def test_draws_have_the_model_s_distribution_at_each_depth(make_rig: Callable[..., Rig]) -> None:
    check(draw(make_rig, 2_000))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_hundred_thousand_draws_at_each_depth(make_rig: Callable[..., Rig]) -> None:
    check(draw(make_rig, 100_000))


def test_a_distribution_that_is_a_little_wrong_is_found_out() -> None:
    """What rejecting twice would make of it: the likeliest token a twentieth less often."""
    assert critical(6) == pytest.approx(27.86, rel=0.02)
    wrong = Counter({0: 68_400, 1: 13_543, 2: 6_771, 3: 4_514, 4: 3_386, 5: 2_257, 6: 1_129})
    assert chi_square(wrong) > 10 * critical(6)
