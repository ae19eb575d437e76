"""Runs the tests of `on_device/` in Triton's interpreter, in a process of their own.

Triton decides at import whether kernels are compiled or interpreted, and this process may have imported it already.
One child runs all files, and two whole models, since it takes five seconds of a core to begin; each file is a test
here, so that a failure names its theme.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
MODEL = HERE.parent / "model"
MODELS = {
    "test_backends": f"{MODEL}/backends/test_backends.py::test_backends_agree[deepseek-cpu]",
    "test_triton": f"{MODEL}/lossless/test_triton.py::test_answers_are_those_of_plain_weights[llama]",
}
"""Other families in the interpreter: `test_backends_interpreted.py` and `lossless/test_triton.py`, in the full run."""
QUICK_INTERPRETER = ("-p", "tests.tandem_worker.kernels.quick_interpreter")
FILES = [*sorted(path.stem for path in (HERE / "on_device").glob("test_*.py")), *MODELS]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, request) -> tuple[dict[str, list[str]], str]:
    """Outcomes per file of one interpreted run, and its output."""
    report = tmp_path_factory.mktemp("interpreter") / "report.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    selected = request.config.getoption("markexpr") or "not full"
    tests = [str(HERE / "on_device"), *MODELS.values()]
    command = [sys.executable, "-m", "pytest", *tests, "-q", *QUICK_INTERPRETER, f"--junitxml={report}", "-m", selected]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    outcomes: dict[str, list[str]] = {name: [] for name in FILES}
    if report.exists():
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            name = case.get("classname", "").rpartition(".")[2]
            failed = case.find("failure") is not None or case.find("error") is not None
            skipped = case.find("skipped") is not None
            outcomes.setdefault(name, []).append("failed" if failed else "skipped" if skipped else "passed")
    return outcomes, child.stdout + child.stderr


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", FILES)
def test_kernels_match_their_twins_in_the_interpreter(outcome, name):
    outcomes, output = outcome
    assert "failed" not in outcomes[name], output
    assert "passed" in outcomes[name], f"nothing ran in {name}:\n{output}"
