"""Which fleet meets the targets: replays of a load on fixed fleets, and the search for the smallest one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from tandem_api.names import Role
from tandem_operator.autoscale.plan.adapter import Autoscaler

from tandem_sim.fleet import StartUp
from tandem_sim.replay import Simulation
from tandem_sim.result import Replay
from tandem_sim.setting import Setting
from tandem_sim.traces import Arrival
from tandem_sim.workload import Intensity, Workload

P, D = Role.PREFILL, Role.DECODE
CHUNKS = (256, 512, 2048, 8192)
"""Tokens of a step that are tried for workers that do both."""
CONVERTIBLE = (4096, 512)
"""Convertible decode workers compute prompts of at most so many tokens while prefill is behind, in steps of so many."""


class CapacityError(ValueError):
    """No fleet within the bounds meets the targets."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of a fixed number."""

    prefills: int
    """0: all replicas do both."""
    decodes: int
    chunk: int = 0
    """Tokens of a step, where decode replicas compute prompts."""
    local: int = 0
    """Prompts of at most so many tokens are computed by decode replicas while prefill replicas are behind."""

    @property
    def replicas(self) -> int:
        return self.prefills + self.decodes

    def __str__(self) -> str:
        if self.prefills:
            return f"{self.prefills} prefill + {self.decodes} {'convertible' if self.local else 'decode'}"
        return f"{self.decodes} aggregated, {self.chunk} tokens a step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of one replay: seconds, and the share of requests within both targets."""

    requests: int
    attainment: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    token_p50: float
    token_p90: float
    token_p99: float
    gpu_hours: float
    output_tokens: int
    hit_ratio: float

    def row(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A fleet and what it did."""

    fleet: Fleet
    seen: Figures


def measure(replay: Replay, arrivals: Sequence[Arrival]) -> Figures:
    first = [float(np.percentile(replay.ttft, share)) for share in (50, 90, 99)]
    token = [float(np.percentile(replay.token_seconds, share)) for share in (50, 90, 99)]
    return Figures(
        requests=len(replay.at), attainment=replay.attainment, gpu_hours=replay.gpu_hours,
        ttft_p50=first[0], ttft_p90=first[1], ttft_p99=first[2],
        token_p50=token[0], token_p90=token[1], token_p99=token[2],
        output_tokens=sum(arrival.output for arrival in arrivals), hit_ratio=replay.hit_ratio,
    )  # fmt: skip


class Trials:
    """Replays of one load on fixed fleets; each fleet once."""

    def __init__(
        self, workload: Workload, arrivals: Sequence[Arrival], *, tell: Callable[[str, float], None] | None = None
    ) -> None:
        """`tell` hears which replay is under way, and which share of it is done."""
        self.workload = workload
        self.arrivals = arrivals
        self._tell = tell
        self._known: dict[Fleet, Figures] = {}

    def run(self, fleet: Fleet) -> Trial:
        if fleet not in self._known:
            self._known[fleet] = measure(self._replay(self.build_setting(fleet), None, str(fleet)), self.arrivals)
        return Trial(fleet=fleet, seen=self._known[fleet])

    def run_planner(self, start_up: float, chunk: int = 0) -> tuple[Figures, Replay]:
        """With replicas by the operator's planner, from what the first minutes need. `chunk`: tokens of a step, of
        replicas that do both."""
        first = Intensity(self.workload, self.arrivals, window=120.0, chunk=chunk).needed(0.0)
        setting = self.build_setting(Fleet(0 if chunk else first.get(P, 1), first.get(D, 1), chunk))
        setting = replace(setting, start_up=StartUp(seconds=start_up))
        replay = self._replay(setting, Autoscaler(self.workload.spec(shared=chunk > 0)), "the planner")
        return measure(replay, self.arrivals), replay

    def build_setting(self, fleet: Fleet) -> Setting:
        profile = self.workload.profile
        decode = replace(profile, chunk_tokens=fleet.chunk) if fleet.chunk else profile
        return Setting(
            prefill=profile if fleet.prefills else None,
            decode=decode,
            replicas={P: fleet.prefills, D: fleet.decodes},
            ttft=self.workload.ttft,
            tpot=self.workload.tpot,
            local_tokens=fleet.local,
        )

    def rank(self, trial: Trial) -> tuple[float, float]:
        """The more, the better: attainment, and among equals low latencies by their targets."""
        mean = self.workload.prompts.tokens
        first = trial.seen.ttft_p90 / self.workload.ttft.limit(mean)
        return round(trial.seen.attainment, 3), -(first + trial.seen.token_p90 / self.workload.tpot.seconds)

    def _replay(self, setting: Setting, policy: Autoscaler | None, name: str) -> Replay:
        tell = self._tell
        hear = None if tell is None else partial(tell, name)
        return Simulation(self.arrivals, setting, policy, tell=hear).run()


def find_split(trials: Trials, replicas: int, near: float = 0.5, *, convertible: bool = False) -> Trial:
    """The best number of prefill replicas among so many: uphill from the share `near`, first in strides."""

    def run(prefills: int) -> Trial:
        kept = min(max(1, prefills), replicas - 1)
        local, chunk = CONVERTIBLE if convertible else (0, 0)
        return trials.run(Fleet(kept, replicas - kept, chunk, local))

    top = replicas - 1
    found = run(round(near * replicas))
    stride = max(1, replicas // 8)
    while True:
        here = found.fleet.prefills
        beside = [run(here + step) for step in (-stride, stride) if 1 <= here + step <= top]
        best = max([found, *beside], key=trials.rank)
        if best.fleet == found.fleet:
            if stride == 1:
                return found
            stride = max(1, stride // 2)
        found = best


def find_chunk(trials: Trials, replicas: int) -> Trial:
    """The best size of a step for workers that do both."""
    return max((trials.run(Fleet(0, replicas, chunk)) for chunk in CHUNKS), key=trials.rank)


def find_smallest(best: Callable[[int], Trial], goal: float, *, least: int, start: int, most: int) -> tuple[int, Trial]:
    """The fewest replicas with which the best fleet attains the goal, between `least` and `most`.

    More replicas are taken to be no worse. Raises CapacityError where `most` do not suffice.
    """
    low, count = least - 1, min(max(least, start), most)
    while (trial := best(count)).seen.attainment < goal:
        if count == most:
            raise CapacityError(
                f"{most} replicas attain {trial.seen.attainment:.1%} of requests ({trial.fleet}), and {goal:.1%} are "
                "wanted: allow more with --most, take looser targets, or a faster GPU"
            )
        low, count = count, min(most, count + max(1, count // 4))
    high, stride = count, max(1, count // 8)
    while low < least < high:  # nothing is known to be too few
        count = max(least, high - stride)
        if best(count).seen.attainment >= goal:
            high, stride = count, 2 * stride
        else:
            low = count
    while high - low > 1:
        count = (low + high) // 2
        if best(count).seen.attainment >= goal:
            high = count
        else:
            low = count
    return high, best(high)
