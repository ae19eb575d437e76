"""Which tests go side by side.

Most of a test's time is waiting: for pods to start, for a settling time, for a node's grace. So several tests run at
the same time, each lane of pytest-xdist taking the next one (`Scheduling`). Tests that share a fleet are one
group and stay in one lane, in the order of their files; those that disturb the shared fleet come last in it. What
changes the whole cluster has the marker `alone` and runs by itself afterwards.

Groups and tests begin in the order of `FIRST`, then of their files: what takes long must not be what is left at the
end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

SHARED = ("staged", "pair", "untouched", "main")
"""Fixtures of fleets that tests share; a test that has several belongs to the first."""
SHARED_FILES = {
    "test_admission": "admission", "test_other_writers": "other writers", "test_shared_models": "other writers",
    "test_examples": "examples", "test_commands": "commands", "test_charts": "charts",
    "test_standby": "other writers", "test_answers": "main",
}  # fmt: skip
"""Files whose tests are one group: they change the same policy, are so short that a lane each would not pay, have an
API server of their own with its ports, or a reference that takes ten seconds to load."""
FIRST = (
    "main", "test_roles_follow_their_targets_apart", "staged", "untouched", "test_a_branch_that_moves", "pair",
    "other writers", "test_a_canary_is_promoted_and_undone", "test_a_rename_under_load",
    "test_a_model_sleeps_and_wakes", "test_each_fault_is_named",
    "test_workers_that_do_both", "test_a_step_that_hangs", "test_prefill_is_added", "test_a_pair_is_replaced",
    "test_a_secret_that_is_broken", "test_three_ranks",
)  # fmt: skip
LAST = ("commands", "charts", "examples", "admission", "test_chart", "test_dashboard")
"""Short ones, which even out the lanes' ends."""
DISTURBING = (
    "test_scaling_under_load", "test_keys_rotate", "test_drift_is_corrected", "test_responses_are_kept",
    "test_other_time_limits", "test_another_time_to_drain",
)  # fmt: skip
"""Of the tests that share `main`: those after which it is not what it was, or is so only some time later."""


def name_group(item: Any) -> str | None:
    """The group a test belongs to; None for one that has a fleet of its own."""
    module = item.module.__name__.rpartition(".")[2]
    if module in SHARED_FILES:
        return SHARED_FILES[module]
    return next((name for name in SHARED if name in item.fixturenames), None)


def rank(group: str | None, module: str, name: str) -> tuple[int, bool]:
    """Where it stands in the order, smaller first: a stable sort keeps the files' order within."""
    disturbs = name.startswith(DISTURBING)
    for place, first in enumerate(FIRST):
        if group == first or (group is None and name.startswith(first)):
            return place, disturbs
    if group in LAST or module in LAST:
        return len(FIRST) + 1, disturbs
    return len(FIRST), disturbs


def arrange(items: list[Any]) -> None:
    """Put tests in order, in place."""
    items.sort(key=lambda item: rank(name_group(item), item.module.__name__.rpartition(".")[2], item.name))


def write_groups(items: Sequence[Any], file: Path) -> None:
    """Every lane writes the same, before it says that it has collected."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps({item.nodeid: group for item in items if (group := name_group(item))}))
    unfinished.rename(file)


class Scheduling(LoadScopeScheduling):
    """Each lane takes the next group. pytest-xdist's own groups (`loadgroup`) are lost under pytest 9.2, which has no
    `_nodeid` to write them into.
    """

    def __init__(self, config: pytest.Config, log: Any, file: Path) -> None:
        super().__init__(config, log)
        self._file = file
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        if not self._groups:
            self._groups = json.loads(self._file.read_text())
        return self._groups.get(nodeid, nodeid)


def find_stale(names: Sequence[str]) -> list[str]:
    """Entries of the tables above that mean none of these tests, whose names are given without parameters."""
    wanted = {*FIRST, *DISTURBING} - {*SHARED, *SHARED_FILES.values()}
    return sorted(entry for entry in wanted if not any(name.startswith(entry) for name in names))
