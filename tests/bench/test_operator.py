"""The operator's bench says in its last line whether what is asked holds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.operator.verdict import judge

FLOOR = {"ready_seconds": 27.0}
FIGURES: dict[str, Any] = {
    "ready_seconds": 40.0, "restart_writes": {"apply": 0.0, "create": 0.0}, "first_holds_ms": [12.5, 3.0],
    "events_holds_ms": [19.0, 12.5], "restart_holds_ms": [], "rss_mib_before": 90.0, "rss_mib_half": 100.0,
    "rss_mib_after": 101.0, "events": 10000, "requests_per_model": {"POST": 23.0, "GET": 7.0, "PATCH": 6.0},
    "writes_per_model": {"create": 24.0, "status": 3.0},
}  # fmt: skip


def test_all_that_is_asked_is_told() -> None:
    asked = judge(FLOOR, FIGURES)
    assert asked["ready"] == {"seconds": 40.0, "floor_seconds": 27.0, "factor": 1.48, "holds": True}
    assert asked["event_loop"]["longest_hold_ms"] == 19.0, "while events come, too"
    assert (asked["requests"]["per_model"], asked["requests"]["per_object"]) == (36.0, 1.5)
    assert all(part.get("holds", True) for part in asked.values())


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("ready", {"ready_seconds": 41.0}),
        ("restart", {"restart_writes": {"status": 1.0}}),
        ("event_loop", {"restart_holds_ms": [20.1]}),
        ("memory", {"rss_mib_after": 103.0}),
    ],
)
def test_what_does_not_hold_is_told(part: str, change: dict[str, Any]) -> None:
    asked = judge(FLOOR, FIGURES | change)
    assert [name for name, found in asked.items() if not found.get("holds", True)] == [part]
