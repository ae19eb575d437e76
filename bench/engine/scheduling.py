"""What scheduling and block management cost per step, and that it does not depend on the size of the prefix cache.

256 sequences decode while, as sequences end, new ones are admitted; the block space is full, so every new block evicts
one. No model runs. Costs are CPU time of the thread. Block spaces take turns, and every one does the same work in the
same round: growth is the median of the rounds' ratios, given with their quartiles, so that what a busy machine does to
some rounds does not count. A round's cost is the mean of all its steps. Steps without admission are also given apart:
admission pays per block that it moves, once per request.

    python -m bench.engine.scheduling
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from dataclasses import dataclass, field

import torch
from tandem_worker.engine.execute.batch import BatchBuilder
from tandem_worker.engine.schedule.block_manager import BlockManager
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.plan import SchedulerLimits, StepPlan
from tandem_worker.engine.schedule.prefix_cache import build_chain_root, extend_chain
from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.schedule.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_RUNNING = 256
SHARED_TOKENS = 256
GROUP = 16
MAX_BATCH_TOKENS = 32_768
"""Enough for the prompts that replace ended sequences: the batch stays full whatever their length."""
ROOT = build_chain_root("bench")
SHAPES = ((512, 128), (4096, 1024))
"""Prompt and output tokens."""
ROUND_STEPS = max(output_tokens for _, output_tokens in SHAPES) * GROUP // NUM_RUNNING
"""In so many steps at least one group of sequences ends and another is admitted, whatever the shape."""
SIZES = [100_000, 1_000_000]
"""Blocks in the prefix cache; growth is the second against the first."""
LIMIT_MS = 2.0
LIMIT_GROWTH = 1.10


@dataclass(slots=True)
class Samples:
    """CPU seconds per step."""

    schedule: list[float] = field(default_factory=list[float])
    build: list[float] = field(default_factory=list[float])
    decode_only: list[float] = field(default_factory=list[float])
    """Of `schedule`, the steps in which no sequence came or went."""

    def record(self, schedule: float, build: float, *, decode_only: bool) -> None:
        self.schedule.append(schedule)
        self.build.append(build)
        if decode_only:
            self.decode_only.append(schedule)


def typical(seconds: list[float]) -> float:
    """Mean without the 2% that a busy machine inflates most."""
    return statistics.fmean(sorted(seconds)[: max(1, len(seconds) * 98 // 100)])


def round_means(seconds: list[float]) -> list[float]:
    return [statistics.fmean(seconds[at : at + ROUND_STEPS]) for at in range(0, len(seconds), ROUND_STEPS)]


class Fleet:
    """One scheduler over a full block space, kept at `NUM_RUNNING` sequences."""

    def __init__(self, num_cached: int, prompt_tokens: int, output_tokens: int) -> None:
        self.num_cached, self.prompt_tokens, self.output_tokens = num_cached, prompt_tokens, output_tokens
        self.rng = random.Random(0)
        blocks_each = (prompt_tokens + output_tokens) // BLOCK_SIZE + 2
        working = (NUM_RUNNING + 8) * blocks_each
        self.blocks = BlockManager(num_cached + working + 1, BLOCK_SIZE)
        self._fill_cache(num_cached + working)
        limits = SchedulerLimits(max_running=NUM_RUNNING, max_batch_tokens=MAX_BATCH_TOKENS)
        self.scheduler = Scheduler(limits, self.blocks)
        self.builder = BatchBuilder(
            max_rows=NUM_RUNNING, max_blocks=blocks_each, block_size=BLOCK_SIZE, device=torch.device("cpu")
        )
        self.shared = tuple(self.rng.randrange(50_000) for _ in range(SHARED_TOKENS))
        self.num_requests = 0
        for index in range(NUM_RUNNING):  # they end in groups of 16, evenly spread
            self.add(1 + index // GROUP * GROUP * output_tokens // NUM_RUNNING)
        while len(self.scheduler.queues.running) < 0.95 * NUM_RUNNING or self.scheduler.queues.queued_prefill_tokens:
            self.step(Samples())
        self.samples = Samples()

    def _fill_cache(self, count: int) -> None:
        """Idle blocks everywhere, in chains of 64."""
        now = 0.0
        while count:
            size = min(64, count)
            names = extend_chain(ROOT, [self.rng.randrange(50_000) for _ in range(size * BLOCK_SIZE)], BLOCK_SIZE)
            self.blocks.release(self.blocks.allocate(size), names, now)
            count -= size
            now += 1.0

    def add(self, max_tokens: int) -> None:
        unique = tuple(self.rng.randrange(50_000) for _ in range(self.prompt_tokens - SHARED_TOKENS))
        prompt = self.shared + unique
        self.num_requests += 1
        self.scheduler.add(
            Request(
                id=str(self.num_requests),
                prompt=prompt,
                sampling=SamplingParams(max_tokens=max_tokens),
                arrival=float(self.num_requests),
                chain_root=ROOT,
                prompt_chain=extend_chain(ROOT, prompt, BLOCK_SIZE),
            )
        )

    def step(self, samples: Samples) -> None:
        began = time.thread_time()
        plan = self.scheduler.schedule()
        planned = time.thread_time()
        self.builder.assemble(self.builder.describe(plan)[0])
        built = time.thread_time()
        num_ended = self._accept(plan)
        ended = time.thread_time()
        samples.record(planned - began + ended - built, built - planned, decode_only=not plan.chunks and not num_ended)
        for _ in range(num_ended):  # prompts are named on the caller's thread in the engine too
            self.add(self.output_tokens)

    def _accept(self, plan: StepPlan) -> int:
        scheduler, num_ended = self.scheduler, 0
        scheduler.complete(plan)
        for sequence in plan.sequences():
            if not sequence.decoding:
                continue
            scheduler.append_token(sequence, 7)
            if len(sequence.output) >= sequence.request.sampling.max_tokens:
                scheduler.finish(sequence)
                num_ended += 1
        return num_ended


def measure(fleets: list[Fleet], rounds: int) -> None:
    gc.collect()
    for _ in range(rounds):
        for fleet in fleets:
            for _ in range(ROUND_STEPS):
                fleet.step(fleet.samples)


def report(fleet: Fleet, base: Samples) -> dict[str, float]:
    """Print one row; growth is against the first block space, `base`."""
    samples = fleet.samples
    costs = round_means(samples.schedule)
    ratios = [cost / other for cost, other in zip(costs, round_means(base.schedule), strict=True)]
    low, growth, high = statistics.quantiles(ratios, n=4)
    result = {
        "prompt_tokens": fleet.prompt_tokens,
        "cached_blocks": fleet.num_cached,
        "schedule_ms": round(statistics.median(costs) * 1e3, 4),
        "decode_only_ms": round(typical(samples.decode_only) * 1e3, 4),
        "build_ms": round(typical(samples.build) * 1e3, 4),
        "growth": round(growth, 3),
        "growth_low": round(low, 3),
        "growth_high": round(high, 3),
    }
    print("".join(f"{value:>17}" for value in result.values()), flush=True)
    return result


def run(cached: list[int], rounds: int = 40) -> dict[str, object]:
    """All shapes with all sizes of the prefix cache, as a table and as what it returns; 2 rounds or more."""
    print(f"{NUM_RUNNING} running sequences; CPU milliseconds per step")
    columns = ("prompt tokens", "cached blocks", "scheduling", "decode only", "build tensors", "growth", "from", "to")
    print("".join(f"{column:>17}" for column in columns))
    results: list[dict[str, float]] = []
    for prompt_tokens, output_tokens in SHAPES:
        fleets = [Fleet(count, prompt_tokens, output_tokens) for count in cached]
        measure(fleets, rounds)
        results += [report(fleet, fleets[0].samples) for fleet in fleets]
    passed = all(row["schedule_ms"] <= LIMIT_MS and row["growth"] <= LIMIT_GROWTH for row in results)
    return {"running": NUM_RUNNING, "passed": passed, "results": results}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=40, help=f"of {ROUND_STEPS} steps per block space; at least 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(options.cached, options.rounds)
    print(json.dumps({"bench": "engine/scheduling", **found}))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
