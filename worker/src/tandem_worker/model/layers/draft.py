"""The layer of an EAGLE-3 head (arXiv:2503.01840) as a whole, for backends that compute it in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem_worker.model.layers.embedding import LMHead
from tandem_worker.model.layers.linear import Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.norm import RMSNorm
from tandem_worker.model.layers.rotary import RotaryEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What a head's layer is made of."""

    input_norm: RMSNorm
    state_norm: RMSNorm
    mlp_norm: RMSNorm
    norm: RMSNorm
    queries: Linear
    keys_values: Linear
    out: Linear
    mlp: GatedMLP
    output: LMHead
    rotary: RotaryEmbedding
    num_heads: int
    num_kv_heads: int
    head_dim: int
    adds_normed: bool
    """The layer adds to the norm of the state, not to the state."""
    gives_normed: bool
    """The next state is behind the last norm."""


class HeadCalls(Protocol):
    """A head whose rows are computed together. Its entries are in blocks of one size, as those of all layers."""

    def write(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        kv_layer: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Entries of embeddings `[T, hidden]` and the states before them `[T, hidden]`, at positions `[T]` int64, to
        their slots `[T]` int64."""
        ...

    def advance(
        self,
        embedded: torch.Tensor,
        states: torch.Tensor,
        positions: Sequence[int],
        contexts: Sequence[torch.Tensor],
        slots: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits `[A, num_guessed]` float32 and the next states `[A, hidden]`. `contexts` are blocks
        `[count, 2, num_kv_heads, block_size, head_dim]` each, which have an entry in each slot before these but the
        first, and get these as well."""
        ...
