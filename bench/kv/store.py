"""What blocks in Mooncake's store are worth: first tokens of prompts that another worker computed, and steps.

    python -m bench.kv.store [--tokens 4000] [--prompts 5] [--rounds 3] [--record bench/results]

A master and a holder run on this machine, over loopback. One worker of SmolLM2 computes prompts and is ended; the next
one, which has neither memory nor disk of them, loads them from the store. Then the same work, many short prompts and
answers at once, takes turns between a worker without a store and one that writes everything it computes. The machine
should be idle. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.engine.server import stream, streams, worker
from bench.kv.__main__ import judge, make_prompt, read_metric
from e2e.model import find_model
from tests.mooncake.library import plan_environment
from tests.mooncake.network import stay_inside
from tests.mooncake.processes import Program, run_store

STORE_GOAL, WRITING_GOAL = 0.08, 1.03
"""Of what computing takes until the first token; of what the same work takes without a store."""
_HOLDER_MEGABYTES = 2048
_SETTLE_SECONDS = 2.0


def describe_store(holder: Program) -> dict[str, Any]:
    return {"store": {"port": holder.port}}


def measure_first_tokens(model: Path, holder: Program, tokens: int, count: int) -> dict[str, list[float]]:
    """Seconds until the first token, by where the prompt's blocks are."""
    rng, threads = random.Random(1), len(os.sched_getaffinity(0))
    prompts = [make_prompt(rng, tokens + 1) for _ in range(count)]
    found: dict[str, list[float]] = {"computed": [], "store": []}
    with worker("unified", model, "BFloat16", threads, kv=describe_store(holder), drain_seconds=60) as first:
        asyncio.run(stream(first.port, make_prompt(rng, tokens), 1))  # memory is touched, speeds are known
        for prompt in prompts:
            found["computed"].append(asyncio.run(stream(first.port, prompt, 1)).first)
        time.sleep(_SETTLE_SECONDS)
    with worker("unified", model, "BFloat16", threads, kv=describe_store(holder)) as second:
        asyncio.run(stream(second.port, make_prompt(rng, 64), 1))
        time.sleep(_SETTLE_SECONDS)
        for prompt in prompts:
            found["store"].append(asyncio.run(stream(second.port, prompt, 1)).first)
        read = read_metric(second, "tandem_worker_kv_tier_tokens_total", tier="store", direction="read")
        cut = read_metric(second, "tandem_worker_kv_loads_cut_total", tier="store")
        print(f"tokens from the store: {read:.0f} of {tokens * count}; loads cut: {cut:.0f}")
    return found


def measure_steps(model: Path, holder: Program, rounds: int) -> dict[str, list[float]]:
    """Seconds that the same work takes, by what kind of worker does it."""
    threads = len(os.sched_getaffinity(0))
    found: dict[str, list[float]] = {"without": [], "writing": []}
    with (
        worker("unified", model, "BFloat16", threads) as without,
        worker("unified", model, "BFloat16", threads, kv=describe_store(holder)) as writing,
    ):
        rng = random.Random(2)
        for turn in range(rounds + 1):
            prompts = [make_prompt(rng, 300) for _ in range(8)]
            for kind, each in (("without", without), ("writing", writing)):
                seconds = asyncio.run(streams(each.port, prompts, 64))
                if turn:
                    found[kind].append(seconds)
                time.sleep(_SETTLE_SECONDS)
        written = read_metric(writing, "tandem_worker_kv_tier_tokens_total", tier="store", direction="written")
        print(f"tokens written beside: {written:.0f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt; default 4000")
    parser.add_argument("--prompts", type=int, default=5, help="that are asked for; default 5")
    parser.add_argument("--rounds", type=int, default=3, help="of work whose steps are compared; default 3, 0: none")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    os.environ.update(plan_environment())
    model, rows = find_model(), {}
    stay_inside()
    with tempfile.TemporaryDirectory() as name, run_store(Path(name), _HOLDER_MEGABYTES) as (_, holder):
        first = measure_first_tokens(model, holder, options.tokens, options.prompts)
        medians = {kind: statistics.median(values) for kind, values in first.items()}
        for kind, values in first.items():
            print(f"{kind:10} {1e3 * medians[kind]:8.1f} ms ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})")
        rows["first token from the store, of computing"] = judge(medians["store"] / medians["computed"], STORE_GOAL)
        if options.rounds:
            steps = measure_steps(model, holder, options.rounds)
            for kind, values in steps.items():
                print(f"{kind:10} {statistics.median(values):8.3f} s ({min(values):.3f} to {max(values):.3f})")
            rows["work with a store, everything written"] = judge(
                min(steps["writing"]) / min(steps["without"]), WRITING_GOAL
            )
    line = json.dumps({"cores": len(os.sched_getaffinity(0)), "tokens": options.tokens, "blocks in a store": rows})
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        Path(options.record, f"kv-store-{datetime.now(UTC):%Y-%m-%d}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
