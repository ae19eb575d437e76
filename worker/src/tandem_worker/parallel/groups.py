"""Process groups over `torch.distributed`: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from tandem_worker.host.errors import StartupError
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.shape import GroupShape, axis_ranks

_TIMEOUT = timedelta(minutes=5)


def join_group(
    shape: GroupShape,
    rank: int,
    *,
    store: dist.Store,  # pyright: ignore[reportPrivateImportUsage]
    device: torch.device,
    stage_ends: Sequence[int] | None = None,
    timeout: timedelta = _TIMEOUT,
) -> ParallelContext:
    """Meet the other ranks in `store` and say who this one is. Stage i's layers end before layer `stage_ends[i]`.

    Raises StartupError when the others do not come in time.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=shape.world_size, timeout=timeout)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise StartupError(
            "GroupIncomplete", f"Rank {rank} did not meet the other {shape.world_size - 1}: {error}"
        ) from error
    collectives = {axis: _build_axis(shape, axis, rank) for axis in ("tp", "ep", "pp")}
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    place = shape.coordinates(rank)
    return ParallelContext(
        tp_rank=place.tp,
        tp_size=shape.tp,
        ep_rank=place.ep,
        ep_size=shape.ep,
        pp_rank=place.pp,
        pp_size=shape.pp,
        tp=collectives["tp"],
        ep=collectives["ep"],
        pp=collectives["pp"],
        layers=None if stage_ends is None else shape.stage_layers(rank, stage_ends),
        world=DistributedCollective(world, list(range(shape.world_size)), rank, store),
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

    def __init__(self, group: dist.ProcessGroup, ranks: list[int], rank: int, store: object = None) -> None:
        """`store`: where the group has met. Its C++ half alone is kept by torch, which calls its Python half."""
        self._group = group
        self._store = store
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
