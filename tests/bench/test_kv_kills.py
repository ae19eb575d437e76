"""What a soak of workers that are killed comes to."""

from __future__ import annotations

import http.client
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from bench.kv.kills import Soak, judge

READ = {"disk": 10, "peer": 10}


@pytest.mark.parametrize(
    ("seen", "read", "leftovers", "met"),
    [
        ({"answers": 5}, READ, [], True),
        ({"answers": 5, "wrong": 1}, READ, [], False),
        ({"answers": 5, "leaks": 1}, READ, [], False),
        ({"answers": 5}, READ, ["a file"], False),
        ({"answers": 5}, READ | {"damaged": 1}, [], False),
        ({"answers": 5}, {"disk": 10}, [], False),  # no worker has got anything of another one
        ({"answers": 5}, {"disk": 0, "peer": 10}, [], False),
    ],
)
def test_nothing_bad_came_and_something_was_read(
    seen: dict[str, int], read: dict[str, int], leftovers: list[str], met: bool
) -> None:
    added = sum((Counter(read), Counter[str]()), Counter[str]())  # which leaves out what is 0
    row = judge(7, 1.0, Counter(seen), added, leftovers)
    assert (row["met"], row["value"] == 0) == (met, met or not all(read.get(tier) for tier in ("disk", "peer")))


def test_a_client_outlives_a_worker_that_ends_within_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    member: Any = SimpleNamespace(name="falls", deaths=1)
    work = Soak([member], 1)
    asked = 0

    def ask(*_: object) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            work.over.set()
        raise http.client.IncompleteRead(b"{")

    monkeypatch.setattr(work, "ask", ask)
    work.run_client(0)
    assert (asked, work.seen["failed"]) == (3, 0)
