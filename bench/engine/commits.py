"""Two versions of the worker beside each other, their requests in turns: what a change costs.

    python -m bench.engine.commits OTHER_CHECKOUT [--sittings 4] [--rounds 10] [--only NAME]

OTHER_CHECKOUT is a work tree of another commit (`git worktree add`) whose CPU kernels are built (`make native` there
first). Both versions run in this environment's Python with a unified, a prefill and a decode worker each. A round
asks both for the same thing, in alternating order. The workers that are started first are slower at decoding, by up to
a fifth even where both versions are the same: so both are started anew for every sitting, and take turns at being
first. The table shows the geometric mean and the range of the sittings' median ratios this / other, in wall time and in
CPU time of the workers; a sitting in one order and the next one in the other count as one. The last line is one JSON
object.
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
    first: bool = False
    """Until the first text of the stream, not until its end."""


CASES = (
    Case("short request", 16, 1, repeat=20),
    Case("64 tokens, then 32 more", 64, 32),
    Case("TTFT, 64 tokens from the prefill worker", 64, 1, remote=True, repeat=4),
    Case("TTFT, 1,000 tokens from the prefill worker", 1000, 1, remote=True),
    Case("TTFT of a stream, 64 tokens from elsewhere", 64, 4, remote=True, repeat=2, first=True),
    Case("1,000 tokens, computed by one worker", 1000, 1),
)


@dataclass(frozen=True, slots=True)
class Version:
    unified: server.Worker
    prefill: server.Worker
    decode: server.Worker


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one case in one sitting: this / other, and the medians of a request's wall seconds."""

    wall: float
    cpu: float
    seconds: list[float]


@contextmanager
def sitting(*trees: Path) -> Iterator[list[Version]]:
    """Workers of each tree, started in this order."""
    model = find_model()
    with ExitStack() as stack:
        yield [
            Version(
                *(
                    stack.enter_context(server.worker(role, model, "Auto", 2, tree=tree))
                    for role in ("unified", "prefill", "decode")
                )
            )
            for tree in trees
        ]


def measure(one: Version, case: Case, prompts: list[list[int]]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    workers = (one.prefill, one.decode) if case.remote else (one.unified,)
    before = sum(worker.cpu_seconds() for worker in workers)
    wall = 0.0
    for prompt in prompts:
        prefill = f"127.0.0.1:{one.prefill.kv_port}" if case.remote else None
        told = asyncio.run(server.stream(workers[-1].port, prompt, case.new, prefill))
        wall += told.first if case.first else told.total
    return wall, sum(worker.cpu_seconds() for worker in workers) - before


def compare(ours: Version, theirs: Version, case: Case, rounds: int, generator: random.Random) -> Figures:
    """One case in one sitting."""
    ratios: list[float] = []
    cpu, wall = ([], []), ([], [])
    for number in range(rounds + 2):
        prompts = [[generator.randrange(VOCABULARY) for _ in range(case.prompt)] for _ in range(case.repeat)]
        pair = [(0, ours), (1, theirs)][:: 1 if number % 2 else -1]
        measured = {index: measure(one, case, prompts) for index, one in pair}
        if number < 2:  # the first ones warm caches up
            continue
        ratios.append(measured[0][0] / measured[1][0])
        for index in (0, 1):
            wall[index].append(measured[index][0])
            cpu[index].append(measured[index][1])
    seconds = [statistics.median(values) / case.repeat for values in wall]
    return Figures(statistics.median(ratios), sum(cpu[0]) / max(sum(cpu[1]), 1e-9), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", type=Path, help="checkout of the other version")
    parser.add_argument("--sittings", type=int, default=4, help="an even number; default 4")
    parser.add_argument("--rounds", type=int, default=10, help="of each sitting; default 10")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in case.name]
    if not cases:
        parser.error(f"--only: no case has {options.only!r} in its name; there are {', '.join(c.name for c in CASES)}")
    if options.sittings < 2 or options.sittings % 2:
        parser.error("--sittings must be an even number: each order of starting as often as the other")
    generator = random.Random(1)
    found: dict[str, list[Figures]] = {case.name: [] for case in cases}
    other = options.other.resolve()
    for number in range(options.sittings):
        trees = (HERE, other) if number % 2 == 0 else (other, HERE)
        with sitting(*trees) as versions:
            ours, theirs = versions if number % 2 == 0 else reversed(versions)
            for case in cases:
                found[case.name].append(compare(ours, theirs, case, options.rounds, generator))
    print(f"{'case':46} {'wall':>7} {'range':>15} {'CPU':>7}   seconds")
    results: dict[str, object] = {}
    for name, figures in found.items():
        pairs = [statistics.geometric_mean([f.wall for f in figures[at : at + 2]]) for at in range(0, len(figures), 2)]
        wall, cpu = (statistics.geometric_mean(values) for values in (pairs, [f.cpu for f in figures]))
        seconds = [statistics.fmean(f.seconds[index] for f in figures) for index in (0, 1)]
        print(
            f"{name:46} {wall:7.3f} {min(pairs):7.3f} {max(pairs):7.3f} {cpu:7.3f}"
            f"   {seconds[0]:.4f} / {seconds[1]:.4f}"
        )
        results[name] = {
            "wall": round(wall, 4), "low": round(min(pairs), 4), "high": round(max(pairs), 4), "cpu": round(cpu, 4),
            "seconds": [round(value, 5) for value in seconds], "sittings": [round(f.wall, 4) for f in figures],
        }  # fmt: skip
    print(json.dumps({"sittings": options.sittings, "rounds": options.rounds, "ratios": results}))


if __name__ == "__main__":
    main()
