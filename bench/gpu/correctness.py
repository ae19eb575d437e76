"""The machine, its ceilings, and the GPU tests: in parallel, and what fails once more with blocking launches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.item import Figures, Item, Setting, WrongError

ROOT = Path(__file__).parents[2]
_TEST_SECONDS = 260.0
_WORKERS = "3"
"""Of pytest-xdist in a file's process: a kernel compiles on one core."""
_TAIL = 1500
_SHOWN = 8
"""Failing tests whose message is kept, and that are run again."""
_PACKAGES = ("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "pytest", "hypothesis")


def machine_items(setting: Setting) -> Iterator[Item]:
    yield Item(name="versions", run=read_versions, seconds=60)
    yield Item(name="ceilings", run=lambda: measure_machine(setting), seconds=60)


def read_versions() -> Figures:
    """Software, and whether what the worker and the bundle ask for is there."""
    import torch
    import triton

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["torch cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
        }
    if unmet := find_unmet():
        raise WrongError(f"packages do not fit together: {'; '.join(unmet)}", {**found, "unmet": unmet})
    return found


def find_unmet() -> list[str]:
    """What the bundled packages ask for and is not there, in this process's own path."""
    from packaging.requirements import Requirement

    from bench.gpu.bundle import NEEDED  # the same closure as the bundle's

    unmet: list[str] = []
    for name in ("pydantic", "starlette", "uvicorn", "gguf", "pytest-asyncio", *NEEDED[1:]):
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            unmet.append(f"{name} is absent")
            continue
        for each in map(Requirement, lines):
            if each.marker is not None and not each.marker.evaluate({"extra": ""}):
                continue
            try:
                version = importlib.metadata.version(each.name)
            except importlib.metadata.PackageNotFoundError:
                unmet.append(f"{name} needs {each}, which is absent")
                continue
            if version not in each.specifier:
                unmet.append(f"{name} needs {each}, there is {version}")
    return unmet


def measure_machine(setting: Setting) -> Figures:
    """Copy and read-only bandwidth, and the matmul rate, on random data."""
    import torch

    from bench.kernels.measure import measure_ceilings, measure_read

    device = torch.device(setting.place)
    megabytes, side = (4, 128) if setting.tiny else (2048, 8192)
    ceilings = measure_ceilings(device, megabytes=megabytes, side=side)
    read = measure_read(device, megabytes=megabytes)
    return {
        "copy_tb_per_s": ceilings.copy_bytes_per_s / 1e12,
        "read_tb_per_s": read / 1e12,
        "read_to_copy": read / ceilings.copy_bytes_per_s,
        "matmul_tflop_per_s": ceilings.matmul_flops_per_s / 1e12,
    }


def test_items(setting: Setting, path: str) -> Iterator[Item]:
    """One file's GPU tests."""
    if setting.tiny and "test_device_blocks" not in path and "test_cuda_graphs" not in path:
        return
    yield Item(name=f"tests {path}", run=lambda: run_tests(setting, [path]), seconds=_TEST_SECONDS)


def blocking_items(setting: Setting) -> Iterator[Item]:
    """What failed, one test after another, each launch waited for: the error then names the launch that made it."""
    failing = [test for outcome in setting.results.values() for test in outcome.get("failing", [])]
    for test in failing[:_SHOWN]:
        yield Item(
            name=f"blocking {test}", seconds=60.0,
            run=lambda test=test: run_tests(setting, [test], {"CUDA_LAUNCH_BLOCKING": "1"}),
        )  # fmt: skip


def run_tests(setting: Setting, tests: list[str], environment: dict[str, str] | None = None) -> Figures:
    """Run them in a process of their own. The machine's other pytest plugins and library versions are not judged."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "found.xml")
        whole_file = "::" not in tests[0]
        spread = ["-n", _WORKERS] if setting.device == "cuda" and whole_file and find_spec("xdist") else []
        command = [
            sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--timeout", str(int(_TEST_SECONDS)), "-W", "default",
            "-p", "no:cacheprovider", "-p", "no:benchmark", "--tb=short", f"--junitxml={found}", *spread, *tests,
        ]  # fmt: skip
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | (environment or {}), capture_output=True, text=True, check=False
        )
        figures = read_outcomes(found) if found.exists() else {"tests": 0, "failing": []}
    if setting.device != "cuda" and done.returncode in {0, 5}:
        return figures  # without a GPU they skip themselves
    if done.returncode or figures["passed"] == 0:
        why = f"{len(figures['failing'])} of {figures['tests']} fail, pytest ended with {done.returncode}"
        raise WrongError(why, {**figures, "tail": (done.stdout + done.stderr)[-_TAIL:]})
    return figures


def read_outcomes(path: Path) -> dict[str, Any]:
    """Counts, and what fails as pytest would be told to run it again, from a JUnit file."""
    cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    failing: list[str] = []
    messages: dict[str, str] = {}
    for case in cases:
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            name = test_id(case.get("classname", ""), case.get("name", ""))
            failing.append(name)
            if len(messages) < _SHOWN:
                messages[name] = (problem.text or problem.get("message") or "")[-600:]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "tests": len(cases),
        "passed": len(cases) - skipped - len(failing),
        "skipped": skipped,
        "failing": failing,
        "messages": messages,
    }


def test_id(classname: str, name: str) -> str:
    """`tests/a/test_b.py::test_c[d]` from JUnit's `tests.a.test_b` and `test_c[d]`."""
    return f"{classname.replace('.', '/')}.py::{name}" if classname else name
