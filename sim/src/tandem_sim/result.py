"""What a replay showed: attainment, latencies, cost and how steady the replicas were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target

from tandem_sim.fleet import RolePool
from tandem_sim.workers import Flight


class Targets(Protocol):
    """The targets of a setting."""

    @property
    def ttft(self) -> Target: ...

    @property
    def tpot(self) -> Target: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of a replay, by request, in the order of arrival, and by role."""

    at: NDArray[np.float64]
    """Seconds of arrival."""
    ttft: NDArray[np.float64]
    """Infinite for those that the gateway turned away."""
    token_seconds: NDArray[np.float64]
    """Mean per output token after the first."""
    attained: NDArray[np.bool_]
    """Both targets."""
    prompt: NDArray[np.int64]
    hit: NDArray[np.int64]
    gpu_hours: float
    """From the first arrival to the last, start-up and drain included."""
    orders: Mapping[Role, Sequence[tuple[float, int]]]
    """When the wanted replicas changed, and to what."""

    @staticmethod
    def build(done: list[Flight], pools: Mapping[Role, RolePool], targets: Targets, until: float) -> Replay:
        done.sort(key=lambda flight: flight.index)
        at = np.array([flight.arrived for flight in done])
        ttft = np.array([flight.first - flight.arrived for flight in done])
        seconds = np.array([flight.end - flight.first if flight.first <= flight.end else 0.0 for flight in done])
        steps = np.array([flight.output - 1 for flight in done])
        token = np.where(steps > 0, seconds / np.maximum(1, steps), 0.0)
        prompt = np.array([flight.prompt for flight in done], dtype=np.int64)
        limits = targets.ttft.seconds + targets.ttft.seconds_per_token * prompt
        return Replay(
            at=at,
            ttft=ttft,
            token_seconds=token,
            attained=(ttft <= limits) & (token <= targets.tpot.seconds),
            prompt=prompt,
            hit=np.array([flight.hit for flight in done], dtype=np.int64),
            gpu_hours=sum(pool.gpu_seconds(until) for pool in pools.values()) / 3600,
            orders={role: tuple(pool.orders) for role, pool in pools.items()},
        )

    @property
    def attainment(self) -> float:
        """Share of requests within both targets."""
        return float(self.attained.mean()) if len(self.attained) else 1.0

    @property
    def hit_ratio(self) -> float:
        return self.hit_ratio_from(0.0)

    def hit_ratio_from(self, since: float) -> float:
        """Share of the prompt tokens that were cached, of requests from then on."""
        late = self.at >= since
        return float(self.hit[late].sum() / max(1, self.prompt[late].sum()))

    def late(self, begin: float, end: float) -> int:
        """Requests that came in this time and missed a target."""
        return int((~self.attained[(self.at >= begin) & (self.at < end)]).sum())

    def reversals(self, windows: Sequence[tuple[float, float]]) -> int:
        """How often the replicas turned round in the worst role and window. In a window the load is the same."""
        return max(
            (count_reversals(orders, begin, end) for orders in self.orders.values() for begin, end in windows),
            default=0,
        )


def count_reversals(orders: Sequence[tuple[float, int]], begin: float, end: float) -> int:
    """Changes of direction between changes made in this time."""
    signs = [1 if count > before else -1 for (_, before), (at, count) in pairwise(orders) if begin <= at < end]
    return sum(one != other for one, other in pairwise(signs))
