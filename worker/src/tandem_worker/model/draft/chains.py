"""Guesses of a draft head, token after token, behind many texts at a time.

The texts' entries are gathered from their blocks once, and those of the guesses stand behind them in memory of this
step alone: no block is written, so none needs to be there for a token that may never come, and none that is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tandem_worker.model.draft.head import DraftHead

_SPARE = 8
"""Texts grow in every step: room is made for an eighth more, so that fresh memory is touched now and then alone."""


class ChainStart(NamedTuple):
    """The newest token of a text, behind which a chain begins."""

    token: int
    position: int
    """The token's, at least 1: those before it are computed, it itself is not."""
    blocks: Sequence[int]
    """Blocks of all positions before it, in order; the last one has the state of the position before it."""


class Room:
    """Memory for the entries of chains, which is kept from step to step, so that steps touch no fresh one."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return self._memory.nbytes

    def take(self, counts: Sequence[int], like: torch.Tensor) -> list[torch.Tensor]:
        """Tensors of so many elements each; those that were taken before are given back by this."""
        total = sum(counts)
        if self._memory.numel() < total or self._memory.dtype != like.dtype or self._memory.device != like.device:
            self._memory = torch.empty(0)  # the old is not held beside the new
            self._memory = like.new_empty(total + total // _SPARE)
        return list(self._memory[:total].split(list(counts)))


class Chains:
    """One step's guesses: valid until the next step's begin."""

    def __init__(
        self,
        head: DraftHead,
        kv_layer: torch.Tensor,
        states: torch.Tensor,
        starts: Sequence[ChainStart],
        depth: int,
        room: Room,
        block_size: int,
    ) -> None:
        """`kv_layer` has the blocks of the head's entries, `states` is `[num_blocks, hidden]`."""
        size = block_size
        self._head = head
        self._tokens = [start.token for start in starts]
        self._positions = [start.position - 1 for start in starts]
        newest = torch.tensor([start.blocks[-1] for start in starts], device=kv_layer.device)
        self._states = states.index_select(0, newest)
        self._lengths = self._positions.copy()
        spans = [max(len(start.blocks), -(-(start.position + depth) // size)) * size for start in starts]
        memory = room.take([head.entry_width * span for span in spans], kv_layer)
        self._contexts = [
            head.gather(kv_layer, start.blocks if start.position > 1 else (), part)
            for start, part in zip(starts, memory, strict=True)
        ]
        """Entries of each text, each at its place and no other, and behind them those of the chain: what is behind the
        start's position is overwritten by the chain before it is read."""
        self._active: Sequence[int] = ()
        """Chains that were computed last, whose guesses are not known here yet."""

    def compute(self, active: Sequence[int], said: Sequence[int]) -> torch.Tensor:
        """Logits `[len(active), draft_vocab_size]` of the next token of each of these chains. `said`: the model's
        numbers of the tokens that were guessed by the logits before, which these follow; of all chains of then."""
        for chain, token in zip(self._active, said, strict=True):
            self._tokens[chain] = token
        self._active = active
        rows = list(active)
        are_all = rows == list(range(len(self._tokens)))
        states = self._states if are_all else self._states[rows]
        tokens, positions = [self._tokens[chain] for chain in rows], [self._positions[chain] for chain in rows]
        contexts, lengths = [self._contexts[chain] for chain in rows], [self._lengths[chain] for chain in rows]
        logits, states = self._head.advance(tokens, states, positions, contexts, lengths)
        for chain in rows:
            self._lengths[chain] += 1
            self._positions[chain] += 1
        if are_all:
            self._states = states
        else:
            self._states[rows] = states
        return logits
