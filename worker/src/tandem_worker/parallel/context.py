"""The place of one process inside a model replica.

A replica is a grid of `pp_size x ep_size x tp_size` processes. Tensor-parallel ranks share every token and split every
matrix; pipeline ranks split the layers; expert ranks split the routed experts and each runs a batch of its own (data
parallel attention), exchanging tokens around the experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_worker.parallel.collectives import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """Rank and size along each axis; a collective is None where its axis has one rank."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    tp: Collective | None = field(default=None, compare=False)
    pp: Collective | None = field(default=None, compare=False)
    ep: Collective | None = field(default=None, compare=False)
    layers: range | None = None
    """Layers of this rank's pipeline stage; None shares them equally."""
    world: Collective | None = field(default=None, compare=False)
    """All ranks of the replica."""

    @property
    def world_size(self) -> int:
        """Processes in the grid of tensor-, pipeline- and expert-parallel ranks."""
        return self.tp_size * self.pp_size * self.ep_size

    @property
    def share(self) -> str:
        """What this rank holds of a model, told apart from every other rank's share of any grid."""
        axes = (
            ("tp", self.tp_rank, self.tp_size),
            ("pp", self.pp_rank, self.pp_size),
            ("ep", self.ep_rank, self.ep_size),
        )
        return " ".join(f"{name} {rank}/{size}" for name, rank, size in axes) + f" {self.layers}"

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens: it has the first layers of the pipeline."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits: it has the last layers of the pipeline."""
        return self.pp_rank == self.pp_size - 1


SINGLE = ParallelContext()
"""One process holds everything."""
