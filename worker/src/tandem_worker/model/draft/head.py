"""What a draft head is to those who ask it: one layer that is given tokens and the states before them.

Its entry of (state t, token t + 1) is rotated for position t and follows from nothing else, so those of prompts take no
attention. What its layer makes of the newest entry says token t + 2, and is the state of the next one: a head guesses
to any depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from tandem_worker.model.contract import KVLayerSpec

Embed = Callable[[torch.Tensor], torch.Tensor]
"""Rows `[T, hidden]` of token numbers `[T]`."""
Output = Callable[[torch.Tensor], torch.Tensor]
"""Logits `[T, num_guessed]` float32 of states `[T, hidden]`."""


class States(Protocol):
    """Makes a head's states of a model's streams, stage by stage of a pipeline."""

    taps: tuple[int, ...]
    """Layers of this stage, from 0, before which the streams are taken; their number: behind the last one."""
    width: int
    """What travels along the stages for each token beside its stream."""

    def add(self, features: torch.Tensor, sums: torch.Tensor | None) -> torch.Tensor:
        """States `[T, hidden]` on the last stage, and what the next one is given on those before, `[T, width]`: of the
        streams `[T, taps * target_hidden]` and what the stage before has given, None on the first."""
        ...


class DraftHead(Protocol):
    """Weights of a head on one device, and its arithmetic, row by row.

    Tensor-parallel ranks share it as they share the model. They make the same calls, and each has all logits.
    """

    hidden_size: int
    entry_width: int
    """Elements of one entry on this rank."""

    def kv_layer_spec(self, block_size: int) -> KVLayerSpec:
        """Shape of a block of its entries."""
        ...

    def write(
        self,
        tokens: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the entries of tokens `[T]` with the states before them `[T, hidden]`, whose positions are `[T]`, in
        their slots `[T]`."""
        ...

    def gather(self, kv_layer: torch.Tensor, blocks: Sequence[int], memory: torch.Tensor) -> torch.Tensor:
        """The entries of these blocks at the beginning of `memory` `[span * entry_width]`, which has whole blocks, as a
        view of all of it with room for the others. The first slot has no entry."""
        ...

    def advance(
        self,
        tokens: Sequence[int],
        states: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[torch.Tensor],
        lengths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[A, num_guessed]` float32 behind tokens `[A]`, and the states `[A, hidden]` of what is guessed.

        `contexts` are those of `gather`, which have so many entries before these and get these as well.
        """
        ...
