"""Runs `test_backends.py` in Triton's interpreter: the kernels themselves, in whole models, without a GPU.

In a process of its own, because Triton decides at import; one child runs all families that are asked for. All of them
belong to the full run but one, which `kernels/test_interpreter.py` runs beside the kernels.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tandem_worker.kernels.test_interpreter import QUICK_INTERPRETER
from tests.tandem_worker.model.backends.test_backends import CASES

FILE = Path(__file__).with_name("test_backends.py")


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> str:
    """What the child says about the selected families, a line each."""
    families = [item.callspec.params["family"] for item in request.session.items if item.path == request.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    tests = [f"{FILE}::test_backends_agree[{family}-cpu]" for family in families]
    command = [sys.executable, "-m", "pytest", *tests, "-v", *QUICK_INTERPRETER, "-p", "no:cacheprovider"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    return child.stdout + child.stderr


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in CASES if family != "deepseek"])
def test_models_agree_in_the_interpreter(family: str, report: str) -> None:
    assert f"[{family}-cpu] PASSED" in report, report
