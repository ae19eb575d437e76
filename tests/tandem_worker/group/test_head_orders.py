"""Rank 0's end of a draft head in a group, with a head and a leader that only note what they are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.heads import GroupHead
from tandem_worker.model.draft.chains import ChainStart
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.shape import GroupShape


class Head:
    num_bytes = 4096
    num_guessed = 8

    def begin(self, starts: list[ChainStart], depth: int) -> None: ...

    def compute(self, active: list[int], said: list[int]) -> torch.Tensor:
        return torch.zeros(len(active), 8)


class Leader:
    size = 2

    def __init__(self) -> None:
        self.told: list[list[int]] = []
        self.blamed: list[str] = []
        self.error: Exception | None = None
        self.cause = "rank 1 is gone"

    def send_head_order(self, ranks: list[int], order: bytes) -> None:
        self.told.append(list(ranks))
        if self.error is not None:
            raise self.error

    def blame(self, loss: Any) -> None:
        self.blamed.append(loss.message)


def make(leader: Leader, shape: GroupShape, lane: int) -> GroupHead:
    own: Any = Head()
    return GroupHead(own, leader, ParallelContext(), shape, lane)  # type: ignore[arg-type]


def test_memory_of_chains_counts_once_and_each_lane_is_told_of_its_own() -> None:
    """A worker's memory is that of rank 0's process, whose head computes in lane 0."""
    leader = Leader()
    lanes = [make(leader, GroupShape(dp=2), lane) for lane in range(2)]
    assert [lane.num_bytes for lane in lanes] == [Head.num_bytes, 0]
    for lane in lanes:
        lane.begin([ChainStart(3, 1, [1])], 2)
    assert leader.told == [[], [1]]


@pytest.mark.parametrize("error", [GroupLostError("rank 1 is gone"), OSError("no route"), ValueError("no number")])
def test_an_order_that_does_not_arrive_ends_the_group(error: Exception) -> None:
    leader = Leader()
    head = make(leader, GroupShape(tp=2), 0)
    assert head.compute([0, 1], []).shape == (2, 8)
    leader.error = error
    with pytest.raises(GroupLostError, match="rank 1 is gone"):
        head.compute([0], [1, 2])
    assert len(leader.blamed) == 1
