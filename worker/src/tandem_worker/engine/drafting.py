"""Joins a draft head with the engine: blocks of its chains, and the states that are kept when a step is over.

Imported only where there is a head.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from tandem_worker.engine.execute.batch import LogitsLayout, Wave
from tandem_worker.engine.guess.draft import Place
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.model.contract import CausalLM, KVCache
from tandem_worker.model.draft.chains import Chains, ChainStart
from tandem_worker.model.draft.drafted import DraftedLM


class Drafting:
    """One per engine whose model has a head, on its thread."""

    def __init__(self, model: DraftedLM, kv_cache: KVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self.block_size = kv_cache.spec.block_size

    @property
    def num_bytes(self) -> int:
        """Memory that chains of guesses have taken."""
        return self._model.chain_bytes

    def begin(self, places: Rows[Place], depth: int) -> Chains:
        """Chains of guesses; satisfies `guess.draft.Begin`."""
        return self._model.begin_chains([ChainStart(*place) for place in places], depth, self._kv_cache)

    def keep(self, plan: StepPlan, layout: LogitsLayout) -> None:
        """A step was computed and is to be completed: its decodes' newest tokens stay. Guesses do not yet."""
        if plan.decodes:
            count = len(plan.decodes)
            rows = range(count) if layout.rows is None else layout.rows[:count]
            self._keep(layout.sequences[:count], list(rows))

    def keep_guesses(self, wave: Wave, right: Rows[Sequence]) -> None:
        """The guesses of these choices in a wave were right, and are to be confirmed."""
        self._keep(right, [wave[sequence][1] for sequence in right])

    def _keep(self, sequences: Rows[Sequence], rows: list[int]) -> None:
        """The token that is computed next stays. Rows of decodes are the same in the step and in its logits."""
        blocks = [sequence.block_ids[sequence.num_computed // self.block_size] for sequence in sequences]
        self._model.keep_states(rows, blocks, self._kv_cache)


def build_drafting(model: CausalLM, kv_cache: KVCache) -> Drafting:
    """For a model that was loaded with its head."""
    assert isinstance(model, DraftedLM), "the configuration names a draft, but the model was loaded without"
    return Drafting(model, kv_cache)
