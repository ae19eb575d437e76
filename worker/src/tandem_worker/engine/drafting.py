"""Joins a draft head with the engine: blocks of its chains, and the states that are kept when a step is over.

Imported only where there is a head.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from tandem_worker.engine.execute.batch import LogitsLayout, Wave
from tandem_worker.engine.execute.heads import HeadRanks, as_drafted
from tandem_worker.engine.guess.draft import Draw, Place
from tandem_worker.engine.sample.contract import LEAST_TEMPERATURE
from tandem_worker.engine.sample.host_sampler import find_kept
from tandem_worker.engine.sample.race import draw_words, make_gumbel
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.host.philox import DrawKey
from tandem_worker.model.contract import CausalLM, KVCache
from tandem_worker.model.draft.chains import ChainStart


class Drafting:
    """One per engine whose model has a head, on its thread."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, ranks: HeadRanks) -> None:
        """`model` was loaded with its head."""
        self._ranks = ranks
        self.block_size = kv_cache.spec.block_size
        self._tokens = as_drafted(model).vocabulary
        self._rows: list[int] = []
        """Rows of the step that is being completed, whose tokens stay."""

    @property
    def num_bytes(self) -> int:
        """Memory of this process that chains of guesses have taken."""
        return self._ranks.num_bytes

    def begin(self, places: Rows[Place], depth: int) -> GuessedChains:
        """Chains of guesses; satisfies `guess.draft.Begin`."""
        self._ranks.begin([ChainStart(place.token, place.position, place.blocks) for place in places], depth)
        return GuessedChains(self._ranks, places, self._tokens)

    def keep(self, plan: StepPlan, layout: LogitsLayout) -> None:
        """A step was computed and is to be completed: its decodes' newest tokens stay. Guesses do not yet."""
        if plan.decodes:
            count = len(plan.decodes)
            self._rows += range(count) if layout.rows is None else layout.rows[:count]

    def keep_guesses(self, wave: Wave, right: Rows[Sequence]) -> None:
        """The guesses of these choices in a wave were right, and are to be confirmed."""
        self._rows += [wave[sequence][1] for sequence in right]

    def end_step(self) -> None:
        """It is known of all of the step's tokens which of them stay."""
        if self._rows:
            rows, self._rows = self._rows, []
            self._ranks.keep(rows)

    def settle(self) -> None:
        """A choice lets go of its blocks."""
        self.end_step()
        self._ranks.settle()


class GuessedChains:
    """What is guessed by a head's logits; satisfies `guess.draft.Chain`."""

    def __init__(self, ranks: HeadRanks, places: Rows[Place], tokens: torch.Tensor) -> None:
        """`tokens` `[draft_vocab_size]`: the model's numbers of what the head guesses."""
        self._ranks = ranks
        self._tokens = tokens
        self._draws = [place.draw for place in places]
        self._positions = [place.position + 1 for place in places]
        """Positions of the chains' next guesses."""
        self._said: list[int] = []

    def advance(self, active: Rows[int]) -> tuple[list[int], list[float]]:
        """The next guess of each of these chains, and how likely the head holds it to be, 0 to 1."""
        logits = self._ranks.compute(active, self._said)
        for row, chain in enumerate(active):
            draw = self._draws[chain]
            if draw is not None:
                logits[row] = rank_drawn(logits[row], draw, self._positions[chain], self._tokens)
            self._positions[chain] += 1
        likeliest, guesses = logits.softmax(-1).max(-1)
        self._said = self._tokens[guesses].tolist()
        return self._said, likeliest.nan_to_num(0.0).tolist()  # no number promises nothing


def rank_drawn(logits: torch.Tensor, draw: Draw, position: int, tokens: torch.Tensor) -> torch.Tensor:
    """Scores `[N]` of a head's `logits` `[N]` for `tokens` `[N]`: with the noise with which the model's own token at
    `position` will be drawn, of what the limits would leave of them. So where both hold the same for likely, the head
    says the token that is drawn (arXiv:2408.07978). Penalties, biases and grammars are the model's alone."""
    scores = logits / max(draw.temperature, LEAST_TEMPERATURE)
    if not bool(scores.max().isfinite()):
        return scores  # of what is no number nothing is left, and its confidence is none
    key = DrawKey(draw.seed, draw.choice, position)
    if draw.top_k == 0 and draw.top_p >= 1.0 and draw.min_p == 0.0:
        return scores + torch.from_numpy(make_gumbel(draw_words(key, tokens.numpy())))
    limits = draw.top_k, draw.top_p, draw.min_p
    (kept,) = find_kept(logits[None], scores.softmax(-1)[None], [limits])
    left = torch.full_like(scores, -torch.inf)
    left[kept] = scores[kept] + torch.from_numpy(make_gumbel(draw_words(key, tokens[kept].numpy())))
    return left
