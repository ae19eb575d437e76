"""What waits for what in a start that is planned for a GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

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
from tandem_worker.process.worker import Worker

from tests.tandem_worker.model.checkpoint.test_image import HostMemory, read
from tests.tandem_worker.process.test_known import compile_into, open_kernels
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


@pytest.mark.parametrize(("loaded", "kept"), [(300, 300), (-5, 0), (9 << 30, 1 << 30)])
def test_what_the_largest_step_loads_has_its_place_where_it_is_not_run(
    tmp_path: Path, loaded: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are given what is free, and libraries that a step which was believed has not loaded come later."""
    monkeypatch.setattr("tandem_worker.engine.execute.arena.measure_arena", lambda *_, **__: 1000)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"w")
    arenas = []
    for name in ("one", "two"):
        start, _ = plan(tmp_path, "CUDA")
        start._kernels = open_kernels(start._store, tmp_path / name)
        compile_into(tmp_path / name, "AAAA")
        seen = iter((50, 50 + loaded))
        ledger = MemoryLedger(on_gpu=True)
        monkeypatch.setattr(MemoryLedger, "observe_other", lambda _, seen=seen: next(seen))
        model = SimpleNamespace(device=torch.device("cuda"))
        arenas.append(start._measure_arena(model, ledger, tmp_path))  # type: ignore[arg-type]
        assert ledger.by_kind["arena"] == 1000
        assert start._kernels.save()
        assert start._known is not None
        start._known.save()
    assert arenas == [1000, 1000 + kept]


def test_recordings_wait_for_the_first_answer_not_for_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.process.worker._FIRST_ANSWER_SECONDS", 30.0)
    tokens, looks = iter((1, 1, 1, 2)), list[int]()
    released: list[bool] = []

    def look() -> SimpleNamespace:
        looks.append(next(tokens))
        return SimpleNamespace(generated_tokens_total=looks[-1])

    engine = SimpleNamespace(stats=look, hold_recordings=lambda *, held: released.append(held))
    Worker._resume_recordings(SimpleNamespace(engine=engine))  # type: ignore[arg-type]
    assert looks == [1, 1, 1, 2]
    assert released == [False]
