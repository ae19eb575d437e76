"""`make bench-engine`: the worker's HTTP API against transformers, on the same cores in the same run.

Each round measures baseline and Tandem in turn; a ratio is taken within a round, and the table shows the median and the
spread of the rounds, wall and CPU time. Where the CPU kernels run, the same worker without them is a second baseline.
Then follows what scheduling costs per step. The last line is one JSON object;
`--record FOLDER` writes it there too, named after machine and date.
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
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from tandem_worker.model.backends import native

from bench.engine import scheduling, server
from bench.engine.baseline import Baseline, Cost
from e2e.model import find_model

PROMPT, NEW = 64, 64
VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one row. `cpu` is None where no baseline process is compared."""

    ratio: float
    detail: str
    cpu: float | None = None
    """CPU time per token, ours / theirs."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a ratio says, its goal ("≥" or "≤" and a number, or nothing), and how a round is measured."""

    name: str
    goal: str
    once: Callable[[], Sample]

    def met(self, ratio: float) -> bool | None:
        if not self.goal:
            return None
        bound = float(self.goal[1:])
        return ratio >= bound if self.goal[0] == "≥" else ratio <= bound


class Bench:
    def __init__(
        self,
        baseline: Baseline,
        unified: server.Worker,
        prefill: server.Worker,
        decode: server.Worker,
        without_native: server.Worker | None,
        *,
        weight_bytes: int,
        threads: int,
    ) -> None:
        self.baseline, self.unified, self.prefill, self.decode = baseline, unified, prefill, decode
        self.without_native = without_native
        """A worker whose layers torch computes; None where the CPU kernels do not run in `unified` either."""
        self.weight_bytes, self.threads = weight_bytes, threads
        self._random = random.Random(1)

    def prompts(self, count: int, length: int) -> list[list[int]]:
        """Fresh random prompts: nothing is in any cache."""
        return [[self._random.randrange(1000, VOCABULARY) for _ in range(length)] for _ in range(count)]

    def ours(self, prompts: list[list[int]], new_tokens: int, worker: server.Worker | None = None) -> Cost:
        """All prompts at once, each as a stream of its own over HTTP, at `worker` or else at `unified`."""
        worker = worker or self.unified
        before = worker.cpu_seconds()
        wall = asyncio.run(server.streams(worker.port, prompts, new_tokens))
        return Cost(wall, worker.cpu_seconds() - before)

    def throughput(self, concurrency: int, batch: int, *, continuous: bool = False) -> Sample:
        """`concurrency` streams against the baseline on `batch` prompts at a time."""
        theirs = self.baseline.run(self.prompts(batch, PROMPT), NEW, continuous=continuous)
        ours = self.ours(self.prompts(concurrency, PROMPT), NEW)
        mine, other = concurrency * NEW / ours.wall, batch * NEW / theirs.wall
        return Sample(
            mine / other,
            f"{mine:.0f} against {other:.0f} tokens/s",
            (ours.cpu / concurrency) / (theirs.cpu / batch),
        )

    def limit(self) -> Sample:
        """One stream against reading all weights once per token at the speed of these cores' memory."""
        limit = read_bandwidth(self.threads) / self.weight_bytes
        ours = self.ours(self.prompts(1, PROMPT), NEW)
        return Sample(NEW / ours.wall / limit, f"{NEW / ours.wall:.0f} of {limit:.0f} tokens/s")

    def limit_between_tokens(self) -> Sample:
        """As `limit`, without the prompt, which that counts and the limit does not."""
        limit = read_bandwidth(self.threads) / self.weight_bytes
        told = asyncio.run(server.stream(self.unified.port, self.prompts(1, PROMPT)[0], NEW))
        ours = (NEW - 1) / (told.total - told.first)
        return Sample(ours / limit, f"{ours:.0f} of {limit:.0f} tokens/s")

    def prompt_speed(self, length: int) -> Sample:
        theirs = self.baseline.run(self.prompts(1, length), 1)
        ours = self.ours(self.prompts(1, length), 1)
        detail = f"{length / ours.wall:.0f} against {length / theirs.wall:.0f} prompt tokens/s"
        return Sample(theirs.wall / ours.wall, detail, ours.cpu / theirs.cpu)

    def kernels(self, concurrency: int, length: int, new_tokens: int) -> Sample:
        """CPU kernels against torch's: the tokens per second of two workers that differ in nothing else."""
        theirs = self.ours(self.prompts(concurrency, length), new_tokens, self.without_native)
        ours = self.ours(self.prompts(concurrency, length), new_tokens)
        tokens = length if new_tokens == 1 else concurrency * new_tokens
        detail = f"{tokens / ours.wall:.0f} against {tokens / theirs.wall:.0f} tokens/s"
        return Sample(theirs.wall / ours.wall, detail, ours.cpu / theirs.cpu)

    def cached(self, length: int) -> Sample:
        cold = self.prompts(1, length)[0]
        first = asyncio.run(server.stream(self.unified.port, cold, 1)).first
        warm = cold[: length * 9 // 10] + self.prompts(1, length - length * 9 // 10)[0]
        second = asyncio.run(server.stream(self.unified.port, warm, 1)).first
        return Sample(second / first, f"TTFT {second * 1e3:.0f} against {first * 1e3:.0f} ms")

    def disaggregated(self, length: int) -> Sample:
        one = asyncio.run(server.stream(self.unified.port, self.prompts(1, length)[0], 2)).first
        target = f"127.0.0.1:{self.prefill.kv_port}"
        two = asyncio.run(server.stream(self.decode.port, self.prompts(1, length)[0], 2, target)).first
        return Sample(two / one, f"TTFT {two * 1e3:.0f} against {one * 1e3:.0f} ms")

    def second_token(self, length: int) -> Sample:
        """One decode step where the first token is told as soon as it is there; next to nothing where it waits for the
        step of the second."""

        def wait(port: int, target: str | None = None) -> float:
            told = asyncio.run(server.stream(port, self.prompts(1, length)[0], 2, target))
            return told.total - told.first

        one, two = wait(self.unified.port), wait(self.decode.port, f"127.0.0.1:{self.prefill.kv_port}")
        return Sample(two / one, f"{two * 1e3:.0f} against {one * 1e3:.0f} ms")


def measure(row: Row, rounds: int) -> dict[str, object]:
    """Print the row; its figures, or why it could not run."""
    try:
        samples = [row.once() for _ in range(rounds)]
    except Exception as error:  # the other rows are worth having
        why = f"{type(error).__name__}: {error}"
        print(f"  {row.name:<50} could not run: {why}", flush=True)
        return {"goal": row.goal, "met": None, "failed": why}
    ratios = sorted(sample.ratio for sample in samples)
    middle = sorted(samples, key=lambda sample: sample.ratio)[rounds // 2]
    ratio, met = statistics.median(ratios), row.met(statistics.median(ratios))
    cpus = [sample.cpu for sample in samples if sample.cpu is not None]
    cpu = statistics.median(cpus) if cpus else None
    print(
        f"  {row.name:<50} {ratio:6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})  {row.goal:<6}"
        f" {'' if met is None else 'met' if met else 'missed':<7} CPU {'-' if cpu is None else f'{cpu:.2f}':<5}"
        f" {middle.detail}",
        flush=True,
    )
    return {
        "goal": row.goal,
        "met": met,
        "ratio": round(ratio, 3),
        "rounds": [round(value, 3) for value in ratios],
        "cpu_ratio": None if cpu is None else round(cpu, 3),
        "detail": middle.detail,
    }


def build_rows(bench: Bench) -> list[Row]:
    rows = [
        Row("1 stream / generate", "≥1.5", lambda: bench.throughput(1, 1)),
        Row("1 stream / limit of the memory's bandwidth", "≥0.85", bench.limit),
        Row("1 stream between tokens / the same limit", "", bench.limit_between_tokens),
        Row("8 streams / generate, batch of 8", "≥4", lambda: bench.throughput(8, 8)),
        Row("8 streams / generate, one after another", "≥5", lambda: bench.throughput(8, 1)),
        Row("32 streams / generate, one after another", "≥12", lambda: bench.throughput(32, 1)),
        Row("8 streams / continuous batching", "", lambda: bench.throughput(8, 8, continuous=True)),
        Row("32 streams / continuous batching", "", lambda: bench.throughput(32, 32, continuous=True)),
        Row("prompt of 1,000 tokens / generate", "≥3", lambda: bench.prompt_speed(1000)),
        Row("prompt of 4,000 tokens / generate", "≥3", lambda: bench.prompt_speed(4000)),
        Row("TTFT, 90% of 2,000 tokens cached / uncached", "≤0.20", lambda: bench.cached(2000)),
        Row("TTFT of 2,000 tokens, prefill + decode / unified", "≤1.05", lambda: bench.disaggregated(2000)),
        Row("second token after the first, same pair", "≥0.5", lambda: bench.second_token(200)),
    ]
    if bench.without_native is not None:
        rows += [
            Row("CPU kernels / torch, 1 stream", "≥1", lambda: bench.kernels(1, PROMPT, NEW)),
            Row("CPU kernels / torch, 8 streams", "≥1", lambda: bench.kernels(8, PROMPT, NEW)),
            Row("CPU kernels / torch, 32 streams", "≥1", lambda: bench.kernels(32, PROMPT, NEW)),
            Row("CPU kernels / torch, prompt of 1,000 tokens", "≥1", lambda: bench.kernels(1, 1000, 1)),
        ]
    return rows


def count_weight_bytes(gguf: Path, bytes_each: int) -> int:
    """What one token reads: all weights once, as they lie in a worker."""
    from gguf import GGUFReader

    return bytes_each * sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` read of memory that is in no cache: the best of five."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    memory = torch.ones(1 << 27, dtype=torch.float32)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        memory.sum()
        seconds.append(time.perf_counter() - began)
    torch.set_num_threads(before)
    return memory.nbytes / min(seconds)


def describe_machine(threads: int, dtype: str) -> dict[str, object]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "threads": threads,
        "dtype": dtype,
        "model": "SmolLM2-135M-Instruct",
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers")},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="BFloat16", choices=["BFloat16", "Float32"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--baseline-memory", type=float, default=8.0, metavar="GIB", help="what the baseline may use")
    parser.add_argument("--only", default="", help="rows whose name contains this, and no scheduling")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write the last line there")
    options = parser.parse_args()
    gguf = find_model()
    torch_dtype = {"BFloat16": "bfloat16", "Float32": "float32"}[options.dtype]
    machine = describe_machine(options.threads, options.dtype)
    found: dict[str, object] = {"machine": machine}
    print(", ".join(str(value) for value in machine.values()))
    with ExitStack() as stack:
        most = int(options.baseline_memory * 2**30)
        baseline = stack.enter_context(
            Baseline(str(gguf.parent), gguf.name, torch_dtype, options.threads, most_bytes=most)
        )
        unified, prefill, decode = (
            stack.enter_context(server.worker(role, gguf, options.dtype, options.threads))
            for role in ("unified", "prefill", "decode")
        )
        obstacle = native.find_obstacle() if options.dtype == "BFloat16" else "they multiply bfloat16"
        without_native = None
        if obstacle is None:
            without_native = stack.enter_context(
                server.worker("unified", gguf, options.dtype, options.threads, native=False)
            )
        else:
            print(f"no rows on CPU kernels: {obstacle}")
        weight_bytes = count_weight_bytes(gguf, 2 if options.dtype == "BFloat16" else 4)
        bench = Bench(
            baseline, unified, prefill, decode, without_native, weight_bytes=weight_bytes, threads=options.threads
        )
        bench.throughput(1, 1)  # warm both sides
        bench.disaggregated(200)
        rows = [row for row in build_rows(bench) if options.only in row.name]
        measured = {row.name: measure(row, options.rounds) for row in rows}
    found["rows"] = measured
    failed = [name for name, figures in measured.items() if "failed" in figures]
    if failed:
        print(f"could not run: {', '.join(failed)}")
    if not options.only:
        found["scheduling"] = scheduling.run(scheduling.SIZES)
    line = json.dumps(found, ensure_ascii=False)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        architecture = "".join(c if c.isalnum() else "-" for c in platform.machine())
        file = options.record / f"engine-{architecture}-{options.threads}cores-{machine['date']}.json"
        file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    print(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
