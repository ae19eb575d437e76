"""The kernel benchmark without a GPU: it imports, covers every operation and says what it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels import split_merge
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.jit import JITFunction

from bench.kernels.__main__ import main, write
from bench.kernels.case import TINY, Place
from bench.kernels.cases import THEMES
from bench.kernels.measure import Result


def test_every_operation_has_an_entry():
    place = Place(device=torch.device("cpu"), sizes=TINY)
    named = {case.name.split()[0] for build in THEMES.values() for case in build(place)}
    assert named == set(kernels.__all__)


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


REPORT: dict[str, object] = {
    "device": "NVIDIA H200 (141 GB)",
    "date": "2031-02-03",
    "ceilings": {"copy_bytes_per_s": 4.1e12, "matmul_flops_per_s": 7e14},
    "kernels": [
        {"name": "a & b", "achieved": 0.5, "bound_by": "memory"},
        {"name": "c", "achieved": 1.3, "bound_by": "arithmetic"},
    ],
}


def test_results_are_named_after_device_and_date_and_drawn(tmp_path: Path):
    path = write(REPORT, "{}", tmp_path / "new")
    assert path.name == "kernels-nvidia-h200-141-gb-2031-02-03.json"
    bars = [
        element
        for element in ElementTree.parse(path.with_suffix(".svg")).getroot().iter("{http://www.w3.org/2000/svg}rect")
        if element.get("x") == "420" and element.get("height") == "13"
    ]
    assert [float(bar.get("width", 0)) for bar in bars] == [210.0, 462.0]


@pytest.mark.parametrize("theme", THEMES)
def test_every_case_can_be_built_and_run(theme: str, monkeypatch: pytest.MonkeyPatch):
    """On tensors without content: shapes and dtypes pass the checks of the operations, which launch nothing here."""
    monkeypatch.setattr(JITFunction, "run", lambda *args, **options: None)
    monkeypatch.setattr(split_merge, "_num_multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        for case in THEMES[theme](Place(device=torch.device("cuda"))):
            assert case.bytes > 0
            case.run(*case.make())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", ["bench.kernels"])
    assert main() == 2
    assert "needs a CUDA device" in capsys.readouterr().err
