"""Guesses of a draft head, token after token, behind many texts at a time.

The texts' entries are gathered from their blocks once, and those of the guesses stand behind them in memory of this
step alone: no block is written, so none needs to be there for a token that may never come, and none that is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from tandem_worker.model.draft.eagle3 import Eagle3Head

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
        head: Eagle3Head,
        kv_layer: torch.Tensor,
        states: torch.Tensor,
        starts: Sequence[ChainStart],
        depth: int,
        room: Room,
    ) -> None:
        """`kv_layer` `[num_blocks, 2, num_kv_heads, block_size, head_dim]`, `states` `[num_blocks, hidden]`."""
        device = kv_layer.device
        self._head = head
        self._tokens = torch.tensor([start.token for start in starts], device=device)
        self._positions = torch.tensor([start.position - 1 for start in starts], device=device)
        self._states = states.index_select(0, torch.tensor([start.blocks[-1] for start in starts], device=device))
        self._lengths = [start.position - 1 for start in starts]
        width = 2 * head.num_kv_heads * head.head_dim
        size = kv_layer.shape[3]
        spans = [max(len(start.blocks) * size, start.position + depth) for start in starts]
        memory = room.take([width * span for span in spans], kv_layer)
        shapes = [(2, head.num_kv_heads, span, head.head_dim) for span in spans]
        self._contexts = [flat.view(shape)[:, :, 1:] for flat, shape in zip(memory, shapes, strict=True)]
        """Keys and values of each text, whose first slot has none, and behind them those of the chain."""
        self._active: Sequence[int] = ()
        """Chains that were computed last, whose guesses are not known here yet."""
        for start, flat, shape in zip(starts, memory, shapes, strict=True):
            _gather(kv_layer, start, flat.view(shape))

    def compute(self, active: Sequence[int], said: Sequence[int]) -> torch.Tensor:
        """Logits `[len(active), draft_vocab_size]` of the next token of each of these chains. `said`: the model's
        numbers of the tokens that were guessed by the logits before, which these follow; of all chains of then."""
        head, device = self._head, self._tokens.device
        self._tokens[torch.tensor(self._active, dtype=torch.int64, device=device)] = torch.tensor(
            said, dtype=torch.int64, device=device
        )
        self._active = active
        rows = torch.tensor(active, device=device)
        positions = self._positions[rows]
        entries, residual = head.enter(self._tokens[rows], self._states[rows])
        queries = head.make_queries(entries, positions)
        made = head.make_keys_values(entries, positions)
        attended = torch.empty(len(active), head.num_heads * head.head_dim, dtype=head.dtype, device=rows.device)
        for row, chain in enumerate(active):
            attended[row] = self._attend(chain, queries[row], made[row])
        logits, states = head.finish(attended, residual)
        self._states[rows], self._positions[rows] = states, positions + 1
        return logits

    def _attend(self, chain: int, queries: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """`[num_heads * head_dim]` of one query per head over the chain's entries, the newest included."""
        context, length = self._contexts[chain], self._lengths[chain]
        context[:, :, length] = made
        self._lengths[chain] = length + 1
        keys, values = context[:, None, :, : length + 1]
        grouped = queries.view(1, self._head.num_kv_heads, -1, self._head.head_dim)
        return functional.scaled_dot_product_attention(grouped, keys, values).flatten()


def _gather(kv_layer: torch.Tensor, start: ChainStart, context: torch.Tensor) -> None:
    """Bring the entries of the start's blocks to the beginning of `context`, each to its place and no other: what
    follows the start's position is overwritten by the chain before it is read."""
    if start.position > 1:
        _, _, heads, size, dim = kv_layer.shape
        count = len(start.blocks)
        places = context[:, :, : count * size].view(2, heads, count, size, dim).permute(2, 0, 1, 3, 4)
        torch.index_select(kv_layer, 0, torch.tensor(start.blocks, device=kv_layer.device), out=places)
