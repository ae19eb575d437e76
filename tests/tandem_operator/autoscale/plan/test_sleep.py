"""When a model that nobody uses sleeps: tables, and what holds whatever gateways say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.fleet import FleetReport, Traffic, WorkerReport
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_operator.autoscale.plan.sleep import FRESH_SECONDS, Sight, decide_rest, follow_quiet
from tandem_operator.autoscale.plan.snapshots import Heard

AFTER = 60.0


def heard(*, idle: float | None = 100.0, waiting: int = 0, age: float = 1.0, running: int | None = None) -> Heard:
    workers = [] if running is None else [worker(running)]
    traffic = Traffic(idle_seconds=idle, waiting_requests=waiting)
    report = FleetReport(gateway="g", started_at=0.0, at=0.0, traffic=traffic, workers=workers)
    return Heard(report=report, age=age)


def worker(running: int) -> WorkerReport:
    told = WorkerTelemetry(
        model_name="m", role=Role.DECODE, revision="r", pod="p", draining=False, running_requests=running,
        running_tokens=0, queued_requests=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0,
        kv_blocks_total=1, kv_eviction_horizon=0.0,
    )  # fmt: skip
    return WorkerReport(
        name="p", address="10.0.0.1:8000", role=Role.DECODE, revision="r", state="Admitted", telemetry=told,
        telemetry_age=1.0,
    )  # fmt: skip


def sight(*reports: Heard, **fields: Any) -> Sight:
    return Sight(**({"at": 1000.0, "asleep": False, "reports": reports or (heard(),)} | fields))


def decides(seen: Sight, *, after: float | None = AFTER, since: float | None = 0.0) -> bool:
    return decide_rest(after, seen, follow_quiet(since, seen)).asleep


OLD = Heard(report=FleetReport(gateway="g", started_at=0.0, at=0.0), age=1.0)
AWAKE: dict[str, tuple[Sight, dict[str, Any]]] = {
    "not wanted": (sight(), {"after": None}),
    "used a moment ago": (sight(heard(idle=59.9)), {}),
    "a request is under way": (sight(heard(idle=0.0)), {}),
    "a request waits": (sight(heard(waiting=1)), {}),
    "one of two gateways is used": (sight(heard(), heard(idle=1.0)), {}),
    "a gateway is younger": (sight(heard(), heard(idle=30.0)), {}),
    "no gateway reports": (replace(sight(), reports=()), {}),
    "one gateway does not report": (sight(silent={"g2": "it answers 500"}), {}),
    "a report is old": (sight(heard(age=FRESH_SECONDS + 0.1)), {}),
    "a gateway does not measure it": (sight(heard(idle=None)), {}),
    "a gateway counts nothing": (sight(OLD), {}),
    "a worker computes": (sight(heard(running=1)), {}),
    "workers are replaced": (sight(rolling=True), {}),
    "a role has no replica that serves": (sight(serves=False), {}),
    "it has served for less": (sight(), {"since": 950.0}),
    "it is seen to serve for the first time": (sight(), {"since": None}),
}


@pytest.mark.parametrize("name", AWAKE)
def test_it_stays_awake(name: str) -> None:
    seen, more = AWAKE[name]
    assert not decides(seen, **more)


def test_it_falls_asleep_when_every_gateway_was_idle_for_long() -> None:
    seen = sight(heard(running=0), heard(idle=60.0))
    rest = decide_rest(AFTER, seen, follow_quiet(0.0, seen))
    assert (rest.asleep, rest.sentence) == (
        True,
        "No request came for 60 s, so the model sleeps; the next one wakes it.",
    )


def test_a_request_to_a_gateway_that_has_gone_counts() -> None:
    since = follow_quiet(0.0, sight(heard(), heard(idle=2.0)))
    assert since == 997.0
    later = replace(sight(), at=1050.0)
    assert not decides(later, since=since)
    assert decides(replace(later, at=1057.0), since=since)


@pytest.mark.parametrize(
    ("seen", "after", "asleep", "says"),
    [
        (sight(), AFTER, True, "the next request waits"),
        (sight(heard(waiting=3)), AFTER, False, "3 requests wait in gateways"),
        (sight(heard(), heard(waiting=1, age=40.0), silent={"g": "x"}), AFTER, False, "1 requests wait"),
        (sight(heard(idle=0.0)), AFTER, False, "A request is under way"),
        (sight(), None, False, "not to sleep any more"),
        (sight(silent={"g2": "it answers 500"}), AFTER, True, "1 gateways do not say whether requests wait: g2: it"),
        (replace(sight(), reports=()), AFTER, True, "the next request waits"),
    ],
)
def test_what_sleeps_wakes_for_a_request_alone(seen: Sight, after: float | None, asleep: bool, says: str) -> None:
    rest = decide_rest(after, replace(seen, asleep=True, serves=False), None)
    assert rest.asleep is asleep
    assert says in rest.sentence
    assert bool(rest.unknown) == bool(seen.silent and asleep)


REPORTS = st.builds(
    heard,
    idle=st.none() | st.sampled_from([0.0, 1.0, 59.0, 60.0, 500.0]),
    waiting=st.integers(0, 2),
    age=st.sampled_from([0.0, 5.0, 11.0, 40.0]),
    running=st.none() | st.integers(0, 1),
)
SIGHTS = st.builds(
    Sight,
    at=st.floats(900.0, 1100.0),
    asleep=st.booleans(),
    reports=st.lists(REPORTS, max_size=3).map(tuple),
    silent=st.sampled_from([{}, {"g": "it cannot be reached"}]),
    serves=st.booleans(),
    rolling=st.booleans(),
)


@given(SIGHTS, st.none() | st.sampled_from([10.0, 60.0]), st.none() | st.floats(0.0, 1000.0))
def test_whatever_is_known(seen: Sight, after: float | None, since: float | None) -> None:
    quiet = follow_quiet(since, seen)
    rest = decide_rest(after, seen, quiet)
    assert rest == decide_rest(after, seen, quiet), "the same again"
    traffic = [one.report.traffic for one in seen.reports if one.report.traffic is not None]
    if any(one.waiting_requests for one in traffic) or after is None:
        assert not rest.asleep, "nobody waits for a model that sleeps"
    if rest.asleep and not seen.asleep:
        assert after is not None
        assert not seen.silent
        assert not seen.rolling
        assert seen.serves
        assert seen.reports
        assert all(one.age <= FRESH_SECONDS for one in seen.reports), "never on what is old"
        assert all(one.idle_seconds is not None and one.idle_seconds >= after for one in traffic)
        assert len(traffic) == len(seen.reports)
        assert quiet is not None
        assert seen.at - quiet >= after
    if seen.asleep and not rest.asleep and after is not None:
        assert any(one.waiting_requests or one.idle_seconds == 0 for one in traffic), "nothing else wakes it"
    assert bool(rest.sentence) == (rest.asleep or seen.asleep)


@given(st.lists(SIGHTS.map(lambda seen: replace(seen, asleep=False)), max_size=6))
def test_quiet_begins_no_earlier_for_what_is_seen_later(sights: list[Sight]) -> None:
    since: float | None = None
    for at, each in enumerate(sights):
        seen = replace(each, at=1000.0 + 5 * at)
        before, since = since, follow_quiet(since, seen)
        assert since is None or (since <= seen.at and (before is None or since >= before))
