"""What waits for what in a start that is planned for a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tandem_api.keys import open_ring
from tandem_api.launch import Device
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.process.build import _Start
from tandem_worker.process.graph import Step, check_steps
from tandem_worker.process.memory import MemoryLedger
from tandem_worker.process.prewarm import _STEPS
from tandem_worker.process.progress import StartProgress, Switches
from tandem_worker.process.standby import Standby

from tests.tandem_worker.model.checkpoint.test_image import HostMemory, read
from tests.tandem_worker.process.test_prewarm import config, facts


def plan(folder: Path, device: Device, *, standby: bool = False) -> tuple[_Start, dict[str, Step]]:
    runtime, progress = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals()), StartProgress()
    document = config(folder, folder).model_copy(update={"device": device})
    door = Standby(progress, lambda: True, lambda: None) if standby else None
    start = _Start(document, facts(folder), runtime, progress, Switches(), None, {}, door)
    steps = start.list_steps()
    check_steps(steps)
    return start, {step.name: step for step in steps}


def find_needs(steps: dict[str, Step], name: str) -> set[str]:
    """All that has ended before a step begins."""
    return {each for need in steps[name].needs for each in (need, *find_needs(steps, need))}


def test_weights_wait_for_no_digest_and_are_read_before_torch_is_there(tmp_path: Path) -> None:
    _, steps = plan(tmp_path, "CUDA")
    assert "digest" not in find_needs(steps, "weights")
    assert "libraries" not in find_needs(steps, "image")
    assert "image" in steps["weights"].needs
    assert "digest" in find_needs(steps, "engine")
    assert _STEPS["weights"] <= steps.keys()
    assert all(_STEPS["weights"].issuperset(steps[name].needs) for name in _STEPS["weights"])


def test_nothing_of_the_models_size_is_taken_on_standby(tmp_path: Path) -> None:
    _, steps = plan(tmp_path, "CUDA", standby=True)
    assert "standby" in find_needs(steps, "image")
    assert "standby" in find_needs(steps, "weights")
    assert not {"image", "weights", "arena", "engine"} & find_needs(steps, "standby")


def test_a_cpu_finds_prepared_weights_by_the_digest(tmp_path: Path) -> None:
    _, steps = plan(tmp_path, "CPU")
    assert "image" not in steps
    assert "digest" in find_needs(steps, "weights")


def test_a_gpu_that_torch_cannot_use_is_left_alone(tiny_model: Path, tmp_path: Path) -> None:
    """Auto computes on the CPU then, though the driver has taken the weights."""
    memory = HostMemory()
    image = read(memory, [tiny_model / "model.safetensors"])
    assert memory.num_bytes
    start, _ = plan(tmp_path, "Auto")
    ledger = MemoryLedger(on_gpu=False)
    model = start._load_weights(tiny_model, torch.device("cpu"), None, None, ledger, image)
    assert not memory.num_bytes
    assert ledger.image is None
    assert model.device.type == "cpu"


@pytest.mark.parametrize("device", ["CPU", "CUDA"])
def test_threads_take_turns_faster_while_a_gpu_starts(tmp_path: Path, device: Device) -> None:
    start, _ = plan(tmp_path, device)
    usual = sys.getswitchinterval()
    with start.sharing_interpreter():
        assert (sys.getswitchinterval() < usual) == (device == "CUDA")
    assert sys.getswitchinterval() == usual
