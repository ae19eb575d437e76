"""What runs a stage: whatever one item does, the others get their turn and their results are on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import report
from bench.gpu.item import ItemStatus, Phase, Setting, Stage
from bench.gpu.meter import Meter, parse
from bench.gpu.run import run_stage
from bench.gpu.stages import GPU_TESTS, STAGES

ROOT = Path(__file__).parents[3]
LANES = "tests.bench.gpu.lanes:"
SETTING = Setting(device="cpu", tiny=True)


def run(*phases: Phase, seconds: float = 50.0, setting: Setting = SETTING) -> tuple[dict[str, Any], list[str]]:
    stage = Stage(name="x", what="", seconds=seconds, phases=phases)
    lines: list[str] = []
    return run_stage(stage, setting, lambda results: None, lines.append, Meter(program="no-such-program")), lines


def phase(*lanes: str, seconds: float = 50.0, together: int = 1) -> Phase:
    return Phase(lanes=tuple(LANES + lane for lane in lanes), seconds=seconds, together=together)


def is_alive(pid: int) -> bool:
    """And not only a zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture(scope="module")
def hard() -> tuple[dict[str, Any], list[str]]:
    return run(phase("hard"), phase("second"))


def test_every_item_has_its_own_end(hard: tuple[dict[str, Any], list[str]]) -> None:
    results, _ = hard
    assert {name: str(outcome["status"]) for name, outcome in results.items()} == {
        "first": "passed", "wrong": "failed", "needs wrong": "skipped", "needs first": "passed", "error": "error",
        "lost": "error", "after lost": "passed", "dies": "died", "after death": "passed", "hangs": "timeout",
        "after hang": "passed", "absent": "absent", "sees": "passed", "needs the first phase's": "passed",
        "needs what failed there": "skipped",
    }  # fmt: skip


def test_evidence_is_kept_and_small(hard: tuple[dict[str, Any], list[str]]) -> None:
    results, lines = hard
    assert results["wrong"]["why"] == "three is not four"
    assert results["wrong"]["figures"]["evidence"] == [3, 4]
    assert results["wrong"]["figures"]["error"] == "inf", "JSON has no infinity"
    assert "ZeroDivisionError" in results["error"]["why"]
    assert "last words" in results["dies"]["why"]
    assert "longer than 0.5 s" in results["hangs"]["why"]
    assert len(json.dumps(results)) < 10_000
    assert len(lines) == len(results)


def test_a_lost_device_a_death_and_a_hang_each_take_a_new_process(hard: tuple[dict[str, Any], list[str]]) -> None:
    results, _ = hard
    pids = [results[name]["figures"]["pid"] for name in ("first", "after lost", "after death", "after hang")]
    assert results["needs first"]["figures"]["pid"] == pids[0]
    assert len(set(pids)) == 4


def test_a_later_phase_sees_what_failed(hard: tuple[dict[str, Any], list[str]]) -> None:
    assert hard[0]["sees"]["figures"]["failing"] == ["a::b"]


def test_a_lane_that_cannot_start_is_reported_and_the_next_runs() -> None:
    results, _ = run(phase("broken", "named b"))
    assert results[f"{LANES}broken"]["status"] is ItemStatus.DIED
    assert "a module is not there" in results[f"{LANES}broken"]["why"]
    assert results["item b"]["status"] == "passed"


def test_when_the_time_is_over_what_is_left_is_named(tmp_path: Path) -> None:
    began = time.monotonic()
    results, _ = run(
        phase("endless", "named b", seconds=9.0), phase("named c"), setting=replace(SETTING, out=str(tmp_path))
    )
    assert time.monotonic() - began < 60
    assert {name: str(outcome["status"]) for name, outcome in results.items()} == {
        "good": "passed", "waits": "timeout", "never": "not run", f"{LANES}named b": "not run", "item c": "passed",
    }  # fmt: skip
    assert not any(is_alive(int(pid)) for pid in (tmp_path / "started").read_text().split())


PARENT = """
import sys
from pathlib import Path
from bench.gpu import report
from bench.gpu.item import Phase, Setting, Stage
from bench.gpu.meter import Meter
from bench.gpu.run import run_stage
out = Path(sys.argv[1])
stage = Stage(name="x", what="", seconds=100, phases=(Phase(lanes=("tests.bench.gpu.lanes:endless",), seconds=90),))
setting = Setting(device="cpu", tiny=True, out=str(out))
save = lambda results: report.save(out / "x.json", {"device": None}, results)
run_stage(stage, setting, save, print, Meter(program="no-such-program"))
"""


def test_a_command_that_is_killed_leaves_what_it_found_and_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    parent = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(ROOT)})
    started = tmp_path / "started"
    wait_for(lambda: started.exists() and len(started.read_text().split()) == 2 and (tmp_path / "x.json").exists())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["items"]["good"]["status"] == "passed"
    assert found["counts"] == {"passed": 1}
    pids = [int(pid) for pid in started.read_text().split()]
    wait_for(lambda: not any(is_alive(pid) for pid in pids))


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def test_the_stages_fit_a_lease() -> None:
    assert list(STAGES) == ["correctness", "shapes", "engine", "start", "lossless", "variants", "tools"]
    assert all(stage.seconds <= 480 for stage in STAGES.values())
    assert sum(STAGES[name].seconds for name in ("correctness", "shapes", "engine")) <= 25 * 60
    assert len(STAGES) <= 8, "a file each comes back, and no more than eight"


def test_every_file_with_gpu_tests_is_run() -> None:
    marked = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests/tandem_worker").rglob("test_*.py"))
        if "on_device" in path.parts or "mark.gpu" in path.read_text()
    ]
    using_devices = "tests/tandem_worker/model/test_served_steps.py"  # marked through another file's parameters
    assert sorted(GPU_TESTS) == sorted({*marked, using_devices})


def test_the_table_ends_with_what_is_wrong(hard: tuple[dict[str, Any], list[str]]) -> None:
    stage = Stage(name="x", what="", seconds=1, phases=())
    header = report.describe_run(stage, SETTING)
    lines = report.build_table(header, hard[0])
    assert header["dry_run"]
    assert len(header["sources"]) == 16
    assert "7 passed" in lines[-8]
    assert "three is not four" in "".join(lines[-7:])
    assert all(len(line) < 260 for line in lines)


def test_clocks_are_told_where_the_driver_tells_them(tmp_path: Path) -> None:
    assert parse("1980, 3201, 512.5, [N/A]") == [1980.0, 3201.0, 512.5, None]
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\nfor watts in 300 500 400; do echo "1980, 3201, $watts, 50"; done; sleep 60\n')
    program.chmod(0o755)
    began = time.time()
    with Meter(program=str(program)) as meter:
        wait_for(lambda: len(meter._samples) == 3)
        seen = meter.between(began, time.time())
    assert seen == {"sm_mhz": 1980, "memory_mhz": 3201, "watts": 400, "most_watts": 500, "celsius": 50}
    assert meter.between(0.0, 1.0) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corectness", "--out", "x"], "there is no stage 'corectness'"),
        (["--device", "cpu", "--out", "x"], "tiny shapes only"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(arguments: list[str], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    child = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert child.returncode == 2
    assert message in child.stderr
