"""What ranks along one axis say to each other."""

from __future__ import annotations

from typing import Protocol

import torch


class Collective(Protocol):
    """The ranks along one axis of the grid. Every rank must make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Place of this process along the axis, from 0."""
        ...

    @property
    def size(self) -> int:
        """Ranks along the axis."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may write into `x`."""
        ...

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Ranks' tensors of equal shape one after another along `dim`."""
        ...

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Rows of `x` in runs, one run per destination; returns the runs received, in order of rank."""
        ...

    def send(self, x: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor; that rank calls `receive` with its shape and type."""
        ...

    def receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        """A tensor of the shape and type of `like`, which may be overwritten."""
        ...
