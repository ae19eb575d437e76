"""The kernel benchmark without a GPU: it imports, covers every operation and says what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tandem_worker import kernels

from bench.kernels.cases import THEMES
from bench.kernels.measure import Result

ROOT = Path(__file__).parents[3]


def test_every_operation_has_an_entry():
    source = (ROOT / "bench/kernels/cases.py").read_text()
    assert [name for name in kernels.__all__ if f"kernels.{name}" not in source] == []
    assert THEMES


def test_every_operation_has_a_twin_and_a_line_in_the_table():
    for name in kernels.__all__:
        assert hasattr(kernels.reference, f"{name}_reference")
        assert f"{name}(" in (kernels.__doc__ or "")


def test_achieved_is_the_share_of_the_limit():
    result = Result(
        name="x",
        microseconds=20.0,
        gigabytes_per_s=1.0,
        teraflops_per_s=0.0,
        limit_microseconds=15.0,
        bound_by="memory",
    )
    assert result.achieved == 0.75


@pytest.mark.timeout(300)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_that_it_needs_a_gpu():
    child = subprocess.run(
        [sys.executable, "-m", "bench.kernels"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 2
    assert "needs a CUDA device" in child.stderr
