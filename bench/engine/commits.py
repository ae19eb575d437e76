"""Two versions of the worker beside each other, their requests in turns: what a change costs.

    python -m bench.engine.commits OTHER_CHECKOUT [--rounds 40]

OTHER_CHECKOUT is a work tree of another commit (`git worktree add`) whose CPU kernels are built (`make native` there
first). Both versions run in this environment's Python with a unified, a prefill and a decode worker each. A round
asks both for the same thing, in alternating order; the table shows the median and the quartiles of the rounds' ratios
this / other, in wall time and in CPU time of the workers. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.engine import server
from e2e.model import find_model

HERE = Path(__file__).parents[2]
VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    prompt: int
    new: int
    remote: bool = False
    """Through the prefill worker."""
    repeat: int = 1
    """Requests after one another in a round: short ones need several."""


CASES = (
    Case("short request", 16, 1, repeat=20),
    Case("64 tokens, then 32 more", 64, 32),
    Case("TTFT, 64 tokens from the prefill worker", 64, 1, remote=True, repeat=4),
    Case("TTFT, 1,000 tokens from the prefill worker", 1000, 1, remote=True),
    Case("1,000 tokens, computed by one worker", 1000, 1),
)


@dataclass(frozen=True, slots=True)
class Version:
    unified: server.Worker
    prefill: server.Worker
    decode: server.Worker


@contextmanager
def version(tree: Path) -> Iterator[Version]:
    model = find_model()
    with ExitStack() as stack:
        unified, prefill, decode = (
            stack.enter_context(server.worker(role, model, "Auto", 2, tree=tree))
            for role in ("unified", "prefill", "decode")
        )
        yield Version(unified, prefill, decode)


def measure(one: Version, case: Case, prompts: list[list[int]]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    workers = (one.prefill, one.decode) if case.remote else (one.unified,)
    before = sum(worker.cpu_seconds() for worker in workers)
    wall = 0.0
    for prompt in prompts:
        prefill = f"127.0.0.1:{one.prefill.kv_port}" if case.remote else None
        wall += asyncio.run(server.stream(workers[-1].port, prompt, case.new, prefill)).total
    return wall, sum(worker.cpu_seconds() for worker in workers) - before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="checkout of the other version")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    generator, results = random.Random(1), {}
    with version(HERE) as ours, version(options.other.resolve()) as theirs:
        print(f"{'case':46} {'wall':>7} {'quartiles':>15} {'CPU':>7}   seconds", flush=True)
        for case in CASES:
            ratios: list[float] = []
            seconds, cpu = ([], []), ([], [])
            for number in range(options.rounds + 2):
                prompts = [[generator.randrange(VOCABULARY) for _ in range(case.prompt)] for _ in range(case.repeat)]
                pair = [(0, ours), (1, theirs)][:: 1 if number % 2 else -1]
                measured = {index: measure(one, case, prompts) for index, one in pair}
                if number < 2:  # the first ones warm caches up
                    continue
                ratios.append(measured[0][0] / measured[1][0])
                for index in (0, 1):
                    seconds[index].append(measured[index][0])
                    cpu[index].append(measured[index][1])
            low, middle, high = statistics.quantiles(ratios, n=4)
            cpu_ratio = sum(cpu[0]) / max(sum(cpu[1]), 1e-9)
            medians = [statistics.median(values) / case.repeat for values in seconds]
            print(
                f"{case.name:46} {middle:7.3f} {low:7.3f} {high:7.3f} {cpu_ratio:7.3f}   "
                f"{medians[0]:.4f} / {medians[1]:.4f}",
                flush=True,
            )
            results[case.name] = {
                "wall": round(middle, 4), "low": round(low, 4), "high": round(high, 4), "cpu": round(cpu_ratio, 4),
                "seconds": [round(value, 5) for value in medians],
            }  # fmt: skip
    print(json.dumps({"rounds": options.rounds, "ratios": results}))


if __name__ == "__main__":
    main()
