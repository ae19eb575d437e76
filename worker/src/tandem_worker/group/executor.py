"""The executor of one rank of a group, and rank 0's, which tells the others what to compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tandem_api.launch import WorkerConfig

from tandem_worker.engine.errors import GroupLostError
from tandem_worker.engine.execute.batch import BatchBuilder, StepInput
from tandem_worker.engine.execute.executor import ModelExecutor
from tandem_worker.engine.execute.memory import observe_num_blocks, observe_num_host_blocks
from tandem_worker.engine.execute.step import StepOutput
from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.group.agreement import GroupPlan, RankReport, check_reports, find_least_exact
from tandem_worker.group.control.leader import GroupLeader
from tandem_worker.group.control.link import Loss
from tandem_worker.group.control.wire import encode_moves, encode_step
from tandem_worker.group.micro_batches import count_micro_batches, split_step
from tandem_worker.model.assembly.stages import stage_layers
from tandem_worker.model.config import ModelConfig
from tandem_worker.model.contract import CausalLM, KVCache, has_head
from tandem_worker.model.draft.drafted import DraftedLM
from tandem_worker.model.draft.late import Decoded
from tandem_worker.parallel.collectives import Collective
from tandem_worker.parallel.context import ParallelContext
from tandem_worker.parallel.shape import GroupShape
from tandem_worker.transfer.layout import KVLayout, KVShard, RankAddress

if TYPE_CHECKING:
    from tandem_worker.engine.execute.heads import HeadRanks


@dataclass(slots=True, kw_only=True)
class GroupSeat:
    """Rank 0's place in a group, from where it decides for all ranks; an `ExecutorBuilder`."""

    leader: GroupLeader
    context: ParallelContext
    shape: GroupShape
    model: ModelConfig
    endpoint: str
    """The address where rank 0 takes KV connections, where its role does."""
    plan: GroupPlan | None = None
    """Once it is announced."""
    _reports: list[RankReport] = field(default_factory=list)
    _head_kv_heads: int | None = None
    """KV heads of the draft head, where the model has one."""

    @property
    def num_lanes(self) -> int:
        return self.shape.num_lanes

    @property
    def num_host_blocks(self) -> int:
        return min(report.num_host_blocks for report in self._reports)

    def agree_num_blocks(self, model: CausalLM, config: WorkerConfig, digest: str) -> int:
        """Wait for every rank's report: from then on `model` says of its rows what all ranks keep. Raises
        GroupLostError, and StartupError where they differ."""
        own = describe_rank(model, config, digest, self.context, self.model, self.endpoint)
        self._reports = [own, *(RankReport.model_validate_json(report) for report in self.leader.collect())]
        check_reports(self._reports)
        model.inexact, model.exact_rows = find_least_exact(self._reports)
        self._head_kv_heads = _count_head_kv_heads(model)
        return min(report.num_blocks for report in self._reports)

    def build_executor(self, model: CausalLM, kv_cache: KVCache, *, max_rows: int, max_model_len: int) -> GroupExecutor:
        """Announce the plan to all ranks. Raises GroupLostError."""
        reports = self._reports
        self.plan = GroupPlan(
            num_blocks=kv_cache.num_blocks,
            num_host_blocks=self.num_host_blocks,
            layout=KVLayout.join(
                [(report.shard, report.share) for report in reports],
                self.model.num_kv_heads,
                head_kv_heads=self._head_kv_heads,
            ),
            ranks=tuple(RankAddress(endpoint=report.endpoint, shard=report.shard) for report in reports),
            max_rows=max_rows,
            max_model_len=max_model_len,
        )
        self.leader.announce(self.plan.to_json().encode())
        return GroupExecutor(model, kv_cache, self, self.plan)


def _count_head_kv_heads(model: CausalLM) -> int | None:
    return model.num_kv_heads if isinstance(model, DraftedLM) else None


def describe_rank(
    model: CausalLM, config: WorkerConfig, digest: str, context: ParallelContext, figures: ModelConfig, endpoint: str
) -> RankReport:
    """What this rank has after loading `model`, its share of the model of these `figures`. Raises StartupError."""
    layers, share = stage_layers(figures.num_layers, context), KVLayout.of(model.kv_cache_spec(config.kv.block_size))
    return RankReport(
        num_blocks=observe_num_blocks(model, config),
        num_host_blocks=observe_num_host_blocks(model, config),
        digest=digest,
        dtype=str(model.dtype).removeprefix("torch."),
        endpoint=endpoint,
        shard=KVShard(
            first_layer=layers.start, num_layers=share.num_layers, tp_rank=context.tp_rank, tp_size=context.tp_size
        ),
        share=share,
        inexact=model.inexact,
        exact_rows=model.exact_rows,
        has_head=has_head(model),
    )


class RankExecutor(ModelExecutor):
    """Computes this rank's part of its lane's step. Every lane's logits end up at rank 0."""

    def __init__(
        self, model: CausalLM, kv_cache: KVCache, context: ParallelContext, shape: GroupShape, plan: GroupPlan
    ) -> None:
        super().__init__(model, kv_cache, max_rows=plan.max_rows, max_model_len=plan.max_model_len)
        self._context = context
        self._shape = shape
        self._drafted = model if isinstance(model, DraftedLM) else None

    def compute(self, step: StepInput, on_layer: Callable[[int], None] | None = None) -> torch.Tensor:
        """Logits `[N, vocab]` where this is the lane's speaker, which sends them to rank 0 unless it is that."""
        logits, world = self._forward(step, on_layer), self.speaks_to
        if world is not None and len(step.logits_rows):
            world.send(logits, 0)
        return logits

    @property
    def speaks_to(self) -> Collective | None:
        """The way on which this rank sends its lane's logits to rank 0; None: another rank does, or it is rank 0."""
        world = self._context.world
        assert world is not None
        speaks = world.rank and world.rank == self._shape.speaker(self._shape.lane(world.rank))
        return world if speaks else None

    def _forward(self, step: StepInput, on_layer: Callable[[int], None] | None) -> torch.Tensor:
        """All pieces' logits at once: sent one by one they would wait for a leader that waits to send hidden states."""
        self._copy_blocks(step.copies)
        # Lanes that exchange tokens in every layer must be cut alike, so they are not cut.
        count = count_micro_batches(len(step.token_ids), self._context.pp_size) if self._context.ep_size == 1 else 1
        pieces = split_step(step, count, self.kv_cache.spec.block_size)
        last = len(pieces) - 1  # only then a layer is complete
        logits: list[torch.Tensor] = []
        decoded: list[Decoded] = []
        for index, piece in enumerate(pieces):
            told = on_layer if index == last else None
            batch = self._builder.assemble(piece, told, before_layer=self._before_layer)
            logits.append(self._compute(batch))
            if self._drafted is not None and self._drafted.decoded is not None:
                decoded.append(self._drafted.decoded)
        if last and decoded and self._drafted is not None:
            self._drafted.decoded = Decoded.join(decoded)
        return logits[0] if len(logits) == 1 else torch.cat(logits)


class GroupExecutor(RankExecutor):
    """Rank 0's executor: to the engine it is the one of a single process, or of several lanes.

    A step that one rank does not finish leaves the others waiting inside it, so every error in a step ends the group,
    and a step that has begun is not abandoned between layers.
    """

    can_abandon = False

    def __init__(self, model: CausalLM, kv_cache: KVCache, seat: GroupSeat, plan: GroupPlan) -> None:
        super().__init__(model, kv_cache, seat.context, seat.shape, plan)
        self.leader = seat.leader
        self.num_ranks = seat.leader.size
        block_size, host = kv_cache.spec.block_size, torch.device("cpu")
        self._describers = [self._builder] + [
            BatchBuilder(max_rows=plan.max_rows, max_blocks=self._max_blocks, block_size=block_size, device=host)
            for _ in range(1, seat.shape.num_lanes)
        ]

    def move_blocks(self, moves: Moves, *, lane: int = 0, settle: bool = False) -> None:
        """Every rank of the lane copies its share of the blocks. Raises GroupLostError."""
        ranks = [rank for rank in range(self.leader.size) if self._shape.lane(rank) == lane]
        self.leader.send_moves([rank for rank in ranks if rank], encode_moves(moves, settle=settle))
        if 0 in ranks:
            super().move_blocks(moves, settle=settle)

    def run(self, plan: StepPlan, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        """Raises GroupLostError, whatever it was that failed."""
        (output,) = self.run_lanes([plan], on_layer)
        assert output is not None
        return output

    def run_lanes(
        self, plans: Sequence[StepPlan | None], on_layer: Callable[[int], None] | None = None
    ) -> list[StepOutput | None]:
        """One forward pass of every lane, each with its plan or padding. Raises GroupLostError, whatever failed.

        `on_layer` is told of this rank's own layers.
        """
        try:
            described = [
                None if plan is None else describer.describe(plan)
                for describer, plan in zip(self._describers, plans, strict=True)
            ]
            steps = [self._builder.describe_padding() if entry is None else entry[0] for entry in described]
            frames = [encode_step(step) for step in steps]
            self.leader.send_steps({rank: frames[self._shape.lane(rank)] for rank in range(1, self.leader.size)})
            own = self.compute(steps[0], on_layer)
            return [
                None if entry is None else StepOutput(self._collect(lane, entry[0], own), entry[1])
                for lane, entry in enumerate(described)
            ]
        except Exception as error:
            self.leader.blame(Loss(f"rank 0 failed in a step: {type(error).__name__}: {error}"))
            raise GroupLostError(self.leader.cause) from error

    def build_head_ranks(self, lane: int) -> HeadRanks:
        """All ranks of the lane compute it."""
        from tandem_worker.engine.execute.heads import HeadHere
        from tandem_worker.group.heads import GroupHead

        own = HeadHere(self.model, self.kv_cache, late=False)
        return GroupHead(own, self.leader, self._context, self._shape, lane)

    def _collect(self, lane: int, step: StepInput, own: torch.Tensor) -> torch.Tensor:
        """A lane's logits, from its speaker; `own` are this rank's."""
        speaker, count = self._shape.speaker(lane), len(step.logits_rows)
        if speaker == 0:
            return own
        embedding, world = self.model.embedding, self._context.world
        assert world is not None
        width = self.model.vocab_size if embedding is None else embedding.size
        logits = torch.empty(count, width, dtype=torch.float32, device=self.model.device)
        return world.receive(logits, speaker) if count else logits
