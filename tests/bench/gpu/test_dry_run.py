"""Every stage on a CPU, over tiny shapes: no line of them runs on a GPU for the first time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.stages import STAGES

ROOT = Path(__file__).parents[3]
EXPECTED = {
    "correctness": ["versions", "ceilings", "tests tests/tandem_worker/engine/execute/test_cuda_graphs.py"],
    "shapes": ["check paged_decode_attention tiny B=3 C=40", "time paged_decode_attention tiny B=3 C=40"],
    "engine": [
        "recorded steps",
        "tokens",
        "decode top-p x3",
        "step with 7 guesses, context 70",
        "guesses x3",
        "first token of 40",
        "host memory, 400",
        "torch with SDPA, recorded, x3",
    ],
    "start": ["checkpoint", "first start", "where time goes", "start 2", "goals"],
    "lossless": ["products of layer M=8", "products of layer M=80", "decode x3", "first token of 40"],
    "variants": ["paged_decode_attention tiny B=3 C=40: 1 split"],
    "tools": ["memcheck of decode", "counters of paged_decode_attention"],
}
"""Items without which the stage has not done its work."""


def dry_run(stages: list[str], out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.gpu", *stages, "--tiny", "--device", "cpu", "--out", str(out)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ)
    assert child.returncode == 0, child.stdout[-4000:] + child.stderr[-2000:]
    return {path.stem: json.loads(path.read_text()) for path in out.iterdir()}


def check(found: dict[str, Any], stages: list[str]) -> None:
    assert sorted(found) == sorted(stages)
    for name in stages:
        assert found[name]["seconds"] < STAGES[name].seconds
        statuses = {item: outcome["status"] for item, outcome in found[name]["items"].items()}
        assert set(EXPECTED[name]) <= statuses.keys()
        assert set(statuses.values()) <= {"passed", "absent"}
        assert found[name]["dry_run"] is True


def test_variants_and_tools(tmp_path: Path) -> None:
    """The quickest two, in every run of the unit tests."""
    check(dry_run(["variants", "tools"], tmp_path), ["variants", "tools"])


@pytest.mark.full
@pytest.mark.timeout(700)
def test_all_stages(tmp_path: Path) -> None:
    found = dry_run(list(STAGES), tmp_path)
    check(found, list(STAGES))
    shapes = found["shapes"]["items"]
    checked = {name.removeprefix("check ") for name in shapes if name.startswith("check ")}
    timed = {name.removeprefix("time ") for name in shapes if name.startswith("time ")}
    assert checked == timed
    assert all(outcome["figures"]["ratio"] > 0 for name, outcome in shapes.items() if name.startswith("time "))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 1 << 20
