"""One vector from the hidden states of a prompt, which arrive in chunks."""

from __future__ import annotations

import torch

from tandem_worker.model.pooling import Pooling


class Pool:
    """What mean and first-token pooling keep of one prompt between its chunks."""

    __slots__ = ("_count", "_first", "_sum")

    def __init__(self) -> None:
        self._count = 0
        self._first = self._sum = torch.empty(0)

    def add(self, start: int, rows: torch.Tensor) -> None:
        """`rows` `[length, hidden]` of the positions from `start`. From 0 again after a preemption."""
        total = rows.sum(dim=0)
        if start == 0:
            self._count, self._first, self._sum = 0, rows[0].clone(), torch.zeros_like(total)
        assert start == self._count, f"position {start} follows {self._count}"
        self._count += rows.shape[0]
        self._sum += total

    def read(self, pooling: Pooling) -> torch.Tensor:
        """`[hidden]`."""
        return self._sum / self._count if pooling is Pooling.MEAN else self._first
