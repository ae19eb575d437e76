"""`make bench-routing`: conversations through the gateway's scheduling code and through what it is compared with.

    python -m bench.routing --trace conversation_trace.jsonl

Without a trace, conversations are made up; agents always are. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.fleet import StartUp
from tandem_sim.load import Load, Recorded
from tandem_sim.profiles import WorkerProfile
from tandem_sim.replay import Simulation
from tandem_sim.result import Replay
from tandem_sim.routing import Routing
from tandem_sim.setting import Failure, Setting
from tandem_sim.synthetic import make_like_conversation
from tandem_sim.traces import Arrival, multiply, offered_tokens, read

from bench.routing.agents import Agents
from bench.routing.decision import measure
from bench.routing.policies import (
    LeastTokens,
    PerfectGreedy,
    PowerOfTwo,
    PrefixOnly,
    RoundRobin,
    SessionHash,
    Tandem,
)
from bench.routing.verdict import FOUR, GREEDY, ONE, Rows, judge

MAX_COPIES = 4
"""Of the recording; beyond that its pace is raised. More copies would only take longer."""

REQUESTS = 12_000
AGENTS = 35
"""For each worker: perfect greedy has half of the workers' time to spare then."""
AGENTS_TURNS = 4
"""Turns of each agent at least, in the mean."""

NO_TARGET = Target(percentile=0.9, seconds=3600.0)

POLICIES: Mapping[str, Callable[[], Routing]] = {
    "least tokens": LeastTokens,
    "session hash": SessionHash,
    GREEDY: PerfectGreedy,
    ONE: lambda: Tandem(telemetry=True),
    FOUR: lambda: Tandem(gateways=4, telemetry=True),
    "tandem, 4 gateways, unnamed prompts": lambda: Tandem(gateways=4, telemetry=True, prompts=False),
}
OTHERS: Mapping[str, Callable[[], Routing]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "prefix only": PrefixOnly,
    "tandem, no telemetry": Tandem,
    "tandem, half of the sessions named": lambda: Tandem(telemetry=True, naming=0.5),
    "tandem, no session named": lambda: Tandem(telemetry=True, naming=0.0),
    "tandem, 4 gateways, no telemetry": lambda: Tandem(gateways=4),
}
"""What tells little beside those, for `--all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Equal workers that do both."""

    rate: float
    """Prompt tokens per second of each."""
    kv_tokens: int
    workers: int = 1

    def setting(self, *, lose_at: float = 0.0, lose: int = 0) -> Setting:
        """`lose`: so many workers vanish at that time, and none comes in their place."""
        profile = WorkerProfile(
            name="routing", source="made up", prefill_token_seconds=1 / self.rate, step_seconds=0.01,
            step_sequence_seconds=0.0002, kv_tokens=self.kv_tokens, chunk_tokens=2048,
        )  # fmt: skip
        return Setting(
            prefill=None, decode=profile, replicas={Role.DECODE: self.workers}, ttft=NO_TARGET, tpot=NO_TARGET,
            deadlines=False, hold_seconds=None, start_up=StartUp(seconds=float("inf")),
            failures=[Failure(at=lose_at, role=Role.DECODE) for _ in range(lose)],
        )  # fmt: skip

    def run(self, load: Load, routing: Routing, *, lose_at: float = 0.0, lose: int = 0) -> Replay:
        return Simulation(load, self.setting(lose_at=lose_at, lose=lose), routing=routing).run()


def main() -> None:
    options = _build_parser().parse_args()
    recording = read(options.trace) if options.trace else make_like_conversation(3540)
    fleet = Fleet(rate=options.rate, kv_tokens=options.kv_tokens)
    policies = {**POLICIES, **(OTHERS if options.all else {})}
    result: dict[str, object] = {
        "trace": options.trace.name if options.trace else "made up",
        "tokens_per_second": fleet.rate,
        "kv_tokens": fleet.kv_tokens,
    }
    if not options.quick:
        result["decision"] = _print_decisions()
    cells: dict[str, Rows] = {}
    for workers in options.workers:
        fleet = replace(fleet, workers=workers)
        for load in options.load:
            arrivals = _scale(recording, workers, fleet.rate, load)[: options.requests]
            name = f"conversation, {workers} workers" + (", as recorded" if not load else f", load {load:g}")
            cells[name] = _compare(name, fleet, lambda arrivals=arrivals: Recorded(arrivals), policies)
        agents, requests = options.agents * workers, max(options.requests, AGENTS_TURNS * options.agents * workers)
        name = f"agents, {workers} workers"
        cells[name] = _compare(
            name, fleet, lambda agents=agents, requests=requests: Agents(agents, requests=requests), policies
        )
    result["cells"] = cells
    if not options.quick:
        result["a quarter lost"] = {
            str(workers): _lose(replace(fleet, workers=workers), recording) for workers in options.lose
        }
    result["verdict"] = verdict = judge(cells)
    for name, row in verdict.items():
        print(f"{name}: {row['value']} (goal {row['goal']}), {'met' if row['met'] else 'not met'}")
    print(json.dumps(result))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.routing", description="Routing policies on simulated workers."
    )
    parser.add_argument("--trace", type=Path, help="a recording in the format of Mooncake's traces")
    parser.add_argument("--workers", type=_numbers, default=[4, 16, 64, 256], metavar="N,N")
    parser.add_argument("--rate", type=float, default=16_000, help="prompt tokens that a worker computes per second")
    parser.add_argument("--kv-tokens", type=int, default=1 << 20, help="tokens that a worker's cache holds")
    parser.add_argument(
        "--load", type=lambda text: [float(part) for part in text.split(",")], default=[0.8], metavar="SHARE,..",
        help="of the workers' capacity without caches; 0 replays the recording at its own pace",
    )  # fmt: skip
    parser.add_argument("--agents", type=int, default=AGENTS, metavar="N", help="that each worker has at a time")
    parser.add_argument("--requests", type=int, default=REQUESTS, metavar="N", help="of each replay")
    parser.add_argument("--all", action="store_true", help="policies that tell little beside the others, too")
    parser.add_argument("--quick", action="store_true", help="neither the cost of a decision nor the loss of workers")
    parser.add_argument("--lose", type=_numbers, default=[4, 16], metavar="N,N", help="fleets that lose a quarter")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _scale(recording: list[Arrival], workers: int, rate: float, load: float) -> list[Arrival]:
    if not load:
        return recording
    factor = load * workers * rate / offered_tokens(recording)
    copies = max(1, min(MAX_COPIES, int(factor)))
    return multiply(recording, copies, factor / copies)


def _compare(
    title: str, fleet: Fleet, build_load: Callable[[], Load], policies: Mapping[str, Callable[[], Routing]]
) -> dict[str, dict[str, float]]:
    print(f"\n{title}")
    print(f"{'policy':36} {'hits %':>7} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'computing %':>12} {'predicted %':>12}")
    rows: dict[str, dict[str, float]] = {}
    for name, build in policies.items():
        policy = build()
        rows[name] = row = _read(fleet.run(build_load(), policy), fleet.rate * fleet.workers)
        predicted = ""
        if isinstance(policy, Tandem):
            row["predicted"] = round(100 * policy.predicted_share(), 1)
            predicted = f"{row['predicted']:.1f}"
        print(
            f"{name:36} {row['hits']:7.1f} {row['ttft_p50']:9.3f} {row['ttft_p90']:8.3f} {row['ttft_p99']:8.3f} "
            f"{row['computing']:12.1f} {predicted:>12}",
            flush=True,
        )
    return rows


def _read(seen: Replay, tokens_per_second: float) -> dict[str, float]:
    return {
        "requests": len(seen.at),
        "hits": round(100 * seen.hit_ratio, 2),
        "ttft_p50": round(float(np.percentile(seen.ttft, 50)), 4),
        "ttft_p90": round(float(np.percentile(seen.ttft, 90)), 4),
        "ttft_p99": round(float(np.percentile(seen.ttft, 99)), 4),
        "token_ms_p90": round(1000 * float(np.percentile(seen.token_seconds, 90)), 3),
        "computing": round(
            100 * int((seen.prompt - seen.hit).sum()) / (tokens_per_second * max(1e-9, float(seen.at[-1]))), 1
        ),
    }


def _lose(fleet: Fleet, recording: list[Arrival]) -> dict[str, float]:
    """Hits after a quarter of the workers vanished a third into the recording, one lifetime of the caches later, beside
    those of a fleet that never had more.
    """
    lost, lose_at = fleet.workers // 4, recording[-1].at / 3
    left = replace(fleet, workers=fleet.workers - lost)
    lifetime = left.workers * fleet.kv_tokens / (0.7 * offered_tokens(recording))
    since = min(lose_at + lifetime, recording[-1].at * 0.9)
    seen = fleet.run(Recorded(recording), Tandem(), lose_at=lose_at, lose=lost)
    steady = left.run(Recorded(recording), Tandem())
    row = {
        "hits": round(100 * seen.hit_ratio_from(since), 2),
        "undisturbed": round(100 * steady.hit_ratio_from(since), 2),
    }
    print(
        f"\n{lost} of {fleet.workers} workers lost at {lose_at:.0f} s: {row['hits']:.1f}% hits from {since:.0f} s on, "
        f"{row['undisturbed']:.1f}% with {left.workers} from the beginning"
    )
    return row


def _print_decisions() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    print(f"{'one decision, CPU time':36} {'choose us':>10} {'record us':>10}")
    for endpoints in (64, 1024):
        for disaggregated in (False, True):
            name = f"{endpoints} endpoints{', prefill and decode' if disaggregated else ''}"
            rows[name] = measure(endpoints, disaggregated=disaggregated)
            print(f"{name:36} {rows[name]['choose_us']:10.1f} {rows[name]['record_us']:10.1f}", flush=True)
    return rows


if __name__ == "__main__":
    main()
