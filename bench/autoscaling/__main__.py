"""`make bench-autoscaling`: the planner and what it is compared with, on replayed ramps and spikes.

    python -m bench.autoscaling --conversation conversation_trace.jsonl --azure AzureLLMInferenceTrace_conv.csv

Without traces, requests are made up. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from tandem_sim.comparison import Rate, judge
from tandem_sim.plot import draw_studies, name_targets
from tandem_sim.shapes import build_constant, build_ramp, build_spike
from tandem_sim.workload import Intensity, Workload

from bench.autoscaling.baselines import Told
from bench.autoscaling.runs import (
    BASELINES,
    REFERENCES,
    Case,
    Row,
    build_planner,
    find_static,
    find_static_shared,
    run,
)
from bench.autoscaling.scenario import TPOT, TTFT, load_scenarios
from bench.autoscaling.starts import (
    SHAPES,
    STARTS,
    VARIANTS,
    find_dominators,
    run_start,
)
from bench.autoscaling.studies import ABLATIONS, SPLITS, run_ablation, run_ceiling, run_overload, run_speed, run_split

Files = tuple[Path | None, Path | None]
SECTIONS = ("ramps", "spikes", "starts", "shared", "ablation", "overload", "split", "speed")
Result = TypeVar("Result")
SPIKE_SECONDS = 270.0
"""No replica serves a spike that takes longer to start."""
GOOD = 0.96
"""The attainment below which a static fleet is no comparison."""
SHARED = {"conversation": 256, "azure": 2048}
"""Tokens of a step of replicas that do both: the best ones for each trace, as `split` finds."""


def main() -> None:
    options = _build_parser().parse_args()
    files = options.conversation, options.azure
    result: dict[str, object] = {"traces": [str(file.name) if file else "made up" for file in files]}
    with ProcessPoolExecutor(options.processes) as pool:
        share = partial(_share, pool)
        for section in options.only:
            result[section] = globals()[f"_compare_{section}"](share, files, options)
    print(json.dumps(result))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.autoscaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--conversation", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--azure", type=Path, help="a trace in Azure's format")
    parser.add_argument(
        "--loads", type=_numbers, default=[1.0, 2.0, 4.0], metavar="N,N", help="of the trace's own pace"
    )
    parser.add_argument("--starts", type=_numbers, default=list(STARTS), metavar="N,N", help="start-up seconds")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), metavar="SHAPE,..",
                        help=f"of the section starts: of {', '.join(SHAPES)}")  # fmt: skip
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(SECTIONS), metavar="SECTION,..",
                        help=f"of {', '.join(SECTIONS)}")  # fmt: skip
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the section split there, as .png and .svg")
    parser.add_argument("--processes", type=int, default=2)
    return parser


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _share(pool: ProcessPoolExecutor, work: Callable[..., Result], calls: Sequence[tuple[object, ...]]) -> list[Result]:
    return list(pool.map(work, *zip(*calls, strict=True)))


class Share(Protocol):
    def __call__(self, work: Callable[..., Result], calls: Sequence[tuple[object, ...]]) -> list[Result]: ...


# what one process does


def _find(files: Files, trace: str) -> Workload:
    return load_scenarios(*files)[trace]


def run_ramp(files: Files, trace: str, load: float, policy: str) -> Row:
    case = Case(scenario=_find(files, trace), shape=build_ramp(), load=load)
    return _run_named(case, policy)


def run_spike(files: Files, trace: str, start_up: float, policy: str) -> Row:
    case = Case(scenario=_find(files, trace), shape=build_spike(), load=2.0, start_up=start_up)
    if policy == "ceiling":
        return {"policy": policy, **run_ceiling(case)}
    return _run_named(case, policy)


def run_shared(files: Files, trace: str, shape: str, policy: str) -> Row:
    """Replicas that do both, in the steps that suit the trace, on a ramp or on the trace as it is."""
    scenario, chunk = _find(files, trace), SHARED[trace]
    span = scenario.recording[-1].at
    case = Case(
        scenario=scenario, shape=build_ramp() if shape == "ramp" else build_constant(span), load=1.0, chunk=chunk
    )  # fmt: skip
    if policy == "planner":
        return {"policy": policy, **run(case, lambda one, _: build_planner(one, shared=True))[0]}
    if policy == "told":
        return {"policy": policy, **run(case, lambda one, all_: Told(Intensity(one, all_, chunk=chunk).needed))[0]}
    name, row = find_static_shared(case, float(policy))
    return {"policy": f"{name} (at least {100 * float(policy):g}%)", **row}


def _run_named(case: Case, policy: str) -> Row:
    if policy == "static":
        name, row = find_static(case, GOOD)
        return {"policy": name, **row}
    if policy == "planner":
        return {"policy": policy, **run(case, lambda scenario, _: build_planner(scenario))[0]}
    return {"policy": policy, **run(case, {**BASELINES, **REFERENCES}[policy])[0]}


# sections


def _compare_ramps(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    cells: dict[str, object] = {}
    names = ["planner", *REFERENCES, "static", *BASELINES]
    for trace in ("conversation", "azure"):
        for load in options.loads:
            rows = share(run_ramp, [(files, trace, load, name) for name in names])
            cells[f"{trace} x{load:g}"] = {"verdict": _judge(rows), "rows": rows}
            _print(f"ramp, {trace} x{load:g}", rows)
            print("  " + json.dumps(_judge(rows)), flush=True)
    return cells


def _judge(rows: list[Row]) -> Row:
    """The planner beside the cheapest baseline that attains as much and is as steady, and beside what is told."""
    own, told, kept, *others = rows
    equal = [
        row for row in others if float(row["attainment"]) >= float(own["attainment"]) and row["reversals"] in (0, 1)
    ]
    good = [row for row in others if float(row["attainment"]) >= GOOD]
    verdict: Row = {
        "attainment": own["attainment"],
        "reversals": own["reversals"],
        "of_told": round(float(own["gpu_hours"]) / float(told["gpu_hours"]), 3),
        "of_told_kept": round(float(own["gpu_hours"]) / float(kept["gpu_hours"]), 3),
    }
    for name, candidates in (("as_good_and_steady", equal), (f"above_{GOOD:g}", good)):
        if candidates:
            best = min(candidates, key=lambda row: float(row["gpu_hours"]))
            verdict[name] = str(best["policy"])
            verdict[f"saved_{name}"] = round(1 - float(own["gpu_hours"]) / float(best["gpu_hours"]), 3)
    return verdict


def _compare_spikes(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    cells: dict[str, object] = {}
    names = ["planner", "ceiling", "static", *(name for name in BASELINES if name.startswith(("HPA", "token")))]
    for trace in ("conversation", "azure"):
        for start_up in [start for start in options.starts if start <= SPIKE_SECONDS]:
            rows = share(run_spike, [(files, trace, start_up, name) for name in names])
            cells[f"{trace}, start-up {start_up:g} s"] = rows
            _print(f"spike, {trace}, start-up {start_up:g} s", rows)
    return cells


def _compare_starts(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    cells: dict[str, object] = {}
    for trace in ("conversation", "azure"):
        for shape in options.shapes:
            for start_up in options.starts:
                rows = share(run_start, [(files, trace, shape, start_up, name) for name in (*VARIANTS, *BASELINES)])
                name, better = f"{trace}, {shape}, start-up {start_up:g} s", find_dominators(rows)
                cells[name] = {"better_and_cheaper": better, "of_peak": rows[0]["of_peak"], "rows": rows}
                _print(name, rows)
                print(f"  better and cheaper than the planner: {', '.join(better) or 'none'}", flush=True)
    return cells


def _compare_shared(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    cells: dict[str, object] = {}
    for trace in SHARED:
        for shape in ("ramp", "as it is"):
            rows = share(run_shared, [(files, trace, shape, name) for name in ("planner", "told", "0.96", "0.98")])
            cells[f"{trace}, {shape}"] = rows
            _print(f"replicas that do both, {trace}, {shape}", rows)
    return cells


def _compare_ablation(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    rows = share(run_ablation, [(files, name) for name in ABLATIONS])
    _print("ablation, conversation x2", rows)
    return {str(row["policy"]): row for row in rows}


def _compare_overload(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    rows = share(run_overload, [(files, trace) for trace in ("conversation", "azure")])
    _print("overload: three times what the fleet can do, from 300 s on", rows)
    return {str(row["policy"]): row for row in rows}


def _compare_split(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    calls = [(files, trace, load) for trace, loads in SPLITS.items() for load in loads]
    rates = share(run_split, calls)
    result: dict[str, object] = {}
    drawn: list[tuple[str, list[Rate], dict[str, float]]] = []
    for trace in SPLITS:
        own = [rate for (_, name, _), rate in zip(calls, rates, strict=True) if name == trace]
        _print(f"8 GPUs, {trace}: prefill and decode apart, or all aggregated", [_flatten(rate) for rate in own])
        print("  " + json.dumps(judge(own, GOOD)), flush=True)
        result[trace] = {"requests_per_second_within_targets": judge(own, GOOD), "rates": [rate.row() for rate in own]}
        scenario = load_scenarios(*files)[trace]
        targets = name_targets(TTFT.limit(scenario.prompts.tokens), TPOT.seconds, GOOD)
        drawn.append((f"{trace}: {scenario.profile.name}, 8 GPUs", own, targets))
    if options.plot:
        draw_studies(drawn, options.plot)
    return result


def _flatten(rate: Rate) -> Row:
    row: Row = {"policy": f"{rate.requests_per_second:.2f} requests/s"}
    for kind, trial in zip(("apart", "convertible", "both"), rate.trials, strict=True):
        fleet, seen = trial.fleet, trial.seen
        row[f"{kind[:4]} fleet"] = f"{fleet.prefills}:{fleet.decodes}" if fleet.prefills else f"step {fleet.chunk}"
        row[f"{kind[:4]} good"] = round(seen.attainment, 4)
        row[f"{kind[:4]} ttft"] = round(seen.ttft_p90, 3)
        row[f"{kind[:4]} ms"] = round(1000 * seen.token_p90, 1)
    return row


def _compare_speed(share: Share, files: Files, options: argparse.Namespace) -> dict[str, object]:
    rows = share(run_speed, [(files, "recording"), (files, "1024 workers")])
    _print("the simulator itself", rows)
    return {str(row["policy"]): row for row in rows}


def _print(title: str, rows: list[Row]) -> None:
    print(f"\n{title}")
    columns = [key for key in rows[0] if key != "policy"]
    print(f"{'':40}" + "".join(f"{column[:11]:>12}" for column in columns))
    for row in rows:
        print(f"{row['policy']:40}" + "".join(f"{row.get(column, ''):>12}" for column in columns), flush=True)


if __name__ == "__main__":
    main()
