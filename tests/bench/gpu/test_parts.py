"""Parts of the stages that need a GPU or its tools to run: with programs that answer as those do."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from bench.gpu import tools
from bench.gpu.correctness import blocking_items, find_unmet, run_tests
from bench.gpu.engine import steady_rate
from bench.gpu.item import AbsentError, Setting, WrongError
from bench.gpu.shapes import build_place, cases_of
from bench.gpu.stages import CHECKS
from bench.gpu.variants import launch_options
from bench.kernels.cases import THEMES

CPU = Setting(device="cpu", tiny=True)
GPU = Setting(device="cuda", tiny=True)
TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_good(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == 2, os.environ.get("CUDA_LAUNCH_BLOCKING", "not blocking")
def test_skipped(): pytest.skip("no")
"""


def program(folder: Path, name: str, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_failing_tests_are_named_and_run_again_with_blocking_launches(tmp_path: Path) -> None:
    path = tmp_path / "test_three.py"
    path.write_text(TESTS)
    with pytest.raises(WrongError, match="1 of 4 fail") as caught:
        run_tests(CPU, [str(path)])
    found = caught.value.figures
    assert (found["tests"], found["passed"], found["skipped"]) == (4, 2, 1)
    assert [name.rsplit("/", 1)[-1] for name in found["failing"]] == ["test_three.py::test_bad[1]"]
    assert "not blocking" in next(iter(found["messages"].values()))
    again = list(
        blocking_items(Setting(device="cpu", tiny=True, results={"tests x": {"failing": [f"{path}::test_bad[1]"]}}))
    )
    assert len(again) == 1
    with pytest.raises(WrongError) as caught:
        again[0].run()
    assert "AssertionError: 1" in next(iter(caught.value.figures["messages"].values()))


def test_tests_that_all_skip_themselves_are_wrong_on_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "test_one.py"
    path.write_text("import pytest\n@pytest.mark.gpu\ndef test_it(): pytest.skip('no device')\n")
    assert run_tests(CPU, [f"{path}::test_it"])["skipped"] == 1
    with pytest.raises(WrongError):
        run_tests(GPU, [f"{path}::test_it"])


def test_packages_here_fit_together() -> None:
    assert find_unmet() == []


def test_all_cases_are_checked() -> None:
    place = build_place(CPU)
    checked = [case.name for theme in CHECKS for case in cases_of(theme, place)]
    assert sorted(checked) == sorted(case.name for build in THEMES.values() for case in build(place))


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        ("echo '========= ERROR SUMMARY: 0 errors'", None),
        (
            "echo '========= Invalid __global__ read of size 4'; echo '========= ERROR SUMMARY: 2 errors'; exit 9",
            WrongError,
        ),
        ("echo 'Device not supported'; exit 1", RuntimeError),
    ],
)
def test_what_a_checker_says(lines: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "compute-sanitizer", lines, monkeypatch)
    if wrong is None:
        assert tools.run_checker(GPU, "memcheck", "decode") == {"errors": 0}
    else:
        with pytest.raises(wrong):
            tools.run_checker(GPU, "memcheck", "decode")


COUNTED = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","_merge_splits_kernel","gpu__time_duration.sum","ns","2,100"
"1","7","_paged_decode_attention_kernel","gpu__time_duration.sum","ns","41,300"
"1","7","_paged_decode_attention_kernel","dram__throughput.avg.pct_of_peak_sustained_elapsed","%","71.5"
"1","7","_paged_decode_attention_kernel","sm__warps_active.avg.pct_of_peak_sustained_active","%","n/a"
"""


def test_counters_are_of_the_longest_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out.csv").write_text(COUNTED)
    program(tmp_path, "ncu", f"cat {tmp_path}/out.csv", monkeypatch)
    found = tools.count(GPU, "paged_decode_attention")
    assert found["kernel"] == "_paged_decode_attention_kernel"
    assert (found["nanoseconds"], found["memory_percent"], found["occupancy_percent"]) == (41300, 71.5, None)
    program(
        tmp_path, "ncu", "echo '==ERROR== Failed to initialize the profiler: LibraryNotLoaded'; exit 1", monkeypatch
    )
    with pytest.raises(RuntimeError, match="LibraryNotLoaded"):
        tools.count(GPU, "paged_decode_attention")


def test_a_tool_that_is_not_there_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.shutil, "which", lambda name, path=None: None)
    with pytest.raises(AbsentError, match="ncu is not installed"):
        tools.count(GPU, "x")


def test_counters_go_to_the_cases_furthest_from_their_limit(tmp_path: Path) -> None:
    items = {
        f"time {name}": {"status": "passed", "figures": {"ratio": ratio, "us": 100.0}}
        for name, ratio in (("a", 0.9), ("b", 0.1), ("c", 0.5), ("d", 0.3))
    }
    items["time tiny"] = {"status": "passed", "figures": {"ratio": 0.01, "us": 2.0}}
    items["time wrong"] = {"status": "skipped", "figures": None}
    (tmp_path / "shapes.json").write_text(json.dumps({"items": items}))
    assert tools.find_worst(Setting(device="cuda", tiny=False, out=str(tmp_path))) == ["b", "d", "c"]
    assert tools.find_worst(Setting(device="cuda", tiny=False, out=str(tmp_path / "none"))) == list(tools.FALLBACK)


def test_a_variant_changes_the_launch_of_its_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        JITFunction, "run", lambda self, *args, **told: seen.append((self.__name__, told["num_stages"]))
    )
    kernels = [object.__new__(JITFunction) for _ in range(2)]
    for kernel, name in zip(kernels, ("_one_kernel", "_two_kernel"), strict=True):
        kernel.__name__ = name
    with launch_options("_one_kernel", {"num_stages": 7}):
        for kernel in kernels:
            kernel.run(num_stages=2)
    kernels[0].run(num_stages=2)
    assert seen == [("_one_kernel", 7), ("_two_kernel", 2), ("_one_kernel", 2)]


def test_the_rate_is_of_the_time_when_all_decode() -> None:
    events = [(0.0, "a", 1), (1.0, "a", 1), (2.0, "a", 1), (2.0, "b", 1), (3.0, "a", 1), (3.0, "b", 1)]
    events += [(4.0, "a", 1), (4.0, "b", 1), (9.0, "b", 1)]
    assert steady_rate(events) == 2.0
    with pytest.raises(RuntimeError, match="no token came"):
        steady_rate([(0.0, "a", 1), (1.0, "b", 1)])


def test_the_command_says_that_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is one")
    import sys

    command = [sys.executable, "-m", "bench.gpu", "--out", str(tmp_path)]
    child = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert child.returncode == 2
    assert "no GPU here" in child.stderr
