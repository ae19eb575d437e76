"""Puts an engine together from a loaded model and the worker's configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
from tandem_api.launch import WorkerConfig

from tandem_worker.engine.contract import DeliverFunction, PrefillClient
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.execute.arena import measure_recordings
from tandem_worker.engine.execute.executor import ExecutorBuilder, ModelExecutor
from tandem_worker.engine.execute.memory import (
    observe_num_blocks,
    observe_num_host_blocks,
    plan_max_model_len,
)
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.host_cache import HostCache
from tandem_worker.engine.schedule.plan import SchedulerLimits
from tandem_worker.engine.schedule.scheduler import Scheduler
from tandem_worker.engine.speculation import build_speculators, count_logits_rows
from tandem_worker.host.errors import StartupError
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.contract import CausalLM, allocate_kv_cache, has_head

if TYPE_CHECKING:
    from tandem_worker.engine.drafting import Drafting

logger = logging.getLogger(__name__)

_CPU_STEP_SECONDS = 0.5
"""A CPU prefills so slowly that full chunks would stall decodes and aborts for seconds."""


Measure = Callable[[str, Callable[[], int]], int]
"""What was measured under a name, or what a function measures now."""


def _measure_now(name: str, run: Callable[[], int]) -> int:
    del name
    return run()


def build_engine(
    model: CausalLM,
    config: WorkerConfig,
    deliver: DeliverFunction,
    prefill_client: PrefillClient | None = None,
    *,
    eos_token_ids: Iterable[int] = (),
    model_digest: str = "",
    cuda_graphs: bool = False,
    arena_bytes: int | None = None,
    measure: Measure = _measure_now,
    runs_ahead: bool | None = None,
    clock: Callable[[], float] | None = None,
    ranks: ExecutorBuilder | None = None,
    vitals: Vitals | None = None,
) -> EngineCore:
    """An engine that starts with its first request. Raises StartupError when memory or lengths do not fit.

    `runs_ahead` (see `StepRunner`): None is yes on a single GPU. A CPU computes on the thread that would plan
    meanwhile, and the ranks of a group are told tokens that the host knows.

    The model serves this engine alone: it may keep scratch space between calls. `cuda_graphs` records decode steps on a
    GPU: that of one sequence at once, the others between steps. `arena_bytes` is what activations take
    (`arena.measure_arena`), None where that is not measured; `measure` may know what recordings take. A prefill client
    that needs the engine's `kv_cache` may be set afterwards, as `engine.prefill_client`. With `ranks`, this process is
    rank 0, `model` is its share, and the others have loaded theirs or soon will.
    """
    block_size = config.kv.block_size
    num_blocks = 0 if ranks is None else ranks.agree_num_blocks(model, config, model_digest)
    records = cuda_graphs and model.device.type == "cuda" and model.embedding is None
    num_blocks = num_blocks or _plan_num_blocks(model, config, arena_bytes, measure, records=records)
    max_model_len = plan_max_model_len(config.max_model_len, model.max_position_embeddings, num_blocks, block_size)
    clocks = {} if clock is None else {"clock": clock}
    spec = model.kv_cache_spec(block_size)
    num_host_blocks = observe_num_host_blocks(model, config) if ranks is None else ranks.num_host_blocks
    num_lanes = 1 if ranks is None else ranks.num_lanes
    schedulers = [
        Scheduler(
            _plan_limits(config),
            BlockManager(num_blocks, block_size),
            host=HostCache(num_host_blocks, block_size) if num_host_blocks else None,
            **clocks,
        )
        for _ in range(num_lanes)
    ]
    kv_cache = allocate_kv_cache(spec, num_blocks, torch.device(model.device))
    max_rows = schedulers[0].planner.max_running
    build = ModelExecutor if ranks is None else ranks.build_executor
    executor = build(model, kv_cache, max_rows=max_rows, max_model_len=max_model_len)
    if num_host_blocks:
        executor.add_host_pool(num_host_blocks)
    if runs_ahead is None:
        runs_ahead = model.device.type == "cuda" and ranks is None
    if records:
        executor.record_graphs(num_now=1, max_rows=count_logits_rows(config.speculative, max_rows))
    draftings: list[Drafting] = []
    if has_head(model):
        from tandem_worker.engine.drafting import Drafting

        assert not runs_ahead, "steps of a model with a draft head are finished before the next one is planned"
        draftings = [Drafting(model, kv_cache, executor.build_head_ranks(lane)) for lane in range(num_lanes)]
    speculators = build_speculators(
        config.speculative, model, draftings, runs_ahead=runs_ahead, num_lanes=num_lanes, max_rows=max_rows
    )
    engine = EngineCore(
        schedulers=schedulers,
        executor=executor,
        deliver=deliver,
        eos_token_ids=frozenset(eos_token_ids),
        max_model_len=max_model_len,
        model_digest=model_digest,
        max_queued_requests=config.scheduler.max_queued_requests,
        runs_ahead=runs_ahead,
        speculators=speculators,
        draftings=draftings,
        vitals=vitals,
        target_step_seconds=_CPU_STEP_SECONDS if model.device.type == "cpu" else None,
        **clocks,
    )
    engine.prefill_client = prefill_client
    engine.order_by(config.ttft_target)
    return engine


def _plan_num_blocks(
    model: CausalLM, config: WorkerConfig, arena_bytes: int | None, measure: Measure, *, records: bool
) -> int:
    """KV blocks beside what else the device has to hold, unless the configuration says how many bytes they take."""
    num_blocks = observe_num_blocks(model, config, arena_bytes)
    if not records or arena_bytes is None or config.kv.memory_bytes is not None:
        return num_blocks
    block_size = config.kv.block_size
    longest = plan_max_model_len(config.max_model_len, model.max_position_embeddings, num_blocks, block_size)
    rows = count_logits_rows(config.speculative, config.scheduler.max_running_requests)
    recorded = measure(
        f"recordings of {rows} rows, {longest} tokens",
        lambda: measure_recordings(model, max_rows=rows, max_model_len=longest, block_size=block_size),
    )
    logger.info("memory is set aside for recorded decode steps", extra={"gib": round(recorded / 2**30, 3)})
    return observe_num_blocks(model, config, arena_bytes + recorded)


def _plan_limits(config: WorkerConfig) -> SchedulerLimits:
    wanted, block_size = config.scheduler, config.kv.block_size
    if wanted.max_batch_tokens <= block_size:
        raise StartupError(
            "InvalidSchedulerConfig",
            f"maxBatchTokens is {wanted.max_batch_tokens}; it must exceed the block size of {block_size} tokens",
        )
    return SchedulerLimits(
        max_running=wanted.max_running_requests,
        max_batch_tokens=wanted.max_batch_tokens,
        local_prefill_max_tokens=wanted.local_prefill_max_tokens,
    )
