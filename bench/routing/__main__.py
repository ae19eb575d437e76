"""`make bench-routing`: conversations through the gateway's scheduling code and through what it is compared with.

    python -m bench.routing --trace conversation_trace.jsonl

Without a trace, conversations are made up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem_sim.synthetic import make_conversations
from tandem_sim.traces import Arrival, multiply, offered_tokens, read_trace

from bench.routing.decision import measure
from bench.routing.fleet import Fleet
from bench.routing.policies import (
    LeastTokens,
    PerfectGreedy,
    Policy,
    PowerOfTwo,
    PrefixOnly,
    RoundRobin,
    SessionHash,
    Tandem,
)
from bench.routing.simulate import Replay, replay

MAX_COPIES = 4
"""Of the recording; beyond that its pace is raised. More copies would only take longer."""

Build = Callable[[Fleet], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The simulated workers."""

    rate: float
    kv_tokens: int

    def fleet(self, workers: int) -> Fleet:
        return Fleet(workers, tokens_per_second=self.rate, kv_tokens=self.kv_tokens)

    def tandem(self, *, gateways: int = 1, naming: float = 1.0, telemetry: bool = False) -> Build:
        return lambda fleet: Tandem(
            fleet, kv_tokens=self.kv_tokens, gateways=gateways, naming=naming, telemetry=telemetry
        )

    def policies(self) -> dict[str, Build]:
        return {
            "round robin": RoundRobin,
            "power of two": PowerOfTwo,
            "least tokens": LeastTokens,
            "prefix only": PrefixOnly,
            "session hash": SessionHash,
            "perfect greedy": PerfectGreedy,
            "tandem": self.tandem(),
            "tandem, half of the sessions named": self.tandem(naming=0.5),
            "tandem, no session named": self.tandem(naming=0.0),
            "tandem, 4 gateways": self.tandem(gateways=4),
            "tandem, 4 gateways, telemetry": self.tandem(gateways=4, telemetry=True),
        }


def main() -> None:
    options = _build_parser().parse_args()
    recording = read_trace(options.trace) if options.trace else make_conversations()
    setting = Setting(rate=options.rate, kv_tokens=options.kv_tokens)
    result: dict[str, object] = {
        "trace": options.trace.name if options.trace else "made up",
        "requests": len(recording),
        "tokens_per_second": setting.rate,
        "kv_tokens": setting.kv_tokens,
    }
    result["decision"] = _print_decisions()
    for load in options.load:
        rows = {}
        for workers in options.workers:
            arrivals = _scale(recording, workers, setting.rate, load)
            title = "as recorded" if not load else f"{load:.0%} of what the workers can compute without caches"
            rows[str(workers)] = _compare(workers, arrivals, setting, title)
        result["as recorded" if not load else f"load {load:g}"] = rows
    result["a quarter lost"] = {str(workers): _lose(workers, recording, setting) for workers in options.lose}
    print(json.dumps(result))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.routing", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="a recording in the format of Mooncake's traces")
    parser.add_argument("--workers", type=_numbers, default=[4, 16, 64, 1024], metavar="N,N")
    parser.add_argument("--rate", type=float, default=16_000, help="prompt tokens that a worker computes per second")
    parser.add_argument("--kv-tokens", type=int, default=1 << 20, help="tokens that a worker's cache holds")
    parser.add_argument(
        "--load", type=lambda text: [float(part) for part in text.split(",")], default=[0.0], metavar="SHARE,..",
        help="of the workers' capacity without caches; 0 replays the recording at its own pace",
    )  # fmt: skip
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


def _compare(workers: int, arrivals: list[Arrival], setting: Setting, title: str) -> dict[str, dict[str, float]]:
    print(f"\n{workers} workers, {len(arrivals)} requests, {title}")
    print(f"{'policy':36} {'hits %':>7} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'token ms p90':>13}")
    rows: dict[str, dict[str, float]] = {}
    for name, build in setting.policies().items():
        fleet = setting.fleet(workers)
        rows[name] = _read(replay(arrivals, fleet, build(fleet)))
        row = rows[name]
        print(
            f"{name:36} {row['hits']:7.1f} {row['ttft_p50']:9.3f} {row['ttft_p90']:8.3f} {row['ttft_p99']:8.3f} "
            f"{row['token_ms_p90']:13.2f}",
            flush=True,
        )
    best, own = rows["perfect greedy"], rows["tandem"]
    print(
        f"tandem against perfect greedy: {own['hits'] / best['hits']:.0%} of its hits, "
        f"{own['ttft_p90'] / best['ttft_p90']:.2f} x its TTFT p90"
    )
    return rows


def _read(seen: Replay) -> dict[str, float]:
    return {
        "hits": round(100 * seen.hit_ratio(), 2),
        "ttft_p50": round(seen.ttft_at(50), 4),
        "ttft_p90": round(seen.ttft_at(90), 4),
        "ttft_p99": round(seen.ttft_at(99), 4),
        "token_ms_p90": round(1000 * seen.token_at(90), 3),
    }


def _lose(workers: int, recording: list[Arrival], setting: Setting) -> dict[str, float]:
    """Hits after a quarter of the workers vanished a third into the recording, one lifetime of the caches later, beside
    those of a fleet that never had more.
    """
    lost = set(range(workers // 4))
    lose_at = recording[-1].at / 3
    lifetime = (workers - len(lost)) * setting.kv_tokens / (0.7 * offered_tokens(recording))
    since = min(lose_at + lifetime, recording[-1].at * 0.9)
    fleet = setting.fleet(workers)
    seen = replay(recording, fleet, setting.tandem()(fleet), lose_at=lose_at, lose=lost)
    small = setting.fleet(workers - len(lost))
    steady = replay(recording, small, setting.tandem()(small))
    row = {"hits": round(100 * seen.hit_ratio(since), 2), "undisturbed": round(100 * steady.hit_ratio(since), 2)}
    print(
        f"\n{len(lost)} of {workers} workers lost at {lose_at:.0f} s: {row['hits']:.1f}% hits from {since:.0f} s on, "
        f"{row['undisturbed']:.1f}% with {workers - len(lost)} from the beginning"
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
