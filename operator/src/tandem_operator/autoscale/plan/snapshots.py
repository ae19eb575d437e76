"""From gateways' reports and counts of pods to the planner's snapshot. Pure.

Counters of gateways are added up by differences: one that restarts, or goes, does not make a total go back. A sample of
a worker counts while it is fresh, the freshest of all gateways; what nobody has measured stays unknown. Replicas of a
role are about equally fast: one that says otherwise, because it is broken or wrong, does not decide for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import TypeVar

from tandem_api.fleet import TTFT_BOUNDS, FleetReport, Traffic
from tandem_api.launch import KVConfig
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry

from tandem_operator.autoscale.plan.contract import Counters, RoleState, Snapshot
from tandem_operator.autoscale.plan.gpus import read_gpus
from tandem_operator.autoscale.plan.peers import agree
from tandem_operator.autoscale.plan.shares import Shares
from tandem_operator.autoscale.plan.starts import STANDBY, Starts

STALE_SECONDS = 30.0
"""An older sample of a worker says nothing."""
LONGEST_START = 6 * 3600.0
"""Seconds: nothing starts longer."""
_BLOCK_TOKENS = KVConfig().block_size
"""What a worker has that does not say."""
_MOST_SQUARES = 1e30
_KEPT = 256
"""Gateways, and workers of each, whose last counts are kept: enough for those that come back."""
_NO_TRAFFIC = Counters(
    requests=0, prompt_tokens=0, prompt_squares=0.0, computed_prompt_tokens=0, computed_tokens=0, finished=0,
    output_tokens=0,
)  # fmt: skip
_NO_SHARES = Shares()
_NO_STARTS = Starts()

K = TypeVar("K")
V = TypeVar("V")
Started = tuple[str, float]
"""A gateway and when it started: one that restarts counts anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """A report, and how long ago it was read."""

    report: FleetReport
    age: float
    """Seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStart:
    """How a pod came up, as Kubernetes tells it."""

    before: float
    """Seconds from its creation until its container ran: to be placed, and to get the image and volumes."""
    whole: float | None = None
    """Seconds from its creation until it was Ready; None where a container ended in between, or it was ready before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCount:
    """What there is of a role, counted in replicas."""

    replicas: int
    """What the role is given."""
    present: int = 0
    """Those of which pods are there, on their way out or not."""
    leaders: frozenset[str] = frozenset()
    """Pods that lead the ready replicas."""
    starts: Mapping[str, PodStart] = field(default_factory=dict[str, "PodStart"])
    """What is known of the starts of ready replicas, by the pods that lead them."""

    @property
    def ready(self) -> int:
        return len(self.leaders)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What all gateways have counted since the beginning."""

    since: float
    """On the clock of `add_up`: counting begins with the first report of a gateway that is older."""
    counters: Counters = _NO_TRAFFIC
    ttft_counts: tuple[int, ...] = ()
    """Streams by seconds to the first token, in the buckets of the gateways' reports."""
    traffic: Mapping[Started, Counters] = field(default_factory=dict[Started, Counters])
    """What each gateway said last."""
    times: Mapping[tuple[Started, str, str], tuple[int, ...]] = field(
        default_factory=dict[tuple[Started, str, str], tuple[int, ...]]
    )
    """The same of times to the first token, by worker and its address."""
    prompts: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Prompt tokens of each worker, and what of them was cached, as it said last."""


def add_up(totals: Totals, heard: Iterable[Heard], *, now: float) -> Totals:
    """The totals with what these reports add. How old a gateway is tells it by its own clock, right or not."""
    heard = list(heard)
    prompts, more_prompts = _add_prompts(totals.prompts, heard)
    counters, ttft = _plus(totals.counters, more_prompts), totals.ttft_counts
    traffic, times = dict(totals.traffic), dict(totals.times)
    for one in heard:
        report, lived = one.report, one.age + one.report.at - one.report.started_at
        started: Started = (report.gateway, report.started_at)
        counts_whole = started in traffic or lived <= now - totals.since
        if (said := _read_traffic(report.traffic)) is not None:
            before = traffic.pop(started, None)
            traffic[started] = said
            if before is not None or counts_whole:
                counters = _plus(counters, said if before is None or _fell(said, before) else _minus(said, before))
        for worker in report.workers:
            if len(worker.ttft_counts) != len(TTFT_BOUNDS) + 1:
                continue  # a prefill worker, or a gateway of another release
            key, counts = (started, worker.name, worker.address), tuple(worker.ttft_counts)
            known = times.pop(key, None)
            times[key] = counts
            if known is None and not counts_whole:
                continue
            began_anew = known is None or sum(counts) < sum(known)
            more = (
                counts
                if began_anew or known is None
                else tuple(max(0, a - b) for a, b in zip(counts, known, strict=True))
            )
            ttft = tuple(a + b for a, b in zip_longest(ttft, more, fillvalue=0))
    return Totals(
        since=totals.since, counters=counters, ttft_counts=ttft, traffic=_newest(traffic, _KEPT),
        times=_newest(times, _KEPT * _KEPT), prompts=_newest(prompts, _KEPT * _KEPT),
    )  # fmt: skip


def _add_prompts(
    known: Mapping[str, tuple[int, int]], heard: Sequence[Heard]
) -> tuple[dict[str, tuple[int, int]], Counters]:
    """What decode workers have computed of prompts since they were heard last. Gateways know it of answers alone that
    tell their usage; what share of prompts is cached follows from both together. A worker that begins anew adds nothing
    the first time."""
    prompts, computed, cached = dict(known), 0, 0
    for name, (_, sample) in _samples(heard).items():
        total, found = sample.prompt_tokens_total, sample.cached_prompt_tokens_total
        if sample.role is Role.PREFILL or total is None or found is None:
            continue
        before = prompts.pop(name, (total, found))
        prompts[name] = total, found
        if total >= before[0] and found >= before[1]:
            computed, cached = computed + total - before[0], cached + found - before[1]
    fresh = max(0, computed - cached)
    return prompts, replace(_NO_TRAFFIC, computed_prompt_tokens=computed, computed_tokens=fresh)


def take_shares(shares: Shares, heard: Sequence[Heard], *, now: float) -> Shares:
    """In what share of the time workers did what, with what these reports add."""
    return shares.observe({name: (now - age, sample) for name, (age, sample) in _samples(heard).items()})


def take_starts(starts: Starts, heard: Sequence[Heard], counts: Mapping[Role, RoleCount]) -> Starts:
    """What starts took, with those of the workers that are ready now."""
    samples = _samples(heard)
    for role, count in counts.items():
        for pod in sorted(count.leaders):
            known, sample = count.starts.get(pod), samples[pod][1] if pod in samples else None
            if sample is not None and sample.start_seconds is not None and sample.start_seconds <= LONGEST_START:
                wakes = sample.start_from == STANDBY
                before = 0.0 if wakes or known is None else known.before
                starts = starts.observe(role, pod, before + sample.start_seconds, own=True, wakes=wakes)
            elif known is not None and known.whole is not None:
                starts = starts.observe(role, pod, known.whole, own=False)
    return starts


def take_snapshot(
    heard: Sequence[Heard],
    counts: Mapping[Role, RoleCount],
    totals: Totals,
    shares: Shares = _NO_SHARES,
    starts: Starts = _NO_STARTS,
    *,
    now: float,
) -> Snapshot | None:
    """The fleet as it was when the oldest of these reports was read. None without a report."""
    if not heard:
        return None
    samples = _samples(heard)
    waiting = [one.report.traffic for one in heard if one.report.traffic is not None]
    roles: dict[Role, RoleState] = {}
    for role, count in counts.items():
        found = [samples[name][1] for name in sorted(count.leaders) if name in samples]
        state = replace(
            _role_state(count, found),
            starts=starts.seconds(role),
            busy=shares.busy(count.leaders),
            transfer_share=None if role is Role.PREFILL else shares.receiving(count.leaders),
        )
        if role is Role.PREFILL or Role.PREFILL not in counts:
            state = _with_waiting(state, waiting)
        roles[role] = state
    tells = all(_read_traffic(one.report.traffic) is not None for one in heard)
    return Snapshot(
        at=now - max(one.age for one in heard), roles=roles, counters=totals.counters if tells else None
    )  # fmt: skip


def _role_state(count: RoleCount, samples: Sequence[WorkerTelemetry]) -> RoleState:
    decoding = [sample for sample in samples if sample.running_requests]
    velocity = agree({sample.pod: sample.prefill_tokens_per_second for sample in samples})
    step = agree({sample.pod: _token_seconds(sample) for sample in decoding})
    mixed = agree({sample.pod: sample.mixed_token_seconds or sample.mixed_step_seconds for sample in decoding})
    return RoleState(
        replicas=count.replicas,
        ready=count.ready,
        warming=max(0, count.replicas - count.ready),
        queued_requests=sum(sample.queued_requests for sample in samples),
        queued_tokens=sum(sample.queued_prefill_tokens for sample in samples),
        running_requests=sum(sample.running_requests for sample in samples),
        kv_tokens_used=sum(sample.running_tokens for sample in samples),
        kv_tokens_total=sum(sample.kv_blocks_total * (sample.kv_block_size or _BLOCK_TOKENS) for sample in samples),
        tokens_per_second=velocity.value,
        step_seconds=step.value,
        mean_step_seconds=step.mean,
        mixed_step_seconds=mixed.value,
        decoding=len(decoding),
        gpus=read_gpus(samples),
        odd=tuple(sorted(velocity.odd | step.odd | mixed.odd)),
    )


def _token_seconds(sample: WorkerTelemetry) -> float | None:
    """Seconds between two tokens of an answer: as it is told where steps make several of each, else those of a step."""
    if sample.decode_token_seconds is not None:
        return sample.decode_token_seconds
    step = sample.decode_step_seconds
    return None if step is None else step / (sample.decode_tokens_per_step or 1.0)


def _with_waiting(state: RoleState, traffic: Sequence[Traffic]) -> RoleState:
    """What gateways hold back has not been computed either."""
    return replace(
        state,
        queued_requests=state.queued_requests + sum(one.waiting_requests for one in traffic),
        queued_tokens=state.queued_tokens + (held := sum(one.waiting_tokens for one in traffic)),
        waiting_tokens=held,
    )


def _samples(heard: Sequence[Heard]) -> dict[str, tuple[float, WorkerTelemetry]]:
    """The freshest sample of each worker and its age, by pod."""
    found: dict[str, tuple[float, WorkerTelemetry]] = {}
    for one in heard:
        for worker in one.report.workers:
            sample = worker.telemetry
            if sample is None or worker.telemetry_age is None:
                continue
            age = one.age + worker.telemetry_age
            if age <= STALE_SECONDS and (worker.name not in found or age < found[worker.name][0]):
                found[worker.name] = age, sample
    return found


def _read_traffic(traffic: Traffic | None) -> Counters | None:
    if traffic is None or not traffic.prompt_squares <= _MOST_SQUARES:
        return None
    return Counters(**{f.name: getattr(traffic, f.name) for f in fields(Counters)})


def _fell(now: Counters, before: Counters) -> bool:
    return any(getattr(now, f.name) < getattr(before, f.name) for f in fields(Counters))


def _plus(one: Counters, other: Counters) -> Counters:
    return Counters(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(Counters)})


def _minus(one: Counters, other: Counters) -> Counters:
    return Counters(**{f.name: getattr(one, f.name) - getattr(other, f.name) for f in fields(Counters)})


def _newest(known: Mapping[K, V], most: int) -> dict[K, V]:
    return {key: known[key] for key in list(known)[-most:]}
