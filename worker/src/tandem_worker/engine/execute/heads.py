"""The place where a draft head is computed. Imported only where there is a head."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

import torch

from tandem_worker.model.contract import CausalLM, KVCache
from tandem_worker.model.draft.chains import Chains, ChainStart
from tandem_worker.model.draft.drafted import DraftedLM


class HeadRanks(Protocol):
    """The place where a head is computed: here, or on all ranks of a group, which are told of it between the steps."""

    @property
    def num_bytes(self) -> int:
        """Memory of this process that chains of guesses have taken."""
        ...

    def begin(self, starts: Rows[ChainStart], depth: int) -> None:
        """Begin chains of up to `depth` guesses; earlier ones end here."""
        ...

    def compute(self, active: Rows[int], said: Rows[int]) -> torch.Tensor:
        """As `Chains.compute`."""
        ...

    def keep(self, rows: Rows[int]) -> None:
        """These rows of the last step's decodes stay, those of a text in order."""
        ...

    def settle(self) -> None:
        """Blocks are let go of: nothing is written to them any more."""
        ...


class HeadHere:
    """The share of a head in this process. Satisfies `HeadRanks` for a model of one rank."""

    def __init__(self, model: CausalLM, kv_cache: KVCache, *, late: bool = True) -> None:
        """`model` was loaded with its head. `late`: what it keeps of decoded tokens is written together with that of
        later ones, and `settle` is called; otherwise at once, as on ranks that nobody tells of blocks."""
        self._late = late
        self._model = as_drafted(model)
        self._kv_cache = kv_cache
        self._chains: Chains | None = None

    @property
    def num_guessed(self) -> int:
        """Tokens that the head can guess."""
        return self._model.num_guessed

    @property
    def num_bytes(self) -> int:
        return self._model.chain_bytes

    def begin(self, starts: Rows[ChainStart], depth: int) -> None:
        if self._model.head is not None:
            self._chains = self._model.begin_chains(starts, depth, self._kv_cache)

    def compute(self, active: Rows[int], said: Rows[int]) -> torch.Tensor:
        """None of a stage that has no head, `[0, num_guessed]`."""
        if self._model.head is None:
            return torch.empty(0, self.num_guessed)
        assert self._chains is not None, "chains are begun first"
        return self._chains.compute(active, said)

    def keep(self, rows: Rows[int]) -> None:
        if self._model.head is None:
            return
        is_due = self._model.keep(rows, self._kv_cache.spec.block_size)
        if is_due or not self._late:
            self._model.settle(self._kv_cache)

    def settle(self) -> None:
        if self._model.head is not None:
            self._model.settle(self._kv_cache)


def as_drafted(model: CausalLM) -> DraftedLM:
    """A model that has a draft head."""
    assert isinstance(model, DraftedLM), "the model was loaded without a draft head"
    return model
