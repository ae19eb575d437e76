from __future__ import annotations

from typing import Any

import pytest
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.transfer.contract import TransferTimeouts
from tandem_worker.transfer.decode.attempt import Attempt
from tandem_worker.transfer.decode.reception import Reception
from tandem_worker.transfer.decode.watch import PrefillPace, judge_order, waited

TIMEOUTS = TransferTimeouts(stall=30.0, queue=60.0)
ORDER = RemotePrefill(
    request_id="a", generation=1, token_ids=(1,) * 1000, num_cached_tokens=0, block_ids=(1,), endpoints=(),
    cache_salt="", priority=0,
)  # fmt: skip


def judge(now: float, *, layers: tuple[int, ...] = (0,), **state: Any) -> str | None:
    """An order given at 0, whose peer's engine has moved on ever since."""
    attempt = Attempt(1, "a", (1,), 0, ORDER, reception=Reception((1,), 0, layers))
    for name, value in state.items():
        setattr(attempt, name, value)
    return judge_order(
        attempt, now, watching_since=0.0, engine_progressed_at=now, timeouts=TIMEOUTS, pace=PrefillPace()
    )


@pytest.mark.parametrize(
    ("now", "state", "reason"),
    [
        (59.0, {}, None),
        (61.0, {}, "not begun in 60 s"),
        (29.0, {"started_at": 0.0}, None),
        (31.0, {"started_at": 0.0}, "no progress for 30 s"),
        (39.0, {"started_at": 0.0, "last_progress": 38.0}, None),
        (41.0, {"started_at": 0.0, "last_progress": 40.0}, "not done 40 s after it was begun"),
        (41.0, {"started_at": 20.0, "last_progress": 40.0}, None),
        (99.0, {"started_at": 0.0, "last_progress": 98.0, "arrived": True}, None),
        (99.0, {"started_at": 0.0, "arrived": True, "layers": ()}, "no progress for 30 s"),
        (39.0, {"started_at": 0.0, "layers": ()}, None),
        (41.0, {"started_at": 0.0, "layers": ()}, "not done 40 s after it was begun"),
    ],
)
def test_how_long_an_order_may_take(now: float, state: dict[str, Any], reason: str | None) -> None:
    assert judge(now, **state) == reason


def test_time_in_which_nobody_watched_is_not_the_peers() -> None:
    attempt = Attempt(1, "a", (1,), 0, ORDER, started_at=0.0)
    common: dict[str, Any] = {"engine_progressed_at": 0.0, "timeouts": TIMEOUTS, "pace": PrefillPace()}
    assert judge_order(attempt, 100.0, watching_since=90.0, **common) is None
    assert judge_order(attempt, 100.0, watching_since=0.0, **common) is not None


def test_waiting_ends_with_the_begin() -> None:
    attempt = Attempt(1, "a", (1,), 0, ORDER)
    assert waited(attempt, 7.0, 0.0) == 7.0
    attempt.started_at = 6.0
    assert waited(attempt, 7.0, 0.0) == 0.0


def test_a_slow_peer_gets_more_time_and_one_that_pretends_to_be_very_slow_does_not() -> None:
    pace = PrefillPace()
    assert pace.allow(1000) == 10.0
    for seconds in (5.0,) * 40:
        pace.observe(1000, seconds)
    assert pace.allow(1000) == pytest.approx(50.0)
    for seconds in (1000.0,) * 40:
        pace.observe(1000, seconds)
    assert pace.allow(1000) == 100.0
