"""One prefill and one decode worker, the same two with a decode worker that converts, and two workers that do both.

    python -m bench.pd [--requests 40] [--rounds 3] [--load 0.65] [--step 0.07] [--json FILE]

Four workers serve SmolLM2 on the CPU, each with one thread, behind three gateways. In every round each gateway gets the
same long prompts at the same times, in turns, while the other workers rest; a `cache_salt` of its own keeps what came
before out of the caches. The prefill worker is busy for `--load` of the time where prompts are computed by it alone.
The machine should be idle and have two cores. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import Any

from bench.pd.load import OUTPUT, PROMPTS, Answer, ask_for, make_load, replay
from e2e.model import find_model
from tests.clients.stack import MODEL, run_gateway
from tests.tandem_worker.process.conftest import WorkerProcess, await_ready, run_worker

APART, CONVERTIBLE, AGGREGATED = "apart", "convertible", "aggregated"
FLEETS = (APART, CONVERTIBLE, AGGREGATED)
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "unified-0": "unified", "unified-1": "unified"}
GAP_GOAL = 0.25
"""Share of the aggregated workers' p99 between tokens."""
FIRST_GOAL = 1.1
"""The same of their p90 to the first token."""
WARM_UPS = 6
"""Prompts that each gateway gets before: it learns how fast its workers are."""


@dataclass
class Seen:
    """What clients of one fleet saw."""

    answers: list[list[Answer]] = field(default_factory=list[list[Answer]])
    """A list for each round, in the order of the requests."""

    def describe(self) -> dict[str, Any]:
        answers = [answer for each in self.answers for answer in each]
        firsts, gaps = [one.first for one in answers], [gap for one in answers for gap in one.gaps]
        return {
            "ttft_p50": _percentile(firsts, 50), "ttft_p90": _percentile(firsts, 90),
            "gap_p50": _percentile(gaps, 50), "gap_p90": _percentile(gaps, 90), "gap_p99": _percentile(gaps, 99),
            "longest_gap": round(max(gaps), 4), "tpot_mean": round(mean(gaps), 4),
            "computed_by_decode": round(mean(one.computed_by.startswith("decode") for one in answers), 3),
            "ttft_p90_by_round": [_percentile([one.first for one in each], 90) for each in self.answers],
            "gap_p99_by_round": [_percentile([gap for one in each for gap in one.gaps], 99) for each in self.answers],
        }  # fmt: skip


def _percentile(values: Sequence[float], share: int) -> float:
    return round(quantiles(values, n=100, method="inclusive")[share - 1], 4)


@contextlib.contextmanager
def run_fleets(folder: Path, step: float) -> Iterator[tuple[dict[str, str], WorkerProcess]]:
    """URLs of the gateways by fleet, and the prefill worker, once everything is ready."""
    told: dict[str, Any] = {
        "modelName": MODEL, "servedName": MODEL, "kv": {"memoryBytes": 512 << 20}, "maxModelLen": 2048,
        "dtype": "Auto", "scheduler": {}, "drainTimeoutSeconds": 1,
        "speculative": {"method": "Off"},  # an event is a token: gaps are those between tokens
    }  # fmt: skip
    with contextlib.ExitStack() as started:
        model = find_model()
        workers: dict[str, WorkerProcess] = {}
        for name, role in ROLES.items():
            place = folder / name
            place.mkdir()
            process = started.enter_context(run_worker(place, role, model, environment={"POD_NAME": name}, **told))
            workers[name] = await_ready(process)

        def gateway(fleet: str, members: Sequence[str], **changes: Any) -> str:
            flags: list[str] = []
            for name in members:
                one, role = workers[name], ROLES[name]
                status = one.metrics_url.removeprefix("http://")
                address = one.url.removeprefix("http://")
                flags += ["--worker", f"role={role},url={address},kv={one.kv},status={status},revision=r1,name={name}"]
            place = folder / fleet
            place.mkdir()
            changes["disaggregated"] = "prefill-0" in members
            return started.enter_context(run_gateway(place, flags, **changes))

        apart, both = ("prefill-0", "decode-0"), ("unified-0", "unified-1")
        urls = {
            APART: gateway(APART, apart),
            CONVERTIBLE: gateway(CONVERTIBLE, apart, convert_step_seconds=step),
            AGGREGATED: gateway(AGGREGATED, both),
        }
        yield urls, workers["prefill-0"]


def find_rate(prefill: WorkerProcess, url: str, load: float) -> float:
    """Requests per second that keep the prefill worker busy for this share of the time."""
    asks = make_load(WARM_UPS, 1.0, seed=11)
    before = _busy(prefill)
    for ask in asks:
        asyncio.run(ask_for(url, ask.prompt, "rate", output=4))
    time.sleep(0.2)
    seconds = (_busy(prefill) - before) / sum(len(ask.prompt) for ask in asks)
    return load / (seconds * sum(PROMPTS) / 2)


def _busy(worker: WorkerProcess) -> float:
    return float(worker.get("/telemetry").json()["busySecondsTotal"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pd", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=40, help="of each fleet and round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--load", type=float, default=0.65, help="share of the prefill worker's time (%(default)s)")
    parser.add_argument("--rate", type=float, help="requests per second, whatever share that is")
    parser.add_argument("--step", type=float, default=0.07, help="longest step with a converted prompt (%(default)s s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, run_fleets(Path(folder), options.step) as (urls, prefill):
        rate = options.rate or find_rate(prefill, urls[APART], options.load)
        print(f"{rate:.2f} requests/s of {PROMPTS[0]} to {PROMPTS[1]} prompt tokens, {OUTPUT} tokens each", flush=True)
        seen = serve(urls, rate, options.requests, options.rounds)
    figures = judge(seen) | {"rate": round(rate, 3), "step": options.step, "requests": options.requests}
    figures["load_average"] = round(os.getloadavg()[0], 2)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


def serve(urls: dict[str, str], rate: float, requests: int, rounds: int) -> dict[str, Seen]:
    seen = {fleet: Seen() for fleet in FLEETS}
    for fleet, url in urls.items():
        for index, ask in enumerate(make_load(WARM_UPS, rate, seed=12)):
            asyncio.run(ask_for(url, ask.prompt, f"warm {fleet} {index}"))
    for number in range(rounds):
        asks = make_load(requests, rate, seed=number)
        for fleet in FLEETS[number % 3 :] + FLEETS[: number % 3]:
            answers = asyncio.run(replay(urls[fleet], asks, f"{fleet} {number}"))
            seen[fleet].answers.append(answers)
            _print(fleet, Seen([answers]))
    return seen


def judge(seen: dict[str, Seen]) -> dict[str, Any]:
    """All figures, and whether they are as they should be."""
    found = {fleet: each.describe() for fleet, each in seen.items()}
    told = [[one.text for each in seen[fleet].answers for one in each] for fleet in FLEETS]
    same = sum(len(set(texts)) == 1 for texts in zip(*told, strict=True))
    ratios = {
        fleet: {
            "gap_p99": round(found[fleet]["gap_p99"] / found[AGGREGATED]["gap_p99"], 3),
            "ttft_p90": round(found[fleet]["ttft_p90"] / found[AGGREGATED]["ttft_p90"], 3),
        }
        for fleet in (APART, CONVERTIBLE)
    }
    mine = ratios[CONVERTIBLE]
    return {
        "fleets": found, "of_aggregated": ratios, "same_answers": [same, len(told[0])],
        "holds": {"gap_p99": mine["gap_p99"] <= GAP_GOAL, "ttft_p90": mine["ttft_p90"] <= FIRST_GOAL},
    }  # fmt: skip


def _print(fleet: str, seen: Seen) -> None:
    told = seen.describe()
    print(
        f"{fleet:12} first token p50 {told['ttft_p50']:5.2f} p90 {told['ttft_p90']:5.2f} s, between tokens p50"
        f" {1000 * told['gap_p50']:3.0f} p90 {1000 * told['gap_p90']:3.0f} p99 {1000 * told['gap_p99']:4.0f} ms,"
        f" {told['computed_by_decode']:.0%} of prompts computed by the decode worker; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
