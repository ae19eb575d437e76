"""Demand, from the counters of the last minutes, and what of it replicas ordered now could serve. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from tandem_operator.autoscale.plan.bursts import Passing, find_bursts, find_passing
from tandem_operator.autoscale.plan.contract import Counters, RoleState, ScalingSpec
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.rates import LONG_SECONDS, Rate, estimate_rate
from tandem_operator.autoscale.plan.sizing import Answers, Prompts

FEWEST_REQUESTS = 20
"""Below which the last minutes tell nothing about requests."""
_LOOK_SECONDS = 5.0
"""Until the next decision."""

Points = Sequence[tuple[float, Counters]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What arrives, and what it is like."""

    requests: Rate
    tokens: Rate
    """Uncached prompt tokens."""
    prompts: Prompts
    answers: Answers
    passing: Passing | None = None
    """Bursts that are left out of the rates."""

    @property
    def bursting(self) -> bool:
        """Such a burst is under way: what waits and runs now is mostly of it."""
        return self.passing is not None and self.passing.present


def read_load(spec: ScalingSpec, history: History) -> Load | None:
    """Rates and lengths. None where too little has come."""
    snapshots = history.lately()
    if len(snapshots) < 2:
        return None
    role = spec.prompt_role
    start = learn_start(snapshots[-1].roles[role], spec, history.waited(role))
    points = [(one.at, one.counters) for one in snapshots if one.counters is not None]
    passing = _find_passing(history, start) if spec.tuning.bursts else None
    lead = start + _LOOK_SECONDS
    if passing is not None:
        load = _read(spec, _cut(points, passing), lead, jump=False)
        if load is not None:
            return replace(load, passing=passing)  # one that is just beginning is no jump
    return _read(spec, points, lead)


def learn_start(state: RoleState, spec: ScalingSpec, waited: float = 0.0) -> float:
    """Seconds that a replica ordered now will take: the mean of those seen last. Where none was seen, at least as many
    as the ones on their way have waited for."""
    if state.starts:
        return sum(state.starts) / len(state.starts)
    return max(spec.behavior.start_seconds, waited)


def _find_passing(history: History, start: float) -> Passing | None:
    counted = [(one.at, float(one.counters.requests)) for one in history.snapshots if one.counters is not None]
    bursts, end = find_bursts(counted)
    return find_passing(bursts, start, end)


def _cut(points: Points, passing: Passing) -> Points:
    """As if there had been neither those bursts nor the time that they lasted."""
    kept: list[tuple[float, Counters]] = []
    away, seconds = dict.fromkeys((f.name for f in fields(Counters)), 0), 0.0
    before: tuple[float, Counters] | None = None
    for at, counters in points:
        if at > passing.counted:
            break
        if before is not None and any(one.begin < at <= one.end for one in passing.cut):
            seconds += at - before[0]
            for name in away:
                away[name] += getattr(counters, name) - getattr(before[1], name)
        else:
            left = Counters(**{name: getattr(counters, name) - gone for name, gone in away.items()})
            kept.append((at - seconds, left))
        before = at, counters
    return kept


def _read(spec: ScalingSpec, points: Points, lead: float, *, jump: bool = True) -> Load | None:
    if len(points) < 2:
        return None
    end, new = points[-1]
    begin, old = next((one for one in reversed(points) if end - one[0] >= 2 * LONG_SECONDS), points[0])
    requests, prompts = new.requests - old.requests, new.prompt_tokens - old.prompt_tokens
    finished, computed = new.finished - old.finished, new.computed_prompt_tokens - old.computed_prompt_tokens
    if requests < FEWEST_REQUESTS or finished < FEWEST_REQUESTS or not computed or not prompts:
        return None
    share = (new.computed_tokens - old.computed_tokens) / computed
    mean = prompts / requests
    squares = (new.prompt_squares - old.prompt_squares) / requests
    output = (new.output_tokens - old.output_tokens) / finished
    passed, tuning = end - begin, replace(spec.tuning, jump=spec.tuning.jump and jump)
    rate = estimate_rate([(at, float(c.requests)) for at, c in points], requests / passed, lead, tuning)
    tokens = estimate_rate(
        [(at, float(c.prompt_tokens)) for at, c in points],
        squares * requests / passed,
        lead,
        replace(spec.tuning, jump=False),
    )
    if rate is None or tokens is None:
        return None
    if rate.jumped:  # told by the number of requests: a few long prompts at once are no jump
        deviation = tokens.deviation * rate.now / max(1e-9, requests / passed)
        tokens = Rate(now=rate.now * mean, ahead=rate.ahead * mean, deviation=deviation, jumped=True)
    return Load(
        requests=rate,
        tokens=Rate(
            now=tokens.now * share,
            ahead=tokens.ahead * share,
            deviation=tokens.deviation * share,
            jumped=tokens.jumped,
            falls=tokens.falls,
        ),
        prompts=Prompts(tokens=mean, uncached=mean * share, squares=squares * share * share),
        answers=Answers(
            context=mean + output / 2, output=output, variation=max(0.0, squares / mean**2 - 1)
        ),
    )  # fmt: skip
