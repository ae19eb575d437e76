"""The simulator against real workers: a profile of them is measured, and loads are served and simulated with it.

    python -m bench.autoscaling.calibrate --json calibration.json

A prefill worker, a decode worker and a gateway serve SmolLM2 on the CPU, each with one thread. First single prompts and
batches are timed: that is the profile, which `tandem-sim --profile calibration.json` takes too. Then the same
requests are served and simulated at some rates. Nothing is fitted to these runs. Takes about three minutes on a machine
with two idle cores; on a busy one the figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.profiles import WorkerProfile
from tandem_sim.replay import GATEWAY_SECONDS, Simulation
from tandem_sim.setting import Setting
from tandem_sim.traces import Arrival

from bench.autoscaling.live import Stream, answer, measure_batch, measure_step, replay
from bench.completions import make_prompt
from tests.clients.stack import Stack, run_stack
from tests.tandem_worker.process.conftest import WorkerProcess

PROMPTS = (32, 128, 384, 768)
BATCHES = ((16, 1), (16, 3), (16, 6), (480, 1), (480, 2))
"""Prompt tokens and streams."""
TOKENS = 128
"""Of each stream of a batch."""
LOADS = (0.25, 0.45, 0.65)
"""Of what the prefill worker can do."""
GOAL = 0.15
PERCENTILES = (50, 90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What real workers took."""

    profile: WorkerProfile
    services: dict[int, float]
    """Seconds of the prefill worker by prompt tokens."""
    steps: dict[str, float]
    """Seconds of a decode step by prompt tokens and streams."""
    prefill_beside: float
    """How much longer a prompt takes while the decode worker is busy: the two share a machine, unlike GPUs."""
    decode_beside: float
    """How much longer a step takes while the prefill worker is busy."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.autoscaling.calibrate", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the profile and all figures there")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each prompt (%(default)s)")
    options = parser.parse_args()
    steps = {"speculative": {"method": "Off"}}  # each makes one token: the profile is of steps
    with tempfile.TemporaryDirectory() as folder, run_stack(Path(folder), worker=steps) as stack:
        measured = measure(stack, options.repeats)
        _print_profile(measured)
        rows: list[dict[str, Any]] = []
        for load in LOADS:
            rows.append(compare(stack, measured, load, options.seconds))
            _print_row(rows[-1])
    worst = max(abs(float(error)) for row in rows for error in row["errors"].values())
    print(f"largest error {worst:.0%}, goal {GOAL:.0%}; load of the machine {os.getloadavg()[0]:.1f}")
    if options.json:
        options.json.write_text(
            json.dumps(_describe(measured) | {"loads": rows, "largest_error": worst}, indent=1) + "\n"
        )


# the profile


def measure(stack: Stack, repeats: int) -> Measured:
    chance = random.Random(1)
    for _ in range(2):  # first requests take longer
        asyncio.run(answer(stack.url, make_prompt(64, chance), 16))
    services: dict[int, float] = {}
    waits: list[float] = []
    for tokens in PROMPTS:
        seen = [_time_prompt(stack, tokens, chance) for _ in range(repeats)]
        services[tokens] = float(np.median([service for service, _ in seen]))
        waits += [first - service for service, first in seen]
    steps = {
        (prompt, count): asyncio.run(measure_batch(stack.url, prompt, count, TOKENS, chance))
        for prompt, count in BATCHES
    }
    blocks = _read(stack.workers["decode"])
    profile = fit_profile(
        services, steps, int(blocks["kvBlocksTotal"]) * int(blocks["kvBlockSize"]),
        first_token=float(np.median(waits)) - 2 * GATEWAY_SECONDS,
    )  # fmt: skip
    return Measured(
        profile=profile,
        services=services,
        steps={f"{prompt} x{count}": seconds for (prompt, count), seconds in steps.items()},
        prefill_beside=asyncio.run(_time_prompt_beside(stack, services, repeats, chance)),
        decode_beside=asyncio.run(_time_step_beside(stack, steps[16, 3], chance)),
    )


def fit_profile(
    services: dict[int, float], steps: dict[tuple[int, int], float], kv_tokens: int, *, first_token: float
) -> WorkerProfile:
    """Least squares of relative errors, no coefficient below zero."""
    fixed, per_token, per_pair = _fit([(1.0, n, n * n / 2) for n in services], list(services.values()))
    context = [(1.0, count, count * (prompt + TOKENS / 2)) for prompt, count in steps]
    base, per_sequence, per_context = _fit(context, list(steps.values()))
    return WorkerProfile(
        name="SmolLM2-135M on a CPU", source="bench.autoscaling.calibrate", prefill_seconds=fixed,
        prefill_token_seconds=per_token, prefill_pair_seconds=per_pair, step_seconds=base,
        step_sequence_seconds=per_sequence, step_context_seconds=per_context, kv_tokens=kv_tokens,
        first_token_seconds=max(0.0, first_token),
    )  # fmt: skip


def _fit(terms: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """The coefficients of the terms; those that would be negative are left out."""
    kept = list(range(len(terms[0])))
    while True:
        matrix = np.array([[row[index] for index in kept] for row in terms]) / np.array(seconds)[:, None]
        scale = np.abs(matrix).max(axis=0)
        found = np.linalg.lstsq(matrix / scale, np.ones(len(seconds)), rcond=None)[0] / scale
        if (found >= 0).all():
            result = [0.0] * len(terms[0])
            for index, value in zip(kept, found, strict=True):
                result[index] = float(value)
            return result
        kept.pop(int(np.argmin(found * scale)))


def _time_prompt(stack: Stack, tokens: int, chance: random.Random) -> tuple[float, float]:
    """Seconds that the prefill worker is busy with a prompt, and until the first token is there."""
    before = float(_read(stack.workers["prefill"])["busySecondsTotal"])
    seen = asyncio.run(answer(stack.url, make_prompt(tokens, chance), 1))
    return _await_growth(stack.workers["prefill"], before), seen.first


async def _time_prompt_beside(
    stack: Stack, services: dict[int, float], repeats: int, chance: random.Random
) -> float:  # fmt: skip
    """Of a prompt while two streams run, as a multiple of what it takes alone."""
    tokens = PROMPTS[1]
    seen: list[float] = []
    async with _keep_busy(stack.url, 16, 600, 2, chance):
        for _ in range(repeats):
            before = float(_read(stack.workers["prefill"])["busySecondsTotal"])
            await answer(stack.url, make_prompt(tokens, chance), 1)
            seen.append(await asyncio.to_thread(_await_growth, stack.workers["prefill"], before))
    return max(1.0, float(np.median(seen)) / services[tokens])


async def _time_step_beside(stack: Stack, alone: float, chance: random.Random) -> float:
    """Of a step of three streams while prompts are computed, as a multiple of what it takes alone."""
    streams = asyncio.gather(*(answer(stack.url, make_prompt(16, chance), TOKENS) for _ in range(3)))
    await asyncio.sleep(0.3)  # they decode
    async with _keep_busy(stack.url, 256, 1, 1, chance):
        results = await streams
    return max(1.0, measure_step(results) / alone)


@contextlib.asynccontextmanager
async def _keep_busy(url: str, prompt: int, output: int, streams: int, chance: random.Random) -> AsyncIterator[None]:
    """So many requests at a time, one after another."""

    async def repeat() -> None:
        while True:
            await answer(url, make_prompt(prompt, chance), output)

    tasks = [asyncio.create_task(repeat()) for _ in range(streams)]
    await asyncio.sleep(0.5)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _read(worker: WorkerProcess) -> dict[str, Any]:
    return worker.get("/telemetry").json()


def _await_growth(worker: WorkerProcess, before: float) -> float:
    """By how much the worker's busy seconds have grown; they are told after a step has ended."""
    for _ in range(200):
        grown = float(_read(worker)["busySecondsTotal"]) - before
        if grown > 0:
            return grown
        time.sleep(0.01)
    raise RuntimeError("the prefill worker does not tell that it was busy")


# loads


def compare(stack: Stack, measured: Measured, load: float, seconds: float) -> dict[str, Any]:
    """Serve some requests, simulate the same ones, and say how far apart they are."""
    arrivals = make_load(measured.profile, load, seconds)
    real = asyncio.run(replay(stack.url, arrivals, seed=int(100 * load)))
    simulated = simulate(measured, arrivals)
    figures = _summarize(real)
    errors = {name: simulated[name] / figures[name] - 1 for name in figures}
    return {
        "load": load, "requests": len(arrivals), "requests_per_second": round(len(arrivals) / arrivals[-1].at, 3),
        "measured": figures, "simulated": simulated, "errors": errors,
    }  # fmt: skip


def make_load(profile: WorkerProfile, load: float, seconds: float) -> list[Arrival]:
    """Poisson arrivals that keep the prefill worker busy for this share of the time."""
    chance = random.Random(7)
    lengths = [
        (min(900, int(chance.lognormvariate(log(150), 0.7)) + 8), min(128, int(chance.expovariate(1 / 40)) + 8))
        for _ in range(4096)
    ]
    service = float(np.mean([profile.prefill(prompt, 0) for prompt, _ in lengths]))
    count = max(8, round(load * seconds / service))
    at, arrivals = 0.0, list[Arrival]()
    for index, (prompt, output) in enumerate(lengths[:count]):
        at += chance.expovariate(load / service)
        arrivals.append(Arrival(at, prompt, output, (), index))
    return arrivals


def simulate(measured: Measured, arrivals: Sequence[Arrival]) -> dict[str, float]:
    """With each worker slowed down by how busy the other one is: they share a machine."""
    profile, span = measured.profile, arrivals[-1].at
    computing = min(1.0, sum(profile.prefill(one.prompt, 0) for one in arrivals) / span)
    decoding = 1 - exp(-sum(one.output for one in arrivals) * profile.step(1, 200) / span)
    prefill = slow_down(profile, 1 + (measured.prefill_beside - 1) * decoding)
    decode = slow_down(profile, 1 + (measured.decode_beside - 1) * computing)
    setting = Setting(
        prefill=prefill, decode=decode, replicas={Role.PREFILL: 1, Role.DECODE: 1}, ttft=Target(seconds=1.0),
        tpot=Target(seconds=1.0), deadlines=False, hold_seconds=None,
    )  # fmt: skip
    seen = Simulation(arrivals, setting).run()
    return _name(seen.ttft, seen.token_seconds)


def slow_down(profile: WorkerProfile, factor: float) -> WorkerProfile:
    names = [name for name in asdict(profile) if name.startswith(("prefill_", "step_"))]
    return replace(profile, **{name: factor * getattr(profile, name) for name in names})


def _summarize(streams: Sequence[Stream]) -> dict[str, float]:
    return _name([one.first for one in streams], [one.token_seconds for one in streams])


def _name(first: Any, token: Any) -> dict[str, float]:
    return {
        f"{name}_p{share}": float(np.percentile(values, share))
        for name, values in (("ttft", first), ("token", token))
        for share in PERCENTILES
    }


# what is shown


def _describe(measured: Measured) -> dict[str, Any]:
    profile = {name: value for name, value in asdict(measured.profile).items() if value != float("inf")}
    return {
        "profile": profile, "services": measured.services, "steps": measured.steps,
        "prefill_beside": measured.prefill_beside, "decode_beside": measured.decode_beside,
    }  # fmt: skip


def _print_profile(measured: Measured) -> None:
    profile = measured.profile
    for tokens, seconds in measured.services.items():
        told = profile.prefill(tokens, 0)
        print(f"prompt of {tokens:4d} tokens {1000 * seconds:7.1f} ms, profile {1000 * told:7.1f} ms")
    for (prompt, count), seconds in zip(BATCHES, measured.steps.values(), strict=True):
        told = profile.step(count, count * (prompt + TOKENS / 2))
        print(
            f"step of {count} streams after {prompt:3d} tokens {1000 * seconds:6.1f} ms, profile {1000 * told:6.1f} ms"
        )
    print(
        f"beside the other worker: prompts x{measured.prefill_beside:.2f}, steps x{measured.decode_beside:.2f}",
        flush=True,
    )
    print(f"\n{'load':24}" + "".join(f"{name:>28}" for name in ("TTFT p50", "p90", "token p50", "p90")))


def _print_row(row: dict[str, Any]) -> None:
    cells = [
        f"{1000 * row['simulated'][name]:7.0f} of {1000 * row['measured'][name]:6.0f} ms {error:+5.0%}"
        for name, error in row["errors"].items()
    ]
    name = f"{row['load']:.0%}, {row['requests']} of {row['requests_per_second']:.2f}/s"
    print(f"{name:24}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
