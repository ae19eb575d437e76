"""What the planner is compared with. Every class has `period` and `decide(now, snapshot)`, as the planner's has.

None is a strawman on purpose: where a baseline takes a profile of the worker or a target per replica, it gets the true
profile of the simulated worker, and the benchmark tries several settings of each and takes its best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Counters, RoleState, Snapshot
from tandem_sim.workload import Workload

P, D = Role.PREFILL, Role.DECODE


class Static:
    """The replicas that there are."""

    period = 60.0

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Velocity:
    """What one replica of each role can do, from its profile."""

    prefill: float
    """Uncached prompt tokens per second."""
    decode: float
    """Output tokens per second within the target for a token."""
    sequences: float
    """Sequences of a decode replica within that target."""
    kv_share: float
    """Share of its memory that they take."""

    @staticmethod
    def of(workload: Workload) -> Velocity:
        room, context = workload.room, workload.answers.context
        return Velocity(
            prefill=workload.speed,
            decode=room.tokens_per_second(context),
            sequences=room.context / context,
            kv_share=room.context / workload.profile.kv_tokens,
        )


class Window:
    """The largest recommendation of the last seconds: how the HPA stabilizes scaling down."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._entries: list[tuple[float, int]] = []

    def apply(self, now: float, wanted: int) -> int:
        self._entries = [entry for entry in self._entries if entry[0] > now - self._seconds]
        self._entries.append((now, wanted))
        return max(count for _, count in self._entries)


class HorizontalPodAutoscaler:
    """Kubernetes' HPA: replicas x metric / target, 10% tolerance, every 15 s, up by 100% or 4 pods per period, down
    after a stabilization window of 300 s (the defaults of autoscaling/v2).
    """

    period = 15.0

    def __init__(self, read: Mapping[Role, Callable[[RoleState], float]]) -> None:
        """`read` gives the metric of a role as a multiple of its target, per replica."""
        self._read = read
        self._windows = {role: Window(300.0) for role in read}

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        result: dict[Role, int] = {}
        for role, read in self._read.items():
            state = snapshot.roles[role]
            if not state.ready:
                continue
            ratio = read(state)
            wanted = state.replicas if abs(ratio - 1) <= 0.1 else ceil(state.ready * ratio)
            wanted = min(wanted, max(2 * state.replicas, state.replicas + 4))
            result[role] = max(1, self._windows[role].apply(now, wanted))
        return result


def build_hpa(velocity: Velocity, target: float) -> HorizontalPodAutoscaler:
    """On utilization: of prefill replicas the share of time in which they compute, of decode replicas their blocks."""
    return HorizontalPodAutoscaler({
        P: lambda state: (state.busy or 0.0) / target,
        D: lambda state: state.kv_tokens_used / max(1, state.kv_tokens_total) / (target * velocity.kv_share),
    })  # fmt: skip


def build_keda(velocity: Velocity, queue: float, share: float) -> HorizontalPodAutoscaler:
    """On queue length, as KEDA hands it to the HPA: requests that wait or are computed per prefill replica, sequences
    per decode replica.
    """
    return HorizontalPodAutoscaler({
        P: lambda state: state.queued_requests / queue / max(1, state.ready),
        D: lambda state: state.running_requests / (share * velocity.sequences) / max(1, state.ready),
    })  # fmt: skip


def rates(old: tuple[float, Counters], new: tuple[float, Counters]) -> tuple[float, float, float]:
    """Uncached prompt tokens, requests and output tokens per second between two looks."""
    (begin, before), (end, after) = old, new
    passed = max(1e-9, end - begin)
    computed = max(1, after.computed_prompt_tokens)
    share = after.computed_tokens / computed if after.computed_prompt_tokens else 1.0
    output = after.output_tokens / after.finished if after.finished else 200.0
    requests = (after.requests - before.requests) / passed
    return (after.prompt_tokens - before.prompt_tokens) / passed * share, requests, requests * output


class TokenVelocity:
    """Demand in tokens over the last seconds against each stage's velocity, after TokenScale's token velocity: the
    tokens that a replica of a stage can take in per second.
    """

    period = 5.0

    def __init__(self, velocity: Velocity, *, headroom: float, window: float = 10.0, patience: float = 60.0) -> None:
        self._velocity = velocity
        self._headroom = headroom
        self._window = window
        self._past: list[tuple[float, Counters]] = []
        self._windows = {role: Window(patience) for role in (P, D)}

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        assert snapshot.counters is not None
        self._past.append((now, snapshot.counters))
        while len(self._past) > 2 and self._past[1][0] <= now - self._window:
            self._past.pop(0)
        if len(self._past) < 2:
            return {}
        tokens, _, output = rates(self._past[0], self._past[-1])
        wanted = {P: tokens / self._velocity.prefill, D: output / self._velocity.decode}
        return {role: max(1, self._windows[role].apply(now, ceil(self._headroom * wanted[role]))) for role in wanted}


class SlaPlanner:
    """Once per interval: the load of the last one, divided by what a replica does within the targets according to an
    interpolated profile, after Dynamo's SLA planner with its constant predictor. Its correction by observed latencies
    is left out: the profile is the truth here.
    """

    def __init__(self, velocity: Velocity, *, interval: float, utilization: float) -> None:
        """`utilization`: the share of a prefill replica's velocity at which its profile meets the target."""
        self.period = interval
        self._velocity = velocity
        self._utilization = utilization
        self._last: tuple[float, Counters] | None = None

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        assert snapshot.counters is not None
        last, self._last = self._last, (now, snapshot.counters)
        tokens, _, output = rates(last or (0.0, _NOTHING), self._last)
        return {
            P: max(1, ceil(tokens / self._velocity.prefill / self._utilization)),
            D: max(1, ceil(output / self._velocity.decode)),
        }


_NOTHING = Counters(
    requests=0, prompt_tokens=0, prompt_squares=0.0, computed_prompt_tokens=0, computed_tokens=0, finished=0,
    output_tokens=0,
)  # fmt: skip


class Told:
    """A reference: it is told the intensity of this moment and orders what that takes, at once."""

    period = 5.0

    def __init__(self, needed: Callable[[float], Mapping[Role, int]], *, patience: float = 0.0) -> None:
        """`needed` gives the replicas for the true intensity at a time; each is kept for `patience` seconds."""
        self._needed = needed
        self._windows = {role: Window(patience) for role in (P, D)}

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        return {role: self._windows[role].apply(now, count) for role, count in self._needed(now).items()}


class Ceiling:
    """A reference for spikes: a standing fleet, and as many replicas as can be of use from a few seconds after the
    onset on. No policy that reacts can be in time more often.
    """

    period = 1.0

    def __init__(self, onset: float, replicas: Mapping[Role, int], *, reaction: float = 5.0) -> None:
        self._at = onset + reaction
        self._replicas = replicas

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        return self._replicas if now >= self._at else {}
