"""CPU time that the engine thread spends per decoded token on everything but the model.

A model that answers at once runs in the real step loop: scheduling, tensors, choice of tokens, deltas, and their
delivery to waiting requests. Times are CPU time of the thread, per token, as the mean over steps without the slowest
2%; "deliver" is what the event loop does with the deltas afterwards, on another thread in a worker.

    python -m bench.engine.loop
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, WorkerConfig
from tandem_api.names import Role
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.runner import StepRunner
from tandem_worker.engine.schedule.params import GenerationRequest, SamplingParams
from tandem_worker.engine.snapshot import build_stats
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.model.pooling import EmbeddingSpec
from tandem_worker.server.answer.deltas import DeltaHub

from bench.engine.scheduling import typical

BLOCK_SIZE = 16
VOCAB = 512
PROMPT = 64


class NullModel:
    """Logits that favour one token, whatever it reads."""

    vocab_size, max_position_embeddings, dtype = VOCAB, 1 << 20, torch.float32
    device = torch.device("cpu")
    embedding: EmbeddingSpec | None = None
    inexact: str | None = "it has no rows"
    exact_rows = 1
    is_one_call = False

    def __init__(self, max_rows: int) -> None:
        self._logits = torch.zeros((max_rows, VOCAB))
        self._logits[:, 7] = 1.0

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        return KVCacheSpec(layers=(KVLayerSpec(block_shape=(block_size,)),), dtype=torch.int8, block_size=block_size)

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        return self._logits[: batch.logits_rows.shape[0]]


def build_runner(num_running: int, max_tokens: int, hub: DeltaHub) -> StepRunner:
    blocks = num_running * ((PROMPT + max_tokens) // BLOCK_SIZE + 2)
    config = WorkerConfig(
        model_name="m",
        served_name="m",
        role=Role.DECODE,
        revision="r",
        model=ModelSource(uri="file:///m"),
        kv=KVConfig(memory_bytes=(blocks + 1) * BLOCK_SIZE, block_size=BLOCK_SIZE),
        scheduler=SchedulerConfig(
            max_running_requests=num_running,
            max_batch_tokens=num_running * PROMPT + BLOCK_SIZE,
            max_queued_requests=num_running,
        ),
    )
    engine = build_engine(NullModel(num_running), config, hub.deliver)
    engine.steps.start = lambda: None  # steps are taken here, one by one
    for index in range(num_running):
        prompt = tuple((index * 31 + position) % VOCAB for position in range(PROMPT))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(request_id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    engine.steps.run_commands()
    runner = engine._runner
    assert isinstance(runner, StepRunner)  # of a single lane
    return runner


class Clock:
    """CPU seconds by part, one entry per step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list[float])

    def call(self, part: str, function: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        result = function(*arguments)
        self.parts[part].append(time.thread_time() - began)
        return result


def measure(num_running: int, steps: int) -> dict[str, float]:
    """Microseconds per token, by part."""
    loop = asyncio.new_event_loop()
    hub, clock = DeltaHub(), Clock()
    runner = build_runner(num_running, steps + 60, hub)
    inboxes = loop.run_until_complete(_open(hub, num_running))
    with torch.inference_mode():
        for index in range(steps + 50):
            if index == 50:
                clock.parts.clear()
            step = clock.call("begin", runner.begin_step)
            clock.call("launch", runner.launch_step, step)
            clock.call("finish", runner.finish_step, step)
            clock.call("stats", lambda: build_stats([runner], runner.work, num_pending=0))
            deltas = runner.outputs.take()
            clock.call("deliver", hub._spread, deltas)
            for inbox in inboxes:
                inbox._items.clear()
    loop.close()
    return {part: round(typical(seconds) / num_running * 1e6, 3) for part, seconds in clock.parts.items()}


async def _open(hub: DeltaHub, count: int) -> list[Any]:
    return [hub.open([f"r{index}"]) for index in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[int, dict[str, float]] = {}
    print("CPU microseconds per decoded token")
    for num_running in options.running:
        parts = results[num_running] = measure(num_running, options.steps)
        parts["engine_thread"] = round(sum(parts.values()) - parts["deliver"], 3)
        if num_running == options.running[0]:
            print(f"{'running':>10}" + "".join(f"{part:>15}" for part in parts))
        print(f"{num_running:>10}" + "".join(f"{value:>15}" for value in parts.values()), flush=True)
    print(json.dumps({"bench": "engine/loop", "microseconds_per_token": results}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
