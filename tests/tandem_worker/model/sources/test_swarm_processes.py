"""Starters as real processes on loopback, with a hub that is slow: what they end with, and what the hub gave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.start.starters import MB, Ready, Starters

MODEL_BYTES = 16 * MB


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Starters]:
    fleet = Starters(tmp_path, 4, model_bytes=MODEL_BYTES, hub_rate=6 * MB)
    yield fleet
    fleet.close()


def finish(fleet: Starters, number: int) -> Ready:
    """Whoever sent it, the model is the hub's."""
    ready = fleet.finish(number)
    assert ready.right
    return ready


def test_four_starters_ask_the_hub_for_little_more_than_one_model(fleet: Starters) -> None:
    """One or two of its four chunks may be asked for twice, on a machine that is busy: whoever asks has not heard yet
    of whoever does. Each by itself would ask for four models. `bench.start.swarm` measures it with many chunks.
    """
    for number in range(4):
        fleet.start(number, held=True)
    fleet.release([0, 1, 2, 3])
    got = [finish(fleet, number).received for number in range(4)]
    assert fleet.hub.sent < 1.6 * MODEL_BYTES
    assert all(received["peer"] > 0 for received in got)


@pytest.mark.parametrize("vice", ["lie", "forge"])
def test_a_source_that_lies_is_never_believed_and_is_dropped(fleet: Starters, vice: str) -> None:
    """`forge`: the sums that it tells fit its wrong bytes; the file's digest does not."""
    fleet.start(0, vice)
    finish(fleet, 0)
    fleet.start(1)
    assert finish(fleet, 1).faults["wrong"] == 1


def test_a_source_that_stalls_does_not_hold_up_a_start(fleet: Starters) -> None:
    fleet.start(0, "stall")
    finish(fleet, 0)
    fleet.start(1)
    assert finish(fleet, 1).received["hub"] > 0.9 * MODEL_BYTES


def test_a_source_and_a_starter_are_killed_and_every_other_start_ends_right(fleet: Starters) -> None:
    for number in range(4):
        fleet.start(number)
    fleet.wait(lambda: fleet.hub.sent > MODEL_BYTES // 3)
    fleet.kill(0)
    fleet.kill(1)
    for number in (2, 3):
        finish(fleet, number)
    before = fleet.hub.sent
    fleet.start(0)  # again, over what it left
    finish(fleet, 0)
    assert fleet.hub.sent - before < MODEL_BYTES // 2
