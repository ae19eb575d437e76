"""Figures of a canary: differences of what gateways count, and what they are taken for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.crd.rollout import Canary
from tandem_api.crd.status import CanaryFigures
from tandem_api.fleet import TTFT_BOUNDS, FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_operator.rollout.figures import (
    Judgement,
    Tally,
    add_figures,
    judge,
    take_differences,
)


def report(requests: int, failures: int = 0, *, gateway: str = "g", started: float = 0.0, **fields: Any) -> FleetReport:
    worker = {"name": "w", "address": "10.0.0.1", "role": Role.DECODE, "revision": "r", "state": "Admitted"} | fields
    made = WorkerReport.model_validate(worker | {"requests": requests, "failures": failures})
    return FleetReport(gateway=gateway, started_at=started, at=100.0, workers=[made])


def counted(*looks: list[FleetReport], since: float = 50.0) -> list[tuple[int, int]]:
    tally, found = Tally(since=since), list[tuple[int, int]]()
    for reports in looks:
        tally, added = take_differences(tally, [(each, 0.0) for each in reports], now=100.0)
        figures = added.get("w", CanaryFigures())
        found.append((figures.requests, figures.failures))
    return found


def test_what_was_counted_before_does_not_count() -> None:
    assert counted([report(1000, 7)], [report(1010, 8)]) == [(0, 0), (10, 1)]


def test_a_worker_and_a_gateway_that_come_later_count_from_the_beginning() -> None:
    other = report(5, name="x")
    both = report(9).model_copy(update={"workers": [*other.workers, *report(9).workers]})
    assert counted([other], [both]) == [(0, 0), (9, 0)]
    assert counted([report(4, started=60.0)]) == [(4, 0)]


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_a_clock_that_is_an_hour_off_makes_no_old_requests_new(ahead: float) -> None:
    old, new = (
        report(n, gateway=g, started=ahead + 100 - lived).model_copy(update={"at": ahead + 100})
        for n, g, lived in ((700, "old", 1800), (3, "new", 20))
    )
    _, added = take_differences(Tally(since=7.0), [(old, 2.0), (new, 2.0)], now=57.0)
    assert added["w"].requests == 3


def test_a_gateway_or_a_worker_that_restarts_counts_anew() -> None:
    assert counted([report(100)], [report(3, started=70.0)]) == [(0, 0), (3, 0)]
    assert counted([report(100)], [report(3, address="10.0.0.9")]) == [(0, 0), (3, 0)]
    assert counted([report(100)], [report(4)]) == [(0, 0), (4, 0)], "counts that fall"


def test_gateways_are_added_up() -> None:
    first = [report(10), report(20, gateway="h")]
    assert counted(first, [report(11), report(25, gateway="h")]) == [(0, 0), (6, 0)]


def test_the_same_reports_twice_add_nothing() -> None:
    assert counted([report(1)], [report(5)], [report(5)]) == [(0, 0), (4, 0), (0, 0)]


def test_prefills_are_counted_apart() -> None:
    tally, _ = take_differences(Tally(since=0.0), [(report(1, role=Role.PREFILL), 0.0)], now=100.0)
    _, added = take_differences(tally, [(report(5, 2, role=Role.PREFILL), 0.0)], now=100.0)
    assert added["w"] == CanaryFigures(prefill_requests=4, prefill_failures=2)


def told(**fields: Any) -> Canary:
    return Canary.model_validate({"steps": [{"weight": 10, "duration": "1m"}], "minRequests": 20} | fields)


def buckets(**counts: int) -> list[int]:
    """Requests by the index of their bucket."""
    return [counts.get(f"b{index}", 0) for index in range(len(TTFT_BOUNDS) + 1)]


@pytest.mark.parametrize(
    ("requests", "failures", "fresh", "judgement", "reason"),
    [
        (19, 0, True, Judgement.UNKNOWN, "TooFewRequests"),
        (20, 1, True, Judgement.GOOD, ""),
        (20, 2, True, Judgement.BAD, "ErrorRateExceeded"),
        (2, 2, True, Judgement.BAD, "ErrorRateExceeded"),
        (1, 1, True, Judgement.UNKNOWN, "TooFewRequests"),
        (100, 0, False, Judgement.UNKNOWN, "NoFigures"),
        (100, 90, False, Judgement.BAD, "ErrorRateExceeded"),
    ],
)
def test_error_rates(requests: int, failures: int, fresh: bool, judgement: Judgement, reason: str) -> None:
    mine = CanaryFigures(requests=requests, failures=failures)
    found = judge(told(maxErrorRate=5), mine, None, fresh=fresh)
    assert (found.judgement, found.reason) == (judgement, reason)


def test_prefills_that_fail_count_though_decode_workers_make_up_for_them() -> None:
    mine = CanaryFigures(requests=100, prefill_requests=100, prefill_failures=60)
    assert judge(told(maxErrorRate=5), mine, None, fresh=True).judgement is Judgement.BAD


def test_without_limits_no_figures_are_needed() -> None:
    assert judge(told(), None, None, fresh=False).judgement is Judgement.GOOD
    assert judge(None, None, None, fresh=False).judgement is Judgement.GOOD
    assert judge(told(maxErrorRate=5), None, None, fresh=False).judgement is Judgement.UNKNOWN


@pytest.mark.parametrize(
    ("limit", "mine", "others", "judgement"),
    [
        ({"factor": 1.5}, buckets(b2=100), buckets(b2=100), Judgement.GOOD),
        ({"factor": 1.5}, buckets(b3=100), buckets(b2=100), Judgement.GOOD),
        ({"factor": 1.5}, buckets(b4=100), buckets(b2=100), Judgement.BAD),
        ({"factor": 1.5, "percentile": 50}, buckets(b2=90, b9=10), buckets(b2=100), Judgement.GOOD),
        ({"factor": 1.5}, buckets(b2=90, b9=10), buckets(b2=100), Judgement.BAD),
        ({"factor": 1.5}, buckets(b9=10), buckets(b2=100), Judgement.UNKNOWN),
        ({"factor": 1.5}, buckets(b9=100), buckets(b2=10), Judgement.UNKNOWN),
        ({"duration": "1s"}, buckets(b4=100), buckets(), Judgement.GOOD),
        ({"duration": "1s"}, buckets(b5=100), buckets(), Judgement.BAD),
        ({"factor": 2}, buckets(b13=100), buckets(b12=100), Judgement.GOOD),
    ],
)
def test_times_to_the_first_token(
    limit: dict[str, Any], mine: list[int], others: list[int], judgement: Judgement
) -> None:
    """Neighbouring buckets may hold nearly the same times: what may be as fast is not called slow."""
    figures = [CanaryFigures(requests=sum(counts), ttft_counts=counts) for counts in (mine, others)]
    assert judge(told(maxTTFT=limit), *figures, fresh=True).judgement is judgement


@pytest.mark.parametrize("number", [1, len(TTFT_BOUNDS), len(TTFT_BOUNDS) + 7])
def test_times_in_buckets_of_another_release_are_no_times(number: int) -> None:
    counts = [0] * (number - 1) + [100]
    _, added = take_differences(Tally(since=0.0), [(report(100, started=1.0, ttftCounts=counts), 0.0)], now=100.0)
    assert added["w"] == CanaryFigures(requests=100)
    for limit in ({"duration": "1s"}, {"factor": 1.5}):
        for mine, others in ((counts, buckets(b2=100)), (buckets(b2=100), counts)):
            figures = [CanaryFigures(requests=100, ttft_counts=found) for found in (mine, others)]
            assert judge(told(maxTTFT=limit), *figures, fresh=True).judgement is not Judgement.BAD


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6))
def test_differences_add_up_to_what_was_counted(steps: list[tuple[int, int]]) -> None:
    tally, total, so_far = Tally(since=0.0), CanaryFigures(), [0, 0]
    for requests, failures in steps:
        so_far = [so_far[0] + requests + failures, so_far[1] + failures]
        tally, added = take_differences(tally, [(report(*so_far), 0.0)], now=100.0)
        total = add_figures(added.get("w"), total)
    assert [total.requests, total.failures] == so_far
