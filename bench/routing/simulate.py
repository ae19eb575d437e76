"""One replay of a workload through one policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from tandem_sim.traces import Arrival

from bench.routing.fleet import Fleet
from bench.routing.policies import Policy


@dataclass(slots=True)
class Replay:
    """What was seen, by request."""

    at: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    token_seconds: list[float] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)

    def hit_ratio(self, since: float = 0.0) -> float:
        """Share of the prompt tokens that were cached, of requests from `since` on."""
        late = np.array(self.at) >= since
        return float(np.array(self.hit)[late].sum() / max(1, np.array(self.prompt)[late].sum()))

    def computed_tokens(self) -> int:
        """Tokens of all prompts that were not cached."""
        return sum(self.prompt) - sum(self.hit)

    def ttft_at(self, percent: float) -> float:
        return float(np.percentile(self.ttft, percent))

    def token_at(self, percent: float) -> float:
        return float(np.percentile(self.token_seconds, percent))


class Load(Protocol):
    """What requests come from."""

    def pop(self) -> Arrival | None:
        """The next one by time; None: there are no more."""
        ...

    def end(self, arrival: Arrival, at: float) -> None:
        """When its answer ends."""
        ...


class Recorded:
    """Requests that come when they come, however slowly others are answered."""

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
        self._rest = iter(arrivals)

    def pop(self) -> Arrival | None:
        return next(self._rest, None)

    def end(self, arrival: Arrival, at: float) -> None:
        pass


def replay(
    load: Load, fleet: Fleet, policy: Policy, *, lose_at: float | None = None, lose: set[int] | None = None
) -> Replay:
    """Give every request to a worker. At `lose_at` the workers `lose` disappear with their caches."""
    seen = Replay()
    while (arrival := load.pop()) is not None:
        if lose and lose_at is not None and arrival.at >= lose_at:
            for worker in lose:
                fleet.lose(worker)
            policy.lose(lose)
            lose = None
        worker = policy.choose(arrival)
        result = fleet.serve(worker, arrival)
        policy.served(arrival, worker, result)
        load.end(arrival, result.end)
        seen.at.append(arrival.at)
        seen.ttft.append(result.first_token - arrival.at)
        seen.token_seconds.append(result.token_seconds)
        seen.prompt.append(arrival.prompt)
        seen.hit.append(result.hit_tokens)
    return seen
