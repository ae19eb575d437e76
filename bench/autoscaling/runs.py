"""Single replays of the benchmark, each with a row of figures. Every one stands alone, so that processes share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import process_time
from typing import Any

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.adapter import Autoscaler
from tandem_operator.autoscale.plan.contract import Target, Tuning
from tandem_sim.fleet import StartUp
from tandem_sim.replay import Policy, Simulation
from tandem_sim.result import Replay
from tandem_sim.setting import Setting
from tandem_sim.shapes import Shape, play
from tandem_sim.traces import Arrival
from tandem_sim.workload import D, Intensity, P, Workload

from bench.autoscaling.baselines import SlaPlanner, Static, TokenVelocity, Told, Velocity, build_hpa, build_keda
from bench.autoscaling.scenario import TPOT, TTFT

Row = dict[str, float | str]
Build = Callable[[Workload, Sequence[Arrival]], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One load on one trace."""

    scenario: Workload
    shape: Shape
    load: float
    start_up: float = 45.0
    ttft: Target = TTFT
    chunk: int = 0
    """Tokens of a step of replicas that do both; 0: prefill and decode are apart."""

    def arrivals(self) -> list[Arrival]:
        return play(self.scenario.recording, self.shape, self.load)

    def setting(self, arrivals: Sequence[Arrival], replicas: Mapping[Role, int] | None = None) -> Setting:
        """By default with the replicas that the first minute needs."""
        first = Intensity(self.scenario, arrivals, window=120.0, chunk=self.chunk).needed(0.0)
        profile = self.scenario.profile
        return Setting(
            prefill=None if self.chunk else profile,
            decode=replace(profile, chunk_tokens=self.chunk) if self.chunk else profile,
            replicas=replicas or first,
            start_up=StartUp(seconds=self.start_up), ttft=self.ttft, tpot=TPOT,
        )  # fmt: skip


BASELINES: dict[str, Build] = {
    **{
        f"HPA on utilization {target:g}": lambda scenario, _, target=target: build_hpa(Velocity.of(scenario), target)
        for target in (0.5, 0.65, 0.8)
    },
    **{
        f"KEDA on queue {queue:g}": lambda scenario, _, queue=queue, share=share: build_keda(
            Velocity.of(scenario), queue, share
        )
        for queue, share in ((0.75, 0.5), (1.5, 0.7), (3.0, 0.9))
    },
    **{
        f"token velocity x{headroom:g}": lambda scenario, _, headroom=headroom: TokenVelocity(
            Velocity.of(scenario), headroom=headroom
        )
        for headroom in (1.0, 1.25)
    },
    **{
        f"SLA planner {interval:g} s": lambda scenario, _, interval=interval: SlaPlanner(
            Velocity.of(scenario), interval=interval, utilization=0.8
        )
        for interval in (60.0, 180.0)
    },
}
REFERENCES: dict[str, Build] = {
    "told": lambda scenario, arrivals: Told(Intensity(scenario, arrivals).needed),
    "told, kept 300 s": lambda scenario, arrivals: Told(Intensity(scenario, arrivals).needed, patience=300.0),
}


def build_planner(
    scenario: Workload, tuning: Tuning | None = None, *, shared: bool = False, queue_seconds: float = float("inf")
) -> Autoscaler:
    return Autoscaler(scenario.spec(tuning, shared=shared, queue_seconds=queue_seconds))


def run(
    case: Case, policy: Build | None, replicas: Mapping[Role, int] | None = None, **changes: Any
) -> tuple[Row, Replay]:
    """One replay. None: the replicas that there are."""
    arrivals = case.arrivals()
    setting = replace(case.setting(arrivals, replicas), **changes)
    chosen = Static() if policy is None else policy(case.scenario, arrivals)
    began = process_time()
    seen = Simulation(arrivals, setting, chosen).run()
    return measure(seen, case.shape, process_time() - began), seen


def measure(seen: Replay, shape: Shape, seconds: float) -> Row:
    answered = np.isfinite(seen.ttft)
    late_first = seen.ttft > TTFT.seconds + TTFT.seconds_per_token * seen.prompt
    return {
        "attainment": round(seen.attainment, 4),
        "gpu_hours": round(seen.gpu_hours, 2),
        "reversals": seen.reversals(shape.steady),
        "late_first_tokens": round(float(late_first.mean()), 4),
        "slow_answers": round(float((seen.token_seconds > TPOT.seconds).mean()), 4),
        "late": int((~seen.attained).sum()),
        "requests": len(seen.at),
        "turned_away": int((~answered).sum()),
        "ttft_p90": round(float(np.percentile(seen.ttft[answered], 90)), 3),
        "token_ms_p90": round(1000 * float(np.percentile(seen.token_seconds[answered], 90)), 2),
        "cpu_seconds": round(seconds, 2),
    }


def find_static_shared(case: Case, attainment: float) -> tuple[str, Row]:
    """The fewest replicas that do both and attain so much."""
    arrivals, rows = case.arrivals(), dict[int, Row]()
    start = Intensity(case.scenario, arrivals, chunk=case.chunk).needed(case.shape.seconds / 2)[D]

    def attains(count: int) -> bool:
        if count not in rows:
            rows[count] = run(case, None, {D: count})[0]
        return float(rows[count]["attainment"]) >= attainment

    while not attains(start):
        start += max(1, start // 8)
    while start > 1 and attains(start - 1):
        start -= 1
    return f"static {start}", rows[start]


def find_static(case: Case, attainment: float) -> tuple[str, Row]:
    """The smallest fleet, in steps of a tenth of what the peak needs, that attains so much."""
    arrivals = case.arrivals()
    intensity = Intensity(case.scenario, arrivals, chunk=case.chunk)
    needs = [intensity.needed(at) for at in np.arange(0.0, case.shape.seconds, 15.0)]
    peak = {role: max(need.get(role, 1) for need in needs) for role in ((D,) if case.chunk else (P, D))}
    row: Row = {}
    replicas = peak
    for share in (0.7, 0.8, 0.9, 1.0, 1.15, 1.3, 1.5):
        replicas = {role: max(1, round(share * count)) for role, count in peak.items()}
        row, _ = run(case, None, replicas)
        if float(row["attainment"]) >= attainment:
            break
    return f"static {'+'.join(str(count) for count in replicas.values())}", row
