"""The grid of ranks of one replica. Imports no torch.

Ranks are numbered with the tensor axis innermost, then expert, then pipeline, then data: ranks that talk most are
neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tandem_api.launch import Parallelism

AXES = ("tp", "ep", "pp", "dp")


class Coordinates(NamedTuple):
    """The place of a rank along each axis."""

    tp: int
    ep: int
    pp: int
    dp: int


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks along each axis of a replica."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1

    @classmethod
    def of(cls, parallelism: Parallelism) -> GroupShape:
        """The shape that a role's `parallelism` asks for."""
        return cls(tp=parallelism.tensor, ep=parallelism.expert, pp=parallelism.pipeline, dp=parallelism.data)

    @property
    def world_size(self) -> int:
        """Ranks of a replica, those of all data-parallel lanes together."""
        return self.tp * self.ep * self.pp * self.dp

    @property
    def num_lanes(self) -> int:
        """Batches that are computed side by side: one per data and expert coordinate."""
        return self.ep * self.dp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank along each axis."""
        tp, rest = rank % self.tp, rank // self.tp
        ep, rest = rest % self.ep, rest // self.ep
        return Coordinates(tp, ep, rest % self.pp, rest // self.pp)

    def rank(self, tp: int, ep: int, pp: int, dp: int = 0) -> int:
        """The global rank at these coordinates: the inverse of `coordinates`."""
        return ((dp * self.pp + pp) * self.ep + ep) * self.tp + tp

    def stage_layers(self, rank: int, ends: Sequence[int]) -> range:
        """Layers of this rank's stage, where stage i ends before layer `ends[i]`."""
        stage = self.coordinates(rank).pp
        return range(ends[stage - 1] if stage else 0, ends[stage])

    def lane(self, rank: int) -> int:
        """Which lane's batches this rank computes."""
        place = self.coordinates(rank)
        return place.dp * self.ep + place.ep

    def speaker(self, lane: int) -> int:
        """The rank that has a lane's logits and sends them to rank 0."""
        return self.rank(0, lane % self.ep, self.pp - 1, lane // self.ep)


def axis_ranks(shape: GroupShape, axis: str) -> list[list[int]]:
    """Global ranks of every group along `axis`, in an order that all ranks agree on."""
    groups: dict[tuple[int, ...], list[int]] = {}
    index = AXES.index(axis)
    for rank in range(shape.world_size):
        place = shape.coordinates(rank)
        groups.setdefault(place[:index] + place[index + 1 :], []).append(rank)
    return list(groups.values())
