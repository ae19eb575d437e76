"""The engine's benches run, and a row that cannot is named while the others go on."""

from __future__ import annotations

import pytest

from bench.engine import loop
from bench.engine.__main__ import Row, Sample, measure
from bench.engine.baseline import BaselineError


def test_the_loop_is_measured_part_by_part() -> None:
    parts = loop.measure(2, 20)
    assert {"begin", "launch", "finish", "stats", "deliver"} <= parts.keys()
    assert all(microseconds >= 0 for microseconds in parts.values())


def test_a_row_that_cannot_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Sample:
        raise BaselineError("The baseline's process ended.")

    assert measure(Row("32 streams", "≥1", fail), 2)["failed"] == "BaselineError: The baseline's process ended."
    assert "32 streams" in capsys.readouterr().out
    assert measure(Row("1 stream", "≥1", lambda: Sample(2.0, "")), 2)["met"] is True
