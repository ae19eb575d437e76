"""Ranks of one axis as threads of one process, whose collectives are plain sums and concatenations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from tandem_worker.parallel.collectives import Collective

T = TypeVar("T")


class _Axis:
    """What the ranks of one axis put on the table, and where they wait for one another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.table: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, given: Any) -> list[Any]:
        """What every rank gave, in order of rank. Nobody returns before everybody has read."""
        self.table[rank] = given
        self._barrier.wait()
        everything = list(self.table)
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class _Rank:
    def __init__(self, axis: _Axis, rank: int) -> None:
        self._axis = axis
        self.rank = rank
        self.size = axis.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._axis.exchange(self.rank, x.clone())).sum(0)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self._axis.exchange(self.rank, x.clone()), dim)

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        runs = [runs[self.rank] for runs in self._axis.exchange(self.rank, x.clone().split(send_counts))]
        assert [run.shape[0] for run in runs] == receive_counts
        return torch.cat(runs)

    def send(self, x: torch.Tensor, rank: int) -> None:
        raise NotImplementedError("layers only speak to all ranks at once")

    def receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        raise NotImplementedError("layers only speak to all ranks at once")


def run_ranks(size: int, work: Callable[[Collective], T]) -> list[T]:
    """What `work` returns on each of `size` ranks."""
    axis = _Axis(size)

    def guarded(rank: int) -> T:
        try:
            return work(_Rank(axis, rank))
        except BaseException:
            axis.abort()  # the others would wait for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(guarded, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in causes or errors:
            raise error
        return [future.result() for future in futures]
