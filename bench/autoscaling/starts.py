"""Starts from seconds to minutes, while the gateway turns away who waits too long: who attains more for less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tandem_operator.autoscale.plan.contract import Tuning
from tandem_sim.result import Replay
from tandem_sim.shapes import Shape, build_bursts, build_ramp, build_spike, build_step
from tandem_sim.workload import Intensity

from bench.autoscaling.runs import BASELINES, Case, Row, build_planner, run
from bench.autoscaling.scenario import load_scenarios

Files = tuple[Path | None, Path | None]
QUEUE_SECONDS = 30.0
"""What `gateway.queue.ttl` is where nothing is said."""
LOAD = 1.0
"""Of the trace's own pace."""
STARTS = (15.0, 45.0, 180.0, 300.0, 600.0)
SHAPES: Mapping[str, Shape] = {
    "ramp": build_ramp(),
    "spike": build_spike(),
    "step": build_step(),
    "bursts": build_bursts(),
}
VARIANTS: Mapping[str, Tuning] = {
    "planner": Tuning(),
    "no variance": Tuning(deviations=0.0),
    "no trend": Tuning(trend=False),
    "no jump detection": Tuning(jump=False),
    "no backlog term": Tuning(backlog=False),
    "bursts taken for demand": Tuning(bursts=False),
    "no joint sizing": Tuning(joint=False),
}


def run_start(files: Files, trace: str, shape: str, start_up: float, policy: str) -> Row:
    """One policy on one shape, with starts of so many seconds."""
    case = Case(scenario=load_scenarios(*files)[trace], shape=SHAPES[shape], load=LOAD, start_up=start_up)
    tuning = VARIANTS.get(policy)
    build = (
        BASELINES[policy]
        if tuning is None
        else lambda scenario, _: build_planner(scenario, tuning, queue_seconds=QUEUE_SECONDS)
    )
    row, seen = run(case, build, queue_seconds=QUEUE_SECONDS)
    return {"policy": policy, "of_peak": round(_peak(seen) / _carries(case), 2), **row}


def _peak(seen: Replay) -> int:
    """The most replicas that were ordered at a time, of both roles together."""
    now: dict[object, int] = {}
    most = 0
    for _, role, count in sorted((at, role, count) for role, orders in seen.orders.items() for at, count in orders):
        now[role] = count
        most = max(most, sum(now.values()))
    return most


def _carries(case: Case) -> int:
    """The most that the true intensity takes at any time."""
    intensity = Intensity(case.scenario, case.arrivals())
    return max(sum(intensity.needed(at).values()) for at in np.arange(0.0, case.shape.seconds, 15.0))


def find_dominators(rows: Sequence[Row]) -> list[str]:
    """Who attains more than the first one for fewer GPU-hours."""
    own, *others = rows
    return [
        str(row["policy"])
        for row in others
        if float(row["attainment"]) > float(own["attainment"]) and float(row["gpu_hours"]) < float(own["gpu_hours"])
    ]
