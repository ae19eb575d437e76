"""What a draft head keeps of decoded tokens, made late and of many tokens at once.

A token's state and entry follow from what the model has computed of it, and nobody reads them before the head is asked
or the token's block is known to others. So a head that is not asked reads its weights once in several tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tandem_worker.model.contract import ForwardBatch

MOST_WAITING = 64
"""Tokens that wait at most, about: with more at once the weights are read no less often for each."""


class Decoded(NamedTuple):
    """The newest tokens of a step's texts and the guesses behind them, which may be wrong."""

    streams: torch.Tensor
    """`[T, width]`: what their states are made of."""
    tokens: list[int]
    positions: list[int]
    slots: list[int]
    """Places of their keys and values."""
    blocks_before: list[int]
    """The block of the token before each."""

    @classmethod
    def of(cls, batch: ForwardBatch, streams: torch.Tensor, block_size: int) -> Decoded:
        """Those of a step, whose streams are these."""
        count = streams.shape[0]
        positions, slots = batch.positions[:count].tolist(), batch.slot_mapping[:count].tolist()
        blocks = [slot // block_size for slot in slots]
        first_of_block = [row for row, position in enumerate(positions) if position % block_size == 0]
        if first_of_block:
            starts = list(accumulate(batch.query_lens_host[: batch.num_decodes], initial=0))
            for row in first_of_block:
                table = batch.block_tables[bisect_right(starts, row) - 1]
                blocks[row] = int(table[max(0, positions[row] // block_size - 1)])
        return cls(streams, batch.token_ids[:count].tolist(), positions, slots, blocks)

    @classmethod
    def join(cls, parts: Sequence[Decoded]) -> Decoded:
        """Those of a step that was computed in parts, in order."""
        return cls(
            torch.cat([part.streams for part in parts]),
            [token for part in parts for token in part.tokens],
            [position for part in parts for position in part.positions],
            [slot for part in parts for slot in part.slots],
            [block for part in parts for block in part.blocks_before],
        )


class Waiting:
    """Tokens that stay, whose states and entries are to be made."""

    def __init__(self) -> None:
        self.is_due = False
        """They are to be made now: a block is full, whose text others may have, or they are many."""
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.blocks_before: list[int] = []
        """The block that has the state of the token before each, unless that one waits too."""
        self.rows_after: list[int] = []
        self.rows_before: list[int] = []
        """Tokens, by their place among these, and the ones before them, which wait too."""
        self._streams: list[torch.Tensor] = []
        self._rows: dict[int, int] = {}
        """The place of each among these, by its slot."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def streams(self) -> torch.Tensor:
        """`[T, width]`."""
        return self._streams[0] if len(self._streams) == 1 else torch.cat(self._streams)

    def add(self, decoded: Decoded, rows: Sequence[int], block_size: int) -> None:
        """These of a step's tokens stay. Of a text they come in order."""
        self._streams.append(decoded.streams[list(rows)])
        for row in rows:
            place, slot, position = len(self.tokens), decoded.slots[row], decoded.positions[row]
            before = self._rows.get(decoded.blocks_before[row] * block_size + (position - 1) % block_size)
            if before is not None:
                self.rows_after.append(place)
                self.rows_before.append(before)
            self._rows[slot] = place
            self.tokens.append(decoded.tokens[row])
            self.positions.append(position)
            self.slots.append(slot)
            self.blocks_before.append(decoded.blocks_before[row])
            self.is_due |= position % block_size == block_size - 1
        self.is_due |= len(self.tokens) >= MOST_WAITING
