"""What blocks below memory are worth: first tokens of prompts that are computed, in memory, on the disk and at another
worker, and steps.

    python -m bench.kv [--tokens 4000] [--prompts 5] [--rounds 3] [--folder FOLDER] [--record bench/results]

One worker of SmolLM2 with a disk computes prompts, is asked for each again (memory), and is ended with SIGTERM, which
writes them; the next one finds them on the disk. Two workers without disks share the machine: what one has computed the
other is asked for, and told of. Then the same work, many short prompts and answers at once, takes
turns between a worker without a disk, one with a disk on which nothing is found, and one that writes everything it
computes: what a step costs. The machine should be idle. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import urllib.request
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.engine.server import Worker, stream, streams, worker
from e2e.model import find_model

VOCABULARY = 40_000
DISK_GOAL, MEMORY_GOAL, PEER_GOAL = 0.08, 0.017, 0.06
"""Of what computing takes until the first token."""
QUIET_GOAL, WRITING_GOAL = 1.01, 1.03
"""Of what the same work takes without a disk."""
_SETTLE_SECONDS = 1.0


def make_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(1000, VOCABULARY) for _ in range(length)]


def read_metric(source: Worker, name: str, **labels: str) -> float:
    """One sample's value; 0 where there is none."""
    with urllib.request.urlopen(f"http://127.0.0.1:{source.metrics_port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    for line in text.splitlines():
        if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
            return float(line.rpartition(" ")[2])
    return 0.0


def describe_disk(folder: Path, **more: Any) -> dict[str, Any]:
    return {"disk": {"path": str(folder), "sizeBytes": 8 << 30} | more}


def measure_first_tokens(model: Path, folder: Path, tokens: int, count: int) -> dict[str, list[float]]:
    """Seconds until the first token, by where the prompt's blocks are."""
    rng = random.Random(1)
    prompts = [make_prompt(rng, tokens + 1) for _ in range(count)]
    threads = len(os.sched_getaffinity(0))
    found: dict[str, list[float]] = {"computed": [], "memory": [], "disk": []}
    with worker("unified", model, "BFloat16", threads, kv=describe_disk(folder), drain_seconds=60) as first:
        asyncio.run(stream(first.port, make_prompt(rng, tokens), 1))  # memory is touched, speeds are known
        for prompt in prompts:
            found["computed"].append(asyncio.run(stream(first.port, prompt, 1)).first)
            found["memory"].append(asyncio.run(stream(first.port, prompt, 1)).first)
    with worker("unified", model, "BFloat16", threads, kv=describe_disk(folder)) as second:
        time.sleep(_SETTLE_SECONDS)
        asyncio.run(stream(second.port, make_prompt(rng, 64), 1))
        for prompt in prompts:
            found["disk"].append(asyncio.run(stream(second.port, prompt, 1)).first)
        read = read_metric(second, "tandem_worker_kv_tier_tokens_total", direction="read")
        cut = read_metric(second, "tandem_worker_kv_loads_cut_total")
        print(f"tokens from the disk: {read:.0f} of {tokens * count}; loads cut: {cut:.0f}")
    return found


def measure_peers(model: Path, tokens: int, count: int) -> list[float]:
    """Seconds until the first token of prompts that another worker has computed."""
    rng = random.Random(3)
    prompts = [make_prompt(rng, tokens + 1) for _ in range(count)]
    threads = len(os.sched_getaffinity(0))
    kv = {"peers": True, "memoryBytes": 1 << 30}
    found: list[float] = []
    with (
        worker("unified", model, "BFloat16", threads, kv=kv) as holder,
        worker("unified", model, "BFloat16", threads, kv=kv) as puller,
    ):
        source = f"127.0.0.1:{holder.kv_port}"
        for each in (holder, puller):
            asyncio.run(stream(each.port, make_prompt(rng, tokens), 1))  # memory is touched, speeds are known
        warm = make_prompt(rng, 513)
        for port, told in ((holder.port, None), (puller.port, source)):  # the connection stands
            asyncio.run(stream(port, warm, 1, source=told))
        for prompt in prompts:
            asyncio.run(stream(holder.port, prompt, 1))
            found.append(asyncio.run(stream(puller.port, prompt, 1, source=source)).first)
        read = read_metric(puller, "tandem_worker_kv_tier_tokens_total", direction="read", tier="peer")
        cut = read_metric(puller, "tandem_worker_kv_loads_cut_total", tier="peer")
        print(f"tokens from the other worker: {read:.0f} of {tokens * count + 512}; loads cut: {cut:.0f}")
    return found


def measure_steps(model: Path, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds that the same work takes, by what kind of worker does it."""
    threads = len(os.sched_getaffinity(0))
    quiet, writing = folder / "quiet", folder / "writing"
    found: dict[str, list[float]] = {"without": [], "quiet": [], "writing": []}
    kinds: dict[str, dict[str, Any]] = {
        "without": {}, "quiet": describe_disk(quiet), "writing": describe_disk(writing, writeThrough=True)
    }  # fmt: skip
    with (
        worker("unified", model, "BFloat16", threads, kv=kinds["without"]) as without,
        worker("unified", model, "BFloat16", threads, kv=kinds["quiet"]) as with_disk,
        worker("unified", model, "BFloat16", threads, kv=kinds["writing"]) as with_writes,
    ):
        workers = {"without": without, "quiet": with_disk, "writing": with_writes}
        rng = random.Random(2)
        for turn in range(rounds + 1):
            prompts = [make_prompt(rng, 300) for _ in range(8)]
            for kind, each in workers.items():
                seconds = asyncio.run(streams(each.port, prompts, 64))
                if turn:
                    found[kind].append(seconds)
                time.sleep(_SETTLE_SECONDS)
        written = read_metric(with_writes, "tandem_worker_kv_tier_tokens_total", direction="written")
        print(f"tokens written beside: {written:.0f}")
    return found


def judge(value: float, goal: float) -> dict[str, Any]:
    return {"value": round(value, 4), "goal": goal, "met": value <= goal}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt; default 4000")
    parser.add_argument("--prompts", type=int, default=5, help="that are asked for; default 5")
    parser.add_argument("--rounds", type=int, default=3, help="of work whose steps are compared; default 3, 0: none")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: the temporary folder")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    model = find_model()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        first = measure_first_tokens(model, folder / "first", options.tokens, options.prompts)
        shutil.rmtree(folder / "first", ignore_errors=True)
        first["peer"] = measure_peers(model, options.tokens, options.prompts)
        medians = {kind: statistics.median(values) for kind, values in first.items()}
        for kind, values in first.items():
            print(f"{kind:10} {1e3 * medians[kind]:8.1f} ms ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})")
        rows["first token from the disk, of computing"] = judge(medians["disk"] / medians["computed"], DISK_GOAL)
        rows["first token from a peer, of computing"] = judge(medians["peer"] / medians["computed"], PEER_GOAL)
        rows["first token from memory, of computing"] = judge(medians["memory"] / medians["computed"], MEMORY_GOAL)
        if options.rounds:
            steps = measure_steps(model, folder, options.rounds)
            for kind, values in steps.items():
                print(f"{kind:10} {statistics.median(values):8.3f} s ({min(values):.3f} to {max(values):.3f})")
            least = {kind: min(values) for kind, values in steps.items()}
            rows["work with a disk, nothing found"] = judge(least["quiet"] / least["without"], QUIET_GOAL)
            rows["work with a disk, everything written"] = judge(least["writing"] / least["without"], WRITING_GOAL)
    line = json.dumps({"cores": len(os.sched_getaffinity(0)), "tokens": options.tokens, "blocks below memory": rows})
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        Path(options.record, f"kv-{datetime.now(UTC):%Y-%m-%d}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
