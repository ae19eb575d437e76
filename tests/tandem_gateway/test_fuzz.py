"""A few seconds of `make fuzz`: the same ones in the gate, others every day in the full run."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

import pytest


def fuzz(seed: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gateway.fuzz", "--seconds", "7", "--stall", "0.4", "--seed", str(seed)],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert ended.returncode == 0, f"seed {seed}\n{ended.stdout}{ended.stderr}"
    assert json.loads(ended.stdout.splitlines()[-1])["answers"].get("200"), ended.stdout


def test_a_bounded_share_of_the_fuzzing_finds_nothing() -> None:
    fuzz(1)


@pytest.mark.full
def test_nor_does_that_of_the_day() -> None:
    fuzz(datetime.datetime.now(datetime.UTC).date().toordinal())
