"""Process groups over `torch.distributed`: gloo between CPUs, NCCL between GPUs.

Ranks are numbered with the tensor axis innermost, then expert, then pipeline: ranks that talk most are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from tandem_worker.errors import StartupError
from tandem_worker.parallel.context import ParallelContext

_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Ranks along each axis of a replica."""

    tp: int = 1
    ep: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.ep * self.pp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """`(tp_rank, ep_rank, pp_rank)` of a global rank."""
        return rank % self.tp, rank // self.tp % self.ep, rank // (self.tp * self.ep)

    def rank(self, tp: int, ep: int, pp: int) -> int:
        return (pp * self.ep + ep) * self.tp + tp


def axis_ranks(shape: GroupShape, axis: str) -> list[list[int]]:
    """Global ranks of every group along `axis`, in an order that all ranks agree on."""
    groups: dict[tuple[int, ...], list[int]] = {}
    index = ("tp", "ep", "pp").index(axis)
    for rank in range(shape.world_size):
        place = shape.coordinates(rank)
        groups.setdefault(place[:index] + place[index + 1 :], []).append(rank)
    return list(groups.values())


def join_group(
    shape: GroupShape, rank: int, *, init_method: str, device: torch.device, timeout: timedelta = _TIMEOUT
) -> ParallelContext:
    """Meet the other ranks at `init_method` (for example `tcp://HOST:PORT` of ordinal 0) and say who this one is.

    Raises StartupError when they do not come together in time.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=shape.world_size, timeout=timeout
        )
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise StartupError(
            "GroupIncomplete", f"Rank {rank} did not meet the other {shape.world_size - 1} at {init_method}: {error}"
        ) from error
    collectives = {axis: _build_axis(shape, axis, rank) for axis in ("tp", "ep", "pp")}
    tp_rank, ep_rank, pp_rank = shape.coordinates(rank)
    return ParallelContext(
        tp_rank=tp_rank,
        tp_size=shape.tp,
        ep_rank=ep_rank,
        ep_size=shape.ep,
        pp_rank=pp_rank,
        pp_size=shape.pp,
        tp=collectives["tp"],
        ep=collectives["ep"],
        pp=collectives["pp"],
    )


def leave_group() -> None:
    """Give up the connections to the other ranks."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _build_axis(shape: GroupShape, axis: str, rank: int) -> DistributedCollective | None:
    """This rank's group along `axis`. Every rank takes part in creating every group, as `new_group` demands."""
    mine = None
    for ranks in axis_ranks(shape, axis):
        if len(ranks) == 1:
            continue
        group = dist.new_group(ranks)
        if rank in ranks:
            assert isinstance(group, dist.ProcessGroup)
            mine = DistributedCollective(group, ranks, ranks.index(rank))
    return mine


class DistributedCollective:
    """`Collective` over one `torch.distributed` group."""

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], rank: int) -> None:
        self._group = group
        self._ranks = ranks
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._ranks)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        pieces = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in self._ranks]
        dist.all_gather(pieces, x.contiguous(), group=self._group)
        return torch.cat(pieces, dim=dim)

    def all_to_all(self, x: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        received = x.new_empty((sum(receive_counts), *x.shape[1:]))
        dist.all_to_all_single(received, x.contiguous(), receive_counts, send_counts, group=self._group)
        return received

    def send(self, x: torch.Tensor, rank: int) -> None:
        dist.send(x.contiguous(), self._ranks[rank], group=self._group)

    def receive(self, like: torch.Tensor, rank: int) -> torch.Tensor:
        dist.recv(like, self._ranks[rank], group=self._group)
        return like
