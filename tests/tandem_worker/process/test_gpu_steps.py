"""What waits for what in a start that is planned for a GPU."""

from __future__ import annotations

from pathlib import Path

from tandem_api.keys import open_ring
from tandem_api.launch import Device
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.process.build import _Start
from tandem_worker.process.graph import Step, check_steps
from tandem_worker.process.prewarm import _STEPS
from tandem_worker.process.progress import StartProgress, Switches
from tandem_worker.process.standby import Standby

from tests.tandem_worker.process.test_prewarm import config, facts


def plan(folder: Path, device: Device, *, standby: bool = False) -> dict[str, Step]:
    runtime, progress = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals()), StartProgress()
    document = config(folder, folder).model_copy(update={"device": device})
    door = Standby(progress, lambda: True, lambda: None) if standby else None
    start = _Start(document, facts(folder), runtime, progress, Switches(), None, {}, door)
    steps = start.list_steps()
    check_steps(steps)
    return {step.name: step for step in steps}


def find_needs(steps: dict[str, Step], name: str) -> set[str]:
    """All that has ended before a step begins."""
    return {each for need in steps[name].needs for each in (need, *find_needs(steps, need))}


def test_weights_wait_for_no_digest_and_are_read_before_torch_is_there(tmp_path: Path) -> None:
    steps = plan(tmp_path, "CUDA")
    assert "digest" not in find_needs(steps, "weights")
    assert "libraries" not in find_needs(steps, "image")
    assert "image" in steps["weights"].needs
    assert "digest" in find_needs(steps, "engine")
    assert _STEPS["weights"] <= steps.keys()
    assert all(_STEPS["weights"].issuperset(steps[name].needs) for name in _STEPS["weights"])


def test_nothing_of_the_models_size_is_taken_on_standby(tmp_path: Path) -> None:
    steps = plan(tmp_path, "CUDA", standby=True)
    assert "standby" in find_needs(steps, "image")
    assert "standby" in find_needs(steps, "weights")
    assert not {"image", "weights", "arena", "engine"} & find_needs(steps, "standby")


def test_a_cpu_finds_prepared_weights_by_the_digest(tmp_path: Path) -> None:
    steps = plan(tmp_path, "CPU")
    assert "image" not in steps
    assert "digest" in find_needs(steps, "weights")
