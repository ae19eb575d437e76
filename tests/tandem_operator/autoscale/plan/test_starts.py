"""What starts took: workers tell it themselves, Kubernetes what came before; the last twenty count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tandem_api.crd.status import StartFigures, StartStatus
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_operator.autoscale.plan.snapshots import Heard, PodStart, RoleCount, take_starts
from tandem_operator.autoscale.plan.starts import KEPT, Starts

P, D = Role.PREFILL, Role.DECODE


def heard(**told: tuple[float | None, str]) -> list[Heard]:
    """Decode workers, each with what it says of its start."""
    workers = [
        WorkerReport(
            name=name, address="10.0.0.1:8000", role=D, revision="r", state="Admitted", telemetry_age=0.0,
            telemetry=WorkerTelemetry(
                model_name="m", role=D, revision="r", pod=name, draining=False, running_requests=0, queued_requests=0,
                running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0, kv_blocks_total=1,
                kv_eviction_horizon=0.0, start_seconds=seconds, start_from=origin,
            ),
        )
        for name, (seconds, origin) in told.items()
    ]  # fmt: skip
    return [Heard(report=FleetReport(gateway="g", started_at=0.0, at=0.0, workers=workers), age=0.0)]


def counts(**starts: PodStart) -> dict[Role, RoleCount]:
    return {D: RoleCount(replicas=len(starts), leaders=frozenset(starts), starts=starts)}


def test_a_workers_own_figure_counts_with_what_came_before_it() -> None:
    pods = counts(a=PodStart(before=3.0, whole=9.0), b=PodStart(before=1.0, whole=7.0), c=PodStart(before=2.0))
    starts = take_starts(Starts(), heard(a=(2.5, "files"), c=(None, "")), pods)
    assert starts.seconds(D) == (5.5, 7.0), "b says nothing, and of c nothing is known"
    assert take_starts(starts, heard(a=(2.5, "files")), pods) is starts, "nothing new"
    assert take_starts(starts, heard(b=(4.0, "files")), pods).seconds(D) == (5.5, 5.0), "b says it later"
    assert take_starts(starts, heard(a=(1.5, "prepared")), pods).seconds(D) == (5.5, 7.0, 4.5), "a has started again"
    assert take_starts(starts, heard(a=(1e15, "files")), pods) is starts, "no start takes so long"


def test_waking_up_is_no_start() -> None:
    pods = counts(a=PodStart(before=3.0), b=PodStart(before=3.0))
    starts = take_starts(Starts(), heard(a=(0.5, "standby"), b=(4.0, "files")), pods)
    assert starts.seconds(D) == (7.0,)
    assert starts.tell(None) == StartStatus(
        decode=StartFigures(median_seconds=7.0, p90_seconds=7.0, count=1),
        decode_wake=StartFigures(median_seconds=0.5, p90_seconds=0.5, count=1),
    )


def test_what_was_told_stays_until_there_is_something_new() -> None:
    old = StartFigures(median_seconds=9.0, p90_seconds=12.0, count=20)
    assert Starts().tell(None) is None
    assert Starts().tell(StartStatus(prefill=old)) == StartStatus(prefill=old)
    told = Starts().observe(D, "a", 2.0, own=True).tell(StartStatus(prefill=old, decode=old))
    assert told == StartStatus(prefill=old, decode=StartFigures(median_seconds=2.0, p90_seconds=2.0, count=1))


@given(st.lists(st.floats(0.1, 100.0), min_size=1, max_size=60))
def test_the_last_ones_are_measured(seconds: list[float]) -> None:
    starts = Starts()
    for number, each in enumerate(seconds):
        starts = starts.observe(P, f"m-{number}", each, own=True)
    last = seconds[-KEPT:]
    assert starts.seconds(P) == tuple(last)
    told = starts.tell(None)
    assert told is not None
    assert told.prefill is not None
    assert told.prefill.count == len(last)
    below = sum(round(each, 1) <= told.prefill.p90_seconds for each in last)
    assert below >= 0.9 * len(last), "nine of ten took no longer"
    assert sum(round(each, 1) >= told.prefill.median_seconds for each in last) >= len(last) / 2
