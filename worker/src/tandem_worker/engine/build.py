"""Puts an engine together from a loaded model and the worker's configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from tandem_api.launch import WorkerConfig

from tandem_worker.control.block_manager import BlockManager
from tandem_worker.control.host_blocks import HostBlocks
from tandem_worker.control.plan import SchedulerLimits
from tandem_worker.control.scheduler import Scheduler
from tandem_worker.engine.base import DeliverFunction, PrefillClient
from tandem_worker.engine.core import EngineCore
from tandem_worker.engine.executor import ModelExecutor
from tandem_worker.engine.memory import (
    observe_available_memory,
    observe_kv_memory,
    plan_max_model_len,
    plan_num_blocks,
    plan_num_host_blocks,
)
from tandem_worker.errors import StartupError
from tandem_worker.models.base import CausalLM, allocate_kv_cache

_CPU_STEP_SECONDS = 0.5
"""A CPU prefills so slowly that full chunks would stall decodes and aborts for seconds."""


def build_engine(
    model: CausalLM,
    config: WorkerConfig,
    deliver: DeliverFunction,
    prefill_client: PrefillClient | None = None,
    *,
    eos_token_ids: Iterable[int] = (),
    model_digest: str = "",
    cuda_graphs: bool = False,
    runs_ahead: bool | None = None,
    clock: Callable[[], float] | None = None,
) -> EngineCore:
    """An engine that starts with its first request. Raises StartupError when memory or lengths do not fit.

    `runs_ahead` (see `StepRunner`): None is yes on a GPU; a CPU computes on the thread that would plan meanwhile.

    The model serves this engine alone: it may keep scratch space between calls. `cuda_graphs` records decode steps.
    A prefill client that needs the engine's `kv_cache` may be set afterwards, as `engine.prefill_client`.
    """
    spec = model.kv_cache_spec(config.kv.block_size)
    memory = config.kv.memory_bytes
    if memory is None:
        memory = observe_kv_memory(model.device)
    num_blocks = plan_num_blocks(memory, spec.bytes_per_block)
    max_model_len = plan_max_model_len(
        config.max_model_len, model.max_position_embeddings, num_blocks, config.kv.block_size
    )
    clocks = {} if clock is None else {"clock": clock}
    num_host_blocks = plan_num_host_blocks(
        config.kv.host_memory_bytes, spec.bytes_per_block, observe_available_memory()
    )
    scheduler = Scheduler(
        _plan_limits(config),
        BlockManager(num_blocks, config.kv.block_size),
        host=HostBlocks(num_host_blocks),
        **clocks,
    )
    kv_cache = allocate_kv_cache(spec, num_blocks, torch.device(model.device))
    executor = ModelExecutor(model, kv_cache, max_rows=scheduler.max_running, max_model_len=max_model_len)
    if num_host_blocks:
        executor.add_host_store(num_host_blocks)
    if cuda_graphs and model.device.type == "cuda":
        executor.record_graphs()
    engine = EngineCore(
        scheduler=scheduler,
        executor=executor,
        deliver=deliver,
        eos_token_ids=frozenset(eos_token_ids),
        max_model_len=max_model_len,
        model_digest=model_digest,
        max_queued_requests=config.scheduler.max_queued_requests,
        runs_ahead=model.device.type == "cuda" if runs_ahead is None else runs_ahead,
        target_step_seconds=_CPU_STEP_SECONDS if model.device.type == "cpu" else None,
        **clocks,
    )
    engine.prefill_client = prefill_client
    return engine


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
