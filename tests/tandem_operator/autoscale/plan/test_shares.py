"""Shares of time from totals of seconds: true ones, and none where too little is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_api.telemetry import WorkerTelemetry
from tandem_operator.autoscale.plan.contract import SHARE_SECONDS
from tandem_operator.autoscale.plan.shares import LEAST_SECONDS, Shares


def sample(busy: float | None, received: float | None = None) -> WorkerTelemetry:
    return WorkerTelemetry(
        model_name="m", role=Role.DECODE, revision="r", pod="d-0", draining=False, running_requests=0,
        queued_requests=0, running_tokens=0, queued_prefill_tokens=0, kv_blocks_used=0, kv_blocks_cached=0,
        kv_blocks_total=1, kv_eviction_horizon=0.0, busy_seconds_total=busy, kv_transfer_seconds_total=received,
    )  # fmt: skip


def watch(shares: Shares, share: float, begin: float, end: float, total: float = 0.0) -> Shares:
    for step in range(int((end - begin) / 5) + 1):
        at = begin + 5 * step
        shares = shares.observe({"d-0": (at, sample(total + share * (at - begin), total + share * (at - begin)))})
    return shares


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_last_minute_counts(before: float, lately: float) -> None:
    shares = watch(Shares(), before, 0.0, 300.0)
    assert shares.busy(["d-0"]) == pytest.approx(before)
    shares = watch(shares, lately, 305.0, 305.0 + SHARE_SECONDS, total=300.0)
    assert shares.busy(["d-0"]) == pytest.approx(lately)
    assert shares.receiving(["d-0"]) == pytest.approx(lately)
    assert len(shares.marks["d-0"]) <= SHARE_SECONDS / 5 + 2


@pytest.mark.parametrize("seconds", [0.0, 5.0, LEAST_SECONDS - 5])
def test_a_short_time_tells_nothing(seconds: float) -> None:
    """One long transfer would look like a full link."""
    shares = watch(Shares(), 1.0, 0.0, seconds)
    assert (shares.busy(["d-0"]), shares.receiving(["d-0"])) == (None, None)


def test_what_a_worker_does_not_tell_is_unknown() -> None:
    shares = Shares()
    for at in (0.0, 100.0):
        shares = shares.observe({"d-0": (at, sample(at, None)), "d-1": (at, sample(None, at / 2))})
    assert (shares.busy(["d-0"]), shares.receiving(["d-0"])) == (1.0, None)
    assert (shares.busy(["d-1"]), shares.receiving(["d-1"])) == (None, 0.5)
    assert (shares.busy(["d-0", "d-1", "gone"]), shares.receiving([])) == (1.0, None)


def test_the_fullest_link_and_the_mean_of_busy_workers() -> None:
    shares = Shares()
    for at in (0.0, 100.0):
        shares = shares.observe({"a": (at, sample(at, at)), "b": (at, sample(0.0, 0.0))})
    assert (shares.busy(["a", "b"]), shares.receiving(["a", "b"])) == (0.5, 1.0)


def test_a_worker_that_began_anew_or_was_not_heard_is_measured_anew() -> None:
    shares = watch(Shares(), 1.0, 0.0, 60.0)
    again = shares.observe({"d-0": (65.0, sample(0.5, 0.5))})
    assert again.busy(["d-0"]) is None
    assert watch(again, 0.2, 70.0, 105.0, total=0.5).busy(["d-0"]) == pytest.approx(0.2, abs=0.05)
    assert shares.observe({}).observe({"d-0": (65.0, sample(60.0, 60.0))}).busy(["d-0"]) is None


@given(st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 1e9)), max_size=60))
def test_a_share_is_one_whatever_is_told(told: list[tuple[float, float]]) -> None:
    """Clocks of gateways differ a little, so samples may come out of order."""
    shares = Shares()
    for at, total in told:
        shares = shares.observe({"d-0": (at, sample(total, total))})
        busy = shares.busy(["d-0"])
        assert busy is None or 0 <= busy <= 1
        assert len(shares.marks["d-0"]) <= 60
