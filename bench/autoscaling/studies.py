"""The other studies: the ceiling of a spike, what each term is worth, overload, one role or two, and the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from time import process_time
from typing import Any

import numpy as np
from tandem_operator.autoscale.plan.contract import Target, Tuning
from tandem_sim.comparison import Rate, compare
from tandem_sim.replay import Simulation
from tandem_sim.shapes import Shape, build_constant, build_ramp, build_spike
from tandem_sim.workload import D, P

from bench.autoscaling.baselines import Ceiling
from bench.autoscaling.runs import Case, Row, build_planner, measure, run
from bench.autoscaling.scenario import TTFT, load_scenarios

Files = tuple[Path | None, Path | None]
GPUS = 8
SPLIT_SECONDS = 300.0
SPLITS = {
    "conversation": (1.0, 1.25, 1.5, 1.75, 2.0, 2.5),
    "azure": (1.0, 1.5, 2.0, 3.0, 3.5, 4.0, 5.0),
}
"""Loads at which prefill and decode apart are compared with workers that do both."""

ABLATIONS: dict[str, tuple[Tuning, dict[str, Any]]] = {
    "all terms": (Tuning(), {}),
    "no variance": (Tuning(deviations=0.0), {}),
    "no trend": (Tuning(trend=False), {}),
    "no jump detection": (Tuning(jump=False), {}),
    "no backlog term": (Tuning(backlog=False), {}),
    "no joint sizing": (Tuning(joint=False), {}),
    "order of arrival": (Tuning(), {"deadlines": False}),
    "order of arrival, nothing held": (Tuning(), {"deadlines": False, "hold_seconds": None}),
    "convertible decoders": (Tuning(), {"local_tokens": 4096}),
}


def run_ceiling(case: Case) -> Row:
    """The planner's own fleet at the onset, and 5 s later as many replicas as can be of use."""
    onset = case.shape.points[1][0]
    _, own = run(case, lambda scenario, _: build_planner(scenario))
    standing = {
        role: next(count for at, count in reversed(orders) if at <= onset) for role, orders in own.orders.items()
    }
    row, _ = run(case, lambda *_: Ceiling(onset, {role: 10 * count for role, count in standing.items()}), standing)
    return row


def run_ablation(files: Files, name: str) -> Row:
    tuning, changes = ABLATIONS[name]
    scenario = load_scenarios(*files)["conversation"]
    result: Row = {"policy": name}
    for kind, shape in (("ramp", build_ramp()), ("spike", build_spike())):
        case = Case(scenario=scenario, shape=shape, load=2.0)
        row, _ = run(case, lambda one, _: build_planner(one, tuning), **changes)
        result |= {f"{kind} {key}": row[key] for key in ("attainment", "gpu_hours", "reversals", "late")}
    return result


def run_overload(files: Files, trace: str) -> Row:
    """Arrivals three times what the standing fleet can do, and a target of 3 s: how long first tokens are late."""
    onset, start_up = 300.0, 45.0
    target = Target(percentile=0.95, seconds=3.0, seconds_per_token=TTFT.seconds_per_token)
    shape = Shape(points=((0.0, 1.0), (onset, 1.0), (onset + 1, 3.0), (onset + 600, 3.0)))
    case = Case(scenario=load_scenarios(*files)[trace], shape=shape, load=2.0, start_up=start_up, ttft=target)
    row, seen = run(case, lambda scenario, _: build_planner(scenario))
    limit = target.seconds + target.seconds_per_token * seen.prompt
    clear = float("nan")
    for begin in np.arange(onset, onset + 560, 5.0):
        window = (seen.at >= begin) & (seen.at < begin + 30)
        if (seen.ttft[window] <= limit[window]).mean() >= target.percentile:
            clear = begin - onset
            break
    return {
        "policy": trace,
        "cleared_after": clear,
        "goal": start_up + 60,
        "attainment": row["attainment"],
        "gpu_hours": row["gpu_hours"],
    }


def run_split(files: Files, trace: str, load: float) -> Rate:
    """Some minutes of steady load on 8 GPUs: the best ratio of prefill to decode, and the best step of workers that do
    both.
    """
    (rate,) = compare(load_scenarios(*files)[trace], GPUS, seconds=SPLIT_SECONDS, loads=[load])
    return rate


def run_speed(files: Files, kind: str) -> Row:
    """The recording as it is on a fleet that holds it, or a large fleet at a load to match."""
    scenario = load_scenarios(*files)["conversation"]
    many = kind != "recording"
    case = Case(scenario=scenario, shape=build_constant(120.0), load=100.0 if many else 1.0)
    arrivals = case.arrivals() if many else list(scenario.recording)
    replicas = {P: 700, D: 324} if many else {P: 4, D: 2}
    setting = replace(case.setting(arrivals, replicas), replicas=replicas)
    began = process_time()
    seen = Simulation(arrivals, setting).run()
    seconds = process_time() - began
    row = measure(seen, case.shape, seconds)
    return {
        "policy": kind,
        "requests": row["requests"],
        "tokens": int(seen.prompt.sum()),
        "cpu_seconds": row["cpu_seconds"],
        "peak_mb": getrusage(RUSAGE_SELF).ru_maxrss // 1024,
        "attainment": row["attainment"],
    }
