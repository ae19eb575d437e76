"""A few seconds of `make fuzz`, another seed every day."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys


def test_a_bounded_share_of_the_fuzzing_finds_nothing() -> None:
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    ended = subprocess.run(
        [sys.executable, "-m", "bench.gateway.fuzz", "--seconds", "7", "--stall", "0.4", "--seed", str(seed)],
        capture_output=True, text=True, check=False, timeout=50,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["answers"].get("200"), ended.stdout
