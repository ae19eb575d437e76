"""One rank: joining the grid, loading its share of the model, and a follower's loop over the leader's steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tandem_api.launch import WorkerConfig

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.group.agreement import GroupPlan
from tandem_worker.group.control.link import MessageKind
from tandem_worker.group.control.store import GroupStore
from tandem_worker.group.control.wire import decode_moves, decode_step
from tandem_worker.group.executor import RankExecutor, describe_rank
from tandem_worker.group.topology import RankOrder, check_model, count_experts
from tandem_worker.group.transport import open_follower_transport, rank_endpoint
from tandem_worker.host.collector import release_collector
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.nvml import open_gpu_reader
from tandem_worker.host.runtime import Runtime
from tandem_worker.model.backends.form import rows_of
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import allocate_kv_cache, has_head
from tandem_worker.model.draft.attach import attach_head
from tandem_worker.model.load import load_model, open_checkpoint
from tandem_worker.model.sources.digest import await_digests
from tandem_worker.model.stages import plan_stages
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.groups import join_group
from tandem_worker.parallel.shape import GroupShape

if TYPE_CHECKING:
    from tandem_worker.group.control.leader import GroupLeader
    from tandem_worker.group.control.member import GroupMember
    from tandem_worker.model.sources.digest import ModelDigest


def check_checkpoint(config: WorkerConfig, path: Path) -> ModelConfig:
    """What the model at `path` is made of. Raises StartupError when it cannot be split as the configuration asks."""
    model, _ = open_checkpoint(path)
    check_model(
        config.group.parallelism,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        num_layers=model.num_layers,
        num_experts=count_experts(model.raw),
    )
    return model


def form_group(
    leader: GroupLeader, shape: GroupShape, path: Path, *, device: torch.device, dtype: torch.dtype | None
) -> ParallelContext:
    """Rank 0: cut the model into stages, wait for everybody, connect the grid. Raises GroupLostError, StartupError."""
    stage_ends = plan_stages(path, shape, device=device, dtype=dtype)
    leader.gather({"stageEnds": stage_ends})
    return join_group(shape, 0, store=GroupStore(leader.call), device=device, stage_ends=stage_ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingRank:
    """A rank that follows, and what it knows of itself and its model."""

    member: GroupMember
    order: RankOrder
    pod: PodFacts
    runtime: Runtime
    path: Path
    draft: Path | None
    """The files of its draft head, where the configuration names one."""
    figures: ModelConfig
    hashing: list[ModelDigest]
    device: torch.device
    dtype: torch.dtype | None

    def run(self, enter: Callable[[str], None], on_ready: Callable[[], None]) -> None:
        """Until the leader stops it. `enter` is told each phase, `on_ready` the first computed step.

        Raises GroupLostError, StartupError.
        """
        member, config = self.member, self.order.config
        enter("waiting for the group")
        context = self._join(member.meet(self.order.leader_host, self.order.leader_port))
        self.runtime.vitals.read_gpu = open_gpu_reader(self.device).sample
        enter("loading weights")
        model = load_model(
            self.path,
            device=self.device,
            dtype=self.dtype,
            context=context,
            weights=config.weights,
            rows=rows_of(config),
        )
        model = attach_head(model, self.path, self.draft, config.speculative)
        endpoint = rank_endpoint(config, self.pod, self.order.local_rank)
        enter("hashing the model")
        digest = await_digests(self.hashing)
        report = describe_rank(model, config, digest, context, self.figures, endpoint)
        member.report(report.to_json().encode())
        enter("waiting for the other ranks to load")
        kind, payload = member.receive()
        if kind is not MessageKind.PLAN:
            raise GroupLostError(f"the leader sent {kind.name} where its plan was expected")
        plan = GroupPlan.model_validate_json(payload)
        kv_cache = allocate_kv_cache(model.kv_cache_spec(config.kv.block_size), plan.num_blocks, self.device)
        handle = open_follower_transport(
            config,
            self.pod,
            self.runtime,
            self.order.local_rank,
            digest=digest,
            kv_cache=kv_cache,
            shard=report.shard,
            plan=plan,
            answer=member.answer,
        )
        executor = RankExecutor(model, kv_cache, context, GroupShape.of(config.group.parallelism), plan)
        if plan.num_host_blocks:
            executor.add_host_pool(plan.num_host_blocks)
        release_collector()
        enter("warming up")
        with torch.inference_mode():
            _compute_steps(member, executor, handle, self._follow_head(executor), on_ready)

    def _follow_head(self, executor: RankExecutor) -> Callable[[bytes], None] | None:
        if not has_head(executor.model):
            return None
        from tandem_worker.engine.execute.heads import HeadHere
        from tandem_worker.group.heads import follow_head

        return follow_head(HeadHere(executor.model, executor.kv_cache, late=False), executor.speaks_to)

    def _join(self, welcome: dict[str, Any]) -> ParallelContext:
        shape = GroupShape.of(self.order.config.group.parallelism)
        store = GroupStore(self.member.call)
        return join_group(shape, self.order.rank, store=store, device=self.device, stage_ends=welcome["stageEnds"])


def _compute_steps(
    member: GroupMember,
    executor: RankExecutor,
    handle: Callable[[bytes], None] | None,
    obey: Callable[[bytes], None] | None,
    on_ready: Callable[[], None],
) -> None:
    waiting = True
    while True:
        kind, payload = member.receive()
        if kind is MessageKind.STOP:
            return
        if kind is MessageKind.TRANSFER:
            assert handle is not None, "only roles that move blocks are told of transfers"
            handle(payload)
            continue
        if kind is MessageKind.HEAD:
            assert obey is not None, "only ranks with a draft head are told of it"
            executor.await_fetches()  # a head writes to blocks whose content may still be on its way to the host
            obey(payload)
            continue
        if kind is MessageKind.MOVES:
            moves, settle = decode_moves(payload)
            executor.move_blocks(moves, settle=settle)
            continue
        executor.compute(decode_step(payload))
        if waiting:
            waiting = False
            on_ready()
