"""What gateways count of a canary's workers and of the others, and whether that is good enough. Pure.

Gateways count from when they first saw a worker, and begin anew when they restart: what is added up are differences.
The time to the first token is known by buckets only, so a canary counts as too slow when it surely is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tandem_api.crd.rollout import Canary
from tandem_api.crd.status import CanaryFigures
from tandem_api.fleet import TTFT_BOUNDS, FleetReport, WorkerReport, percentile, percentile_bounds
from tandem_api.names import Role
from tandem_api.quantities import parse_duration

STALE_SECONDS = 45.0
"""A gateway's report older than this says nothing any more."""
Counter = tuple[str, float, str, str]
"""Gateway, when it started, worker, address: the counts of a worker that any of these parts from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What was counted so far, to take differences from."""

    since: float
    """From when on everything counts, by the clock of `take_differences`."""
    last: Mapping[Counter, CanaryFigures] = field(default_factory=dict[Counter, CanaryFigures])


def take_differences(
    tally: Tally, reports: Iterable[tuple[FleetReport, float]], *, now: float
) -> tuple[Tally, dict[str, CanaryFigures]]:
    """What has been added since the last time, by worker, and the tally to go on with. With each report comes how many
    seconds ago it was read. How old a gateway is tells it by its own clock, right or not."""
    last, added = dict(tally.last), dict[str, CanaryFigures]()
    watched = {(gateway, started) for gateway, started, _, _ in last}
    for report, age in reports:
        lived = age + report.at - report.started_at
        # Of a gateway that was there before and was not looked at, the first report is where counting begins.
        counts_whole = (report.gateway, report.started_at) in watched or lived <= now - tally.since
        for worker in report.workers:
            counter = (report.gateway, report.started_at, worker.name, worker.address)
            told, before = _figures_of(worker), last.get(counter)
            last[counter] = told
            if before is None and not counts_whole:
                continue
            more = told if before is None else _minus(told, before)
            added[worker.name] = add_figures(added.get(worker.name), more)
    return Tally(since=tally.since, last=last), added


def _figures_of(worker: WorkerReport) -> CanaryFigures:
    if worker.role is Role.PREFILL:
        return CanaryFigures(prefill_requests=worker.requests, prefill_failures=worker.failures)
    times = _known_buckets(worker.ttft_counts)
    return CanaryFigures(requests=worker.requests, failures=worker.failures, ttft_counts=times)


def _known_buckets(counts: list[int]) -> list[int]:
    """Nothing where they are not this release's: a gateway of another image may count in others."""
    return counts if len(counts) == len(TTFT_BOUNDS) + 1 else []


def _minus(now: CanaryFigures, before: CanaryFigures) -> CanaryFigures:
    """What was added. Counts that have fallen began anew."""
    if now.requests < before.requests or now.prefill_requests < before.prefill_requests:
        return now
    buckets = before.ttft_counts or [0] * len(now.ttft_counts)
    return CanaryFigures(
        requests=now.requests - before.requests,
        failures=max(0, now.failures - before.failures),
        prefill_requests=now.prefill_requests - before.prefill_requests,
        prefill_failures=max(0, now.prefill_failures - before.prefill_failures),
        ttft_counts=[max(0, new - old) for new, old in zip(now.ttft_counts, buckets, strict=False)],
    )


def add_figures(one: CanaryFigures | None, other: CanaryFigures) -> CanaryFigures:
    if one is None:
        return other
    longest = max(len(one.ttft_counts), len(other.ttft_counts))
    padded = [counts + [0] * (longest - len(counts)) for counts in (one.ttft_counts, other.ttft_counts)]
    return CanaryFigures(
        requests=one.requests + other.requests,
        failures=one.failures + other.failures,
        prefill_requests=one.prefill_requests + other.prefill_requests,
        prefill_failures=one.prefill_failures + other.prefill_failures,
        ttft_counts=[a + b for a, b in zip(*padded, strict=True)],
    )


class Judgement(Enum):
    GOOD = "good"
    """Nothing speaks against the next step."""
    UNKNOWN = "unknown"
    """Too little is known: the step goes on."""
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the figures say, and why in a sentence."""

    judgement: Judgement
    reason: str = ""
    text: str = ""


def judge(canary: Canary | None, mine: CanaryFigures | None, others: CanaryFigures | None, *, fresh: bool) -> Verdict:
    """Whether the workers of a canary do as well as they must."""
    if canary is None or (canary.max_error_rate is None and canary.max_ttft is None):
        return Verdict(judgement=Judgement.GOOD)
    mine, others = mine or CanaryFigures(), others or CanaryFigures()
    found = _judge_errors(canary, mine) or _judge_ttft(canary, mine, others)
    if found is not None and found.judgement is Judgement.BAD:
        return found
    if not fresh:
        text = f"no gateway has reported figures for {STALE_SECONDS:g} s, so maxErrorRate and maxTTFT cannot be judged"
        return Verdict(judgement=Judgement.UNKNOWN, reason="NoFigures", text=text)
    if mine.requests < canary.min_requests:
        text = f"{mine.requests} of {canary.min_requests} requests (minRequests) have been answered"
        return Verdict(judgement=Judgement.UNKNOWN, reason="TooFewRequests", text=text)
    return found or Verdict(judgement=Judgement.GOOD)


def _judge_errors(canary: Canary, mine: CanaryFigures) -> Verdict | None:
    """Bad as soon as the rate would be exceeded though all of the requests that are still needed succeeded."""
    if (limit := canary.max_error_rate) is None:
        return None
    for what, total, failed in (
        ("requests", mine.requests, mine.failures),
        ("remote prefills", mine.prefill_requests, mine.prefill_failures),
    ):
        if failed * 100 > limit * max(total, canary.min_requests):
            text = f"{failed} of {total} {what} failed, and maxErrorRate is {limit:g} %"
            return Verdict(judgement=Judgement.BAD, reason="ErrorRateExceeded", text=text)
    return None


def _judge_ttft(canary: Canary, mine: CanaryFigures, others: CanaryFigures) -> Verdict | None:
    limit = canary.max_ttft
    times, usual_times = _known_buckets(mine.ttft_counts), _known_buckets(others.ttft_counts)
    if limit is None or sum(times) < canary.min_requests:
        return None
    share = limit.percentile / 100
    at_least = percentile_bounds(times, share)[0]
    name = f"the {limit.percentile}th percentile of the time to the first token"
    if limit.duration is not None:
        if at_least < parse_duration(limit.duration):
            return None
        text = f"{name} is above {at_least:g} s, and maxTTFT is {limit.duration}"
        return Verdict(judgement=Judgement.BAD, reason="TTFTExceeded", text=text)
    assert limit.factor is not None
    if (count := sum(usual_times)) < canary.min_requests:
        text = f"the other workers have answered {count} of the {canary.min_requests} requests to compare with"
        return Verdict(judgement=Judgement.UNKNOWN, reason="TooFewRequests", text=text)
    usual = percentile(usual_times, share)
    if at_least < limit.factor * usual:
        return None
    text = f"{name} is above {at_least:g} s, more than {limit.factor:g} times (maxTTFT) the others' {usual:.2g} s"
    return Verdict(judgement=Judgement.BAD, reason="TTFTExceeded", text=text)
