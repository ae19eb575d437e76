"""What torch is after parts of it were left for later, against torch that was imported whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.host import postponed

from tests.tandem_worker.process.forking import Forker

PROBE = """
import importlib, json, os, sys
from tandem_worker.host import postponed
began = postponed.postpone_imports(os.environ)
import torch
modules = sorted(sys.modules)
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
def is_left(name):
    return type(sys.modules[name]) is postponed.Postponed
left = [name for name in postponed.POSTPONED if is_left(name)]
postponed.load_shape_functions()
import torch._decomp as decomp
def registered(key):
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key))
empty = torch.empty(4, 4, device="meta")
mask = torch.tensor([True, False])
print(json.dumps({
    "began": began, "modules": modules, "left": left,
    "registered": {key: registered(key) for key in ("Meta", "Autograd", "CompositeImplicitAutograd")},
    "tables": [len(decomp.meta_table), len(decomp.decomposition_table)],
    "same": all(sys.modules[name].__spec__.name == name and sys.modules[name].__spec__.has_location
                and getattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2]) is sys.modules[name]
                for name in ("torch._refs", "torch._prims", *postponed.POSTPONED)),
    "shapes": [list(torch.fft.fft(empty).shape), list(torch.cdist(empty, empty).shape)],
    "used": [torch.distributions.Categorical(torch.ones(1)).sample().item(),
             len(list(torch.utils.data.DataLoader([1, 2, 3]))),
             torch.masked.sum(torch.ones(2), mask=mask).item(),
             "Normal" in dir(torch.distributions)],
    "still": [name for name in postponed.POSTPONED if is_left(name)],
}))
"""

ALL = ("torch._dynamo", "torch._refs", "torch.export", "torch.distributed", "torch.distributed.tensor")
"""Whoever imports all these needs seconds."""


def probe(*first: str, **environment: str) -> dict[str, Any]:
    """What a process says that imports these after torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(first)],
        check=False,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def compare(first: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    part, whole = probe(*first), probe(*first, TANDEM_POSTPONED_IMPORTS="0")
    assert (part["began"], whole["began"]) == (True, False)
    assert not set(part["modules"]) - set(whole["modules"])
    for key in ("registered", "tables", "shapes"):
        assert part[key] == whole[key]
    assert part["used"] == whole["used"] == [0, 3, 1.0, True]
    assert part["same"]
    assert whole["same"]
    assert part["still"] == []
    return part, whole


def test_what_is_left_comes_when_it_is_asked_for() -> None:
    part, whole = compare(("torch._refs", "torch.export", "torch.distributed"))
    assert "torch._meta_registrations" not in part["left"], "the references bring the shapes"
    left = set(whole["modules"]) - set(part["modules"])
    assert len(left) > 100
    own = tuple(f"{name}." for name in (*postponed.POSTPONED, *postponed._REFERENCES))
    leaves = {"torch.testing._internal.common_dtype", "torch.utils._import_utils"}  # import nothing of torch but itself
    unknown = {name for name in left if name not in postponed._REFERENCES | leaves and not name.startswith(own)}
    assert not unknown, "these are imported through the registrations of shapes alone: they belong to _REFERENCES"


COVERAGE = """
import sys
from types import SimpleNamespace
import torch
assert "torch._refs" not in sys.modules
from tandem_worker.model.coverage import check_coverage
def load(config, build):
    torch.fft.fft(torch.empty(4, device=build.loader.device))
source = SimpleNamespace(names=lambda: [])
config = SimpleNamespace(tie_word_embeddings=False, embedding=None, quantization=None)
check_coverage(config, SimpleNamespace(load=load, ignorable=lambda config: {}), source, "")
assert "torch._refs" in sys.modules
"""


def test_a_model_that_computes_with_its_weights_while_they_are_loaded_is_checked(
    forker: Forker, tmp_path: Path
) -> None:
    """In a process that has left the same parts of torch out, as a worker has."""
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(COVERAGE)
    assert forker.start([], os.environ, log, program=program).wait(60) == 0, log.read_text()[-3000:]


@pytest.mark.full
@pytest.mark.parametrize(
    "first",
    [",".join(ALL), "torch._refs", "torch._refs.nn.functional", "torch._prims", "torch._prims.rng_prims",
     "torch._decomp", "torch._decomp.decompositions", "torch._meta_registrations", "torch.utils._content_store",
     "torch.export", "torch._inductor.compile_fx", "torch.distributed.tensor", "torch._subclasses.fake_tensor",
     "torch._functorch.aot_autograd", "torch.fx.experimental.symbolic_shapes", "torch.onnx",
     "torch.distributions.normal", "torch.utils.data.dataloader", "torch.masked.maskedtensor", "torch._dynamo",
     "torch.testing._internal.common_dtype", "torch.distributed._functional_collectives"],
)  # fmt: skip
def test_whatever_is_imported_first(first: str) -> None:
    compare(tuple(first.split(",")))


def test_another_release_is_imported_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    caplog.set_level("INFO")
    for text, release in (("__version__ = '2.11.0'", "2.11"), ("__version__ = '2.150.1'", "2.150"), ("", "None")):
        (tmp_path / "torch" / "version.py").write_text(text)
        caplog.clear()
        assert not postponed.postpone_imports({})
        assert f"torch {release} is imported whole" in caplog.text
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{postponed.CHECKED[0]}.3+cpu'")
    assert not postponed.postpone_imports({"TANDEM_POSTPONED_IMPORTS": "0"})
    assert postponed.postpone_imports({})
    assert not postponed.postpone_imports({}), "once is enough"
    for name in postponed.POSTPONED:
        assert sys.meta_path[0].find_spec(name, [str(tmp_path / "torch")], None) is None, "absent: nothing is done"
