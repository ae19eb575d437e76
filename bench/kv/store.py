"""What blocks in Mooncake's store are worth: first tokens of prompts that another worker computed, steps, and
conversations whose turns go round.

    python -m bench.kv.store [--tokens 4000] [--prompts 5] [--rounds 3] [--sessions 5] [--turns 4]
                             [--record bench/results]
    python -m bench.kv.store --prompts 0 --rounds 8 --turns 0    # what a step costs beside it, alone

A master and a holder run on this machine, over loopback. One worker of SmolLM2 computes prompts and is ended; the next
one, which has neither memory nor disk of them, loads them from the store. Then kinds of work take turns between a
worker without a store and one with: answers to prompts that memory has but for the end, of one block or of six, of
which little is written and nothing is found; and many new short prompts and answers at once, all of which is written.
Two processes of the same build differ by some hundredths, by where their memory happens to lie: what a store costs is
told beside work of which nothing is asked, which is the same for both. At last conversations: over two prefill and two
decode workers that have little memory and share the store, each request to the next pair; over as many that have as
many bytes as memory of their own, each conversation to its pair; and at a worker that has nothing cached. The machine
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
from bench.kv.rotation import (
    MEMORY_BYTES,
    await_store,
    converse_by_affinity,
    converse_in_rotation,
    converse_without_cache,
)
from e2e.model import find_model
from tests.mooncake.library import plan_environment
from tests.mooncake.network import stay_inside
from tests.mooncake.processes import Program, run_store

STORE_GOAL = 0.08
"""Of what computing takes until the first token."""
QUIET_GOAL, WRITING_GOAL = 1.01, 1.03
"""Of what the same work takes without a store."""
SHARE_GOAL = 0.01
"""Of the prompt tokens: what round robin with the store may have cached less than affinity with as many bytes."""
_HOLDER_MEGABYTES = 2048
_SETTLE_SECONDS = 1.0
_TAIL_TOKENS = {"aside": 3, "quiet": 17, "asked": 97}
"""New ones at the end of prompts that memory has: less than a block, so that nothing is asked; one block; and six."""


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
    """Seconds that the same work takes with a store, of what it takes without: by kind of work, one value a turn, each
    divided by what the two workers differ by where nothing is asked (the median of `aside`).

    Who goes first changes from turn to turn. On a machine that others use too the worker's CPU seconds, which are
    printed, say more: those of its own process, without the helper and the holder.
    """
    threads, rng = len(os.sched_getaffinity(0)), random.Random(2)
    known = [make_prompt(rng, 300) for _ in range(8)]
    found: dict[str, list[float]] = {kind: [] for kind in (*_TAIL_TOKENS, "writing")}
    spent: dict[str, list[float]] = {kind: [] for kind in found}
    with (
        worker("unified", model, "BFloat16", threads) as without,
        worker("unified", model, "BFloat16", threads, kv=describe_store(holder)) as storing,
    ):
        await_store(storing)
        for turn in range(rounds + 1):
            works = {
                kind: [prompt + make_prompt(rng, count) for prompt in known] for kind, count in _TAIL_TOKENS.items()
            }
            works["writing"] = [make_prompt(rng, 300) for _ in range(8)]
            for kind, prompts in works.items():
                seconds, cpu = dict[int, float](), dict[int, float]()
                for each in (without, storing) if turn % 2 else (storing, without):
                    before = each.cpu_seconds()
                    seconds[each.port] = asyncio.run(streams(each.port, prompts, 64))
                    time.sleep(_SETTLE_SECONDS)
                    cpu[each.port] = each.cpu_seconds() - before
                if turn:  # memory has nothing of them before
                    found[kind].append(seconds[storing.port] / seconds[without.port])
                    spent[kind].append(cpu[storing.port] / cpu[without.port])
        written = read_metric(storing, "tandem_worker_kv_tier_tokens_total", tier="store", direction="written")
        read = read_metric(storing, "tandem_worker_kv_tier_tokens_total", tier="store", direction="read")
        cut = read_metric(storing, "tandem_worker_kv_loads_cut_total", tier="store")
        print(f"tokens written beside: {written:.0f}; found: {read:.0f}; look-ups that were late: {cut:.0f}")
        for kind, shares in _set_aside(spent).items():
            print(f"{kind:10} {statistics.median(shares):8.3f} of the CPU ({min(shares):.3f} to {max(shares):.3f})")
    return _set_aside(found)


def _set_aside(shares: dict[str, list[float]]) -> dict[str, list[float]]:
    """Every kind of work but the one of which nothing is asked, beside that one."""
    usual = statistics.median(shares["aside"])
    print(f"the two workers differ by {usual:.3f}")
    return {kind: [value / usual for value in values] for kind, values in shares.items() if kind != "aside"}


def measure_rotation(model: Path, holder: Program, sessions: int, turns: int) -> dict[str, Any]:
    """What round robin with the store has cached less than affinity, and answers that are not those without a cache."""
    share = (_HOLDER_MEGABYTES << 20) // 4
    plain = converse_without_cache(model, sessions, turns)
    affine = converse_by_affinity(model, MEMORY_BYTES + share, sessions, turns)  # as many bytes, of its own
    rotated = converse_in_rotation(model, describe_store(holder), sessions, turns)
    for name, seen in (("affinity", affine), ("round robin with the store", rotated)):
        print(f"{name}: {100 * seen.cached_share:.1f}% of {seen.prompt_tokens} prompt tokens cached")
    print(f"tokens from the store: {rotated.loaded_tokens:.0f}; loads and look-ups cut: {rotated.loads_cut:.0f}")
    differ = sum(
        answer != seen.answers[number] for seen in (affine, rotated) for number, answer in enumerate(plain.answers)
    )
    return {
        "cached share, affinity less round robin with the store": judge(
            affine.cached_share - rotated.cached_share, SHARE_GOAL
        ),
        "answers that are not those without a cache": judge(differ, 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt; default 4000")
    parser.add_argument("--prompts", type=int, default=5, help="that are asked for; default 5, 0: none")
    parser.add_argument("--rounds", type=int, default=3, help="of work whose steps are compared; default 3, 0: none")
    parser.add_argument("--sessions", type=int, default=5, help="conversations whose turns go round; default 5, odd")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation; default 4, 0: none")
    parser.add_argument("--record", type=Path, help="folder for the figures")
    options = parser.parse_args()
    os.environ.update(plan_environment())
    model, rows = find_model(), {}
    stay_inside()
    with tempfile.TemporaryDirectory() as name, run_store(Path(name), _HOLDER_MEGABYTES) as (_, holder):
        if options.prompts:
            first = measure_first_tokens(model, holder, options.tokens, options.prompts)
            medians = {kind: statistics.median(values) for kind, values in first.items()}
            for kind, values in first.items():
                print(f"{kind:10} {1e3 * medians[kind]:8.1f} ms ({1e3 * min(values):.1f} to {1e3 * max(values):.1f})")
            rows["first token from the store, of computing"] = judge(medians["store"] / medians["computed"], STORE_GOAL)
        if options.rounds:
            steps = measure_steps(model, holder, options.rounds)
            for kind, values in steps.items():
                print(f"{kind:10} {statistics.median(values):8.3f} ({min(values):.3f} to {max(values):.3f})")
            rows["work with a store, nothing found"] = judge(statistics.median(steps["quiet"]), QUIET_GOAL)
            rows["work with a store, six blocks not found"] = judge(statistics.median(steps["asked"]), QUIET_GOAL)
            rows["work with a store, everything written"] = judge(statistics.median(steps["writing"]), WRITING_GOAL)
        if options.turns:
            rows |= measure_rotation(model, holder, options.sessions, options.turns)
    line = json.dumps({"cores": len(os.sched_getaffinity(0)), "tokens": options.tokens, "blocks in a store": rows})
    if options.record is not None:
        options.record.mkdir(parents=True, exist_ok=True)
        Path(options.record, f"kv-store-{datetime.now(UTC):%Y-%m-%d}.json").write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
