"""`make bench-engine`: the worker's HTTP API against transformers' `generate`, on the same cores in the same run.

Each round measures baseline and Tandem in turn; a ratio is taken within a round, and the table shows the median and the
spread of the rounds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from bench.engine import server
from bench.engine.baseline import Baseline
from e2e.model import find_model

PROMPT, NEW = 64, 64
VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class Measure:
    """One row: what the ratio says, its goal, and the ratio of each round."""

    name: str
    goal: str
    ratios: list[float]
    detail: str


class Bench:
    def __init__(
        self, baseline: Baseline, unified: server.Worker, prefill: server.Worker, decode: server.Worker
    ) -> None:
        self.baseline, self.unified, self.prefill, self.decode = baseline, unified, prefill, decode
        self._random = random.Random(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Fresh random prompts: nothing is in any cache."""
        return [[self._random.randrange(1000, VOCABULARY) for _ in range(length)] for _ in range(count)]

    def throughput(self, concurrency: int, batch: int) -> tuple[float, float, str]:
        """(ratio, ours in tokens/s, detail): `concurrency` streams against `generate` on `batch` prompts at a time."""
        theirs = batch * NEW / self.baseline.seconds(self.prompts(batch, PROMPT), NEW)
        ours = (
            concurrency * NEW / asyncio.run(server.streams(self.unified.port, self.prompts(concurrency, PROMPT), NEW))
        )
        return ours / theirs, ours, f"{ours:.0f} against {theirs:.0f} tokens/s"

    def prompt_speed(self, length: int) -> tuple[float, float, str]:
        theirs = length / self.baseline.seconds(self.prompts(1, length), 1)
        ours = length / asyncio.run(server.stream(self.unified.port, self.prompts(1, length)[0], 1)).total
        return ours / theirs, ours, f"{ours:.0f} against {theirs:.0f} prompt tokens/s"

    def cached(self, length: int) -> tuple[float, float, str]:
        cold = self.prompts(1, length)[0]
        first = asyncio.run(server.stream(self.unified.port, cold, 1)).first
        warm = cold[: length * 9 // 10] + self.prompts(1, length - length * 9 // 10)[0]
        second = asyncio.run(server.stream(self.unified.port, warm, 1)).first
        return second / first, second, f"TTFT {second * 1e3:.0f} against {first * 1e3:.0f} ms"

    def disaggregated(self, length: int) -> tuple[float, float, str]:
        one = asyncio.run(server.stream(self.unified.port, self.prompts(1, length)[0], 2)).first
        target = f"127.0.0.1:{self.prefill.kv_port}"
        two = asyncio.run(server.stream(self.decode.port, self.prompts(1, length)[0], 2, target)).first
        return two / one, two, f"TTFT {two * 1e3:.0f} against {one * 1e3:.0f} ms"


def measure(name: str, goal: str, rounds: int, once: Callable[[], tuple[float, float, str]]) -> Measure:
    results = [once() for _ in range(rounds)]
    ratios = [result[0] for result in results]
    middle = sorted(results)[len(results) // 2]
    row = Measure(name, goal, ratios, middle[2])
    print(
        f"  {name:<50} {statistics.median(ratios):6.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        f"  goal {goal:<6} {row.detail}"
    )
    sys.stdout.flush()
    return row


def run(bench: Bench, rounds: int, only: str) -> list[Measure]:
    """The rows whose name contains `only`."""
    rows: list[tuple[str, str, Callable[[], tuple[float, float, str]]]] = [
        ("1 stream / generate", "≥1.5", lambda: bench.throughput(1, 1)),
        ("8 streams / generate, batch of 8", "≥1.5", lambda: bench.throughput(8, 8)),
        ("8 streams / generate, one after another", "≥5", lambda: bench.throughput(8, 1)),
        ("32 streams / generate, one after another", "≥12", lambda: bench.throughput(32, 1)),
        ("prompt of 1,000 tokens / generate", "≥1.2", lambda: bench.prompt_speed(1000)),
        ("prompt of 4,000 tokens / generate", "≥1.2", lambda: bench.prompt_speed(4000)),
        ("TTFT, 90% of 2,000 tokens cached / uncached", "≤0.20", lambda: bench.cached(2000)),
        ("TTFT of 2,000 tokens, prefill + decode / unified", "≤1.05", lambda: bench.disaggregated(2000)),
    ]
    return [measure(name, goal, rounds, once) for name, goal, once in rows if only in name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="BFloat16", choices=["BFloat16", "Float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    gguf = find_model()
    torch_dtype = {"BFloat16": "bfloat16", "Float32": "float32"}[options.dtype]
    with ExitStack() as stack:
        baseline = stack.enter_context(Baseline(str(gguf.parent), gguf.name, torch_dtype, options.threads))
        workers = [
            stack.enter_context(server.worker(role, gguf, options.dtype, options.threads))
            for role in ("unified", "prefill", "decode")
        ]
        bench = Bench(baseline, *workers)
        print(
            f"SmolLM2-135M-Instruct, {options.dtype}, {options.threads} threads, "
            f"{platform.processor() or platform.machine()}"
        )
        bench.throughput(1, 1)  # warm both sides
        bench.disaggregated(200)
        rows = run(bench, options.rounds, options.only)
    print(json.dumps({row.name: {"goal": row.goal, "ratios": [round(r, 3) for r in row.ratios]} for row in rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
