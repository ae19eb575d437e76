"""`make bench-lossless`: weights in 12 bits against plain ones, in turns in one run.

Products are timed over all matrices of a model's step, so none is found in a cache that the others have filled; a ratio
is plain over lossless of one round, above 1 where lossless is faster. Over HTTP two workers differ in nothing but
`spec.engine.weights`. Medians and spread of the rounds, wall and CPU time; the last line is one JSON object.
`--checkpoints` measures packed checkpoints instead, on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tandem_worker.model.backends import native

from bench.engine import server
from bench.engine.__main__ import VOCABULARY, describe_machine
from bench.lossless import checkpoints
from e2e.model import find_model

PROMPT, NEW = 64, 128
SMOLLM2 = (*((960, 576), (576, 576), (3072, 576), (576, 1536)) * 30, (49152, 576))
LAYER_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Rows and columns of the matrices of a step: of SmolLM2-135M, and of one layer of an 8B model."""
LEAST = 0.97
"""Nowhere below."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One round: plain over lossless."""

    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    goal: float
    once: Callable[[], Pair]


class Products:
    """All matrices of a step in both forms, multiplied one after another."""

    def __init__(self, shapes: tuple[tuple[int, int], ...]) -> None:
        from tandem_worker.model.backends.native.packing import LosslessPacker, lay_out

        packer = LosslessPacker()
        self._matrices = []
        generator = torch.Generator().manual_seed(1)
        for rows, columns in shapes:
            values = torch.randn(rows, columns, generator=generator).mul_(0.02).bfloat16()
            self._matrices.append((rows, columns, lay_out(values), packer.lay_out(values)))

    @property
    def ratio(self) -> float:
        """Bytes of the lossless form over those of the plain one."""
        plain = sum(each.nbytes for _, _, each, _ in self._matrices if each is not None)
        return sum(each.nbytes for *_, each in self._matrices if each is not None) / plain

    def once(self, rows: int) -> Pair:
        inputs = {columns: torch.randn(rows, columns).bfloat16() for _, columns, _, _ in self._matrices}
        plain, lossless = self._time(inputs, False), self._time(inputs, True)
        return Pair(plain.wall / lossless.wall, plain.cpu / lossless.cpu)

    def _time(self, inputs: dict[int, torch.Tensor], is_split: bool) -> Pair:
        wall, cpu = time.perf_counter(), time.process_time()
        for out_features, columns, plain, lossless in self._matrices:
            chosen = lossless if is_split else plain
            assert chosen is not None
            native.linear(chosen.data_ptr(), out_features, inputs[columns], None, is_split=is_split)
        return Pair(time.perf_counter() - wall, time.process_time() - cpu)


class Workers:
    """One worker of each form."""

    def __init__(self, plain: server.Worker, lossless: server.Worker) -> None:
        self._workers = plain, lossless
        self._random = random.Random(1)
        self._rounds = 0

    def once(self, concurrency: int, prompt: int, new: int) -> Pair:
        """Fresh prompts, as many streams at once, the same at both, who take turns in being first: what a worker does
        behind an answer would always be at the cost of the other."""
        prompts = [[self._random.randrange(1000, VOCABULARY) for _ in range(prompt)] for _ in range(concurrency)]
        costs = [(0.0, 0.0)] * 2
        self._rounds += 1
        for place in (0, 1) if self._rounds % 2 else (1, 0):
            worker = self._workers[place]
            cpu = worker.cpu_seconds()
            wall = asyncio.run(server.streams(worker.port, prompts, new))
            costs[place] = wall, worker.cpu_seconds() - cpu
        (plain_wall, plain_cpu), (wall, cpu) = costs
        return Pair(plain_wall / wall, plain_cpu / max(cpu, 0.01))


def measure(row: Row, rounds: int) -> dict[str, object]:
    """Print the row; its figures."""
    pairs = [row.once() for _ in range(rounds)]
    walls = sorted(pair.wall for pair in pairs)
    ratio, cpu = statistics.median(walls), statistics.median(pair.cpu for pair in pairs)
    met = ratio >= row.goal
    low, high = walls[len(walls) // 4], walls[-1 - len(walls) // 4]
    print(
        f"  {row.name:<48} {ratio:5.2f} ({low:.2f} to {high:.2f})  ≥{row.goal:<5} {'met' if met else 'missed':<7}"
        f" CPU {cpu:.2f}",
        flush=True,
    )
    return {
        "value": round(ratio, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "cpu": round(cpu, 3),
        "goal": row.goal,
        "met": met,
    }


def product_rows(name: str, products: Products, few: float, at_32: float) -> list[Row]:
    goals = {1: few, 4: few, 6: few, 8: LEAST, 32: at_32, 128: LEAST, 512: LEAST, 2048: LEAST}
    return [
        Row(f"products, {name}, {rows} rows", goal, lambda rows=rows: products.once(rows))
        for rows, goal in goals.items()
    ]


def bench_products(threads: int, rounds: int) -> dict[str, object]:
    native.use_threads(threads)
    torch.set_num_threads(threads)
    found: dict[str, object] = {}
    for name, shapes, few, at_32 in (("SmolLM2", SMOLLM2, 1.15, LEAST), ("an 8B layer", LAYER_8B, 1.3, 1.1)):
        products = Products(shapes)
        print(f"{name}: {16 * products.ratio:.2f} bits a weight, {threads} threads")
        for row in product_rows(name, products, few, at_32):
            found[row.name] = measure(row, rounds)
    return found


def ratios(rows: dict[str, Any]) -> dict[int, float]:
    """By rows of a product the least of the models' ratios, rounded down: what `Auto` chooses by."""
    found: dict[int, float] = {}
    for name, row in rows.items():
        if name.startswith("products, "):
            size = int(name.split(", ")[2].removesuffix(" rows"))
            found[size] = min(found.get(size, math.inf), math.floor(100 * row["value"]) / 100)
    return dict(sorted(found.items()))


def bench_http(threads: int, rounds: int) -> dict[str, object]:
    gguf = find_model()
    with ExitStack() as stack:
        pair = [
            stack.enter_context(server.worker("unified", gguf, "BFloat16", threads, weights=form))
            for form in ("Plain", "Lossless")
        ]
        workers = Workers(*pair)
        workers.once(1, PROMPT, 16)  # warm both
        rows = [
            Row("HTTP, 1 stream", 1.12, lambda: workers.once(1, PROMPT, NEW)),
            Row("HTTP, 8 streams", 0.98, lambda: workers.once(8, PROMPT, NEW)),
            Row("HTTP, 32 streams", 0.98, lambda: workers.once(32, PROMPT, NEW)),
            Row("HTTP, prompt of 1,000 tokens", 0.98, lambda: workers.once(1, 1000, 1)),
        ]
        return {row.name: measure(row, rounds) for row in rows}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lossless", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the last line there")
    parser.add_argument("--checkpoints", action="store_true", help="only bits and speed of packed checkpoints")
    parser.add_argument("--products-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.checkpoints:
        rows = {row.name: {"value": round(row.value, 3), "goal": row.goal} for row in checkpoints.measure(5)}
        print(json.dumps({"machine": describe_machine(1, "BFloat16"), "rows": rows}, ensure_ascii=False))
        return 0
    if (obstacle := native.find_lossless_obstacle()) is not None:
        print(f"nothing to measure: {obstacle}")
        return 1
    if options.products_only:
        print(json.dumps(bench_products(options.threads, options.rounds), ensure_ascii=False))
        return 0
    machine = describe_machine(options.threads, "BFloat16")
    print(", ".join(str(value) for value in machine.values()))
    # In a process of its own: threads are a process's, and what it multiplied must not stay in memory beside workers.
    command = [sys.executable, "-m", "bench.lossless", "--products-only", "--threads", str(options.threads)]
    output = subprocess.run([*command, "--rounds", str(options.rounds)], check=True, stdout=subprocess.PIPE, text=True)
    *told, last = output.stdout.splitlines()
    print(*told, sep="\n", flush=True)
    found = {"machine": machine, "rows": json.loads(last) | bench_http(options.threads, options.rounds)}
    print("for CPU_RATIOS of model/backends/form.py:", ratios(found["rows"]))
    line = json.dumps(found, ensure_ascii=False)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        file = options.record / f"lossless-{options.threads}cores-{machine['date']}.json"
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
