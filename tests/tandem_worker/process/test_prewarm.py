"""What is left in the cache by a process that only fills it, and what a worker makes of that."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tandem_api.keys import open_ring
from tandem_api.launch import ModelSource, WorkerConfig
from tandem_api.names import Role
from tandem_worker.host import caches
from tandem_worker.host.environment import PodFacts
from tandem_worker.host.errors import StartupError
from tandem_worker.host.runtime import Runtime
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.backends import native
from tandem_worker.model.prepared.reading import open_library
from tandem_worker.process.build import list_start_steps
from tandem_worker.process.graph import run_steps
from tandem_worker.process.prewarm import _STEPS, prewarm
from tandem_worker.process.progress import StartProgress


def facts(folder: Path) -> PodFacts:
    termination = folder / "termination"
    termination.touch()
    return PodFacts(
        pod="x", namespace="n", pod_ip="127.0.0.1", token=None, log_level="INFO", termination_path=termination
    )


def config(model: Path, cache: Path) -> WorkerConfig:
    source = ModelSource(uri=f"file://{model}", cache_dir=str(cache))
    return WorkerConfig(
        model_name="m", served_name="m", role=Role.UNIFIED, revision="r", model=source, device="CPU", dtype="BFloat16"
    )


def run(model: Path, folder: Path, part: str) -> dict[str, str]:
    """On a thread of its own, which ends: what computes must not leave helpers. Returns what the kubelet is told."""
    pod = facts(folder)
    thread = threading.Thread(target=prewarm, args=(config(model, folder / "cache"), pod, part))
    thread.start()
    thread.join()
    return json.loads(pod.termination_path.read_text())


@pytest.mark.skipif(native.find_obstacle() is not None or open_library() is None, reason="oneDNN packs weights here")
def test_a_start_finds_the_weights_that_were_prepared(tiny_model: Path, tmp_path: Path) -> None:
    told = run(tiny_model, tmp_path, "weights")
    assert told == {"reason": "Prewarmed", "message": "The cache has files, tokenizer and weights."}
    (copy,) = (tmp_path / "cache" / ".prepared").glob("weights-*")
    made = copy.stat().st_ino
    run(tiny_model, tmp_path, "weights")
    assert copy.stat().st_ino == made, "a second one reads what is there"
    runtime, progress = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals()), StartProgress()
    every = list_start_steps(config(tiny_model, tmp_path / "cache"), facts(tmp_path), runtime, progress)
    needed = {"fetch", "hashing", "digest", "seat", "prepared"}
    prepared = run_steps([step for step in every if step.name in needed], progress)["prepared"]
    assert prepared.found
    prepared.finish()


@pytest.mark.skipif(native.find_lossless_obstacle() is not None, reason="no kernels of 12 bits here")
def test_workers_with_other_caches_and_quotas_find_the_copies(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form alone is in a copy's name, not what it was chosen by."""

    def copies(cache_bytes: int) -> dict[str, int]:
        monkeypatch.setattr(caches, "add_caches", lambda *_: cache_bytes)
        caches.observe_cache_bytes.cache_clear()
        run(tiny_model, tmp_path, "weights")
        return {each.name: each.stat().st_ino for each in (tmp_path / "cache" / ".prepared").glob("weights-*")}

    packed = copies(0)
    assert len(packed) == 1
    assert copies(1) == packed
    both = copies(1 << 40)
    assert len(both) == 2, "of a model that stays in the caches a plain one"
    assert both.items() > packed.items()
    assert copies(2) == copies(1 << 41) == both
    monkeypatch.undo()
    caches.observe_cache_bytes.cache_clear()


def test_without_weights_nothing_of_them_is_read(tiny_model: Path, tmp_path: Path) -> None:
    assert run(tiny_model, tmp_path, "files")["message"] == "The cache has files and tokenizer."
    assert not list(tmp_path.rglob("weights-*"))


@pytest.mark.parametrize("part", ["files", "weights"])
def test_what_it_takes_of_a_start_needs_nothing_else(tiny_model: Path, tmp_path: Path, part: str) -> None:
    runtime, progress = Runtime(host="127.0.0.1", peers=open_ring, api=open_ring, vitals=Vitals()), StartProgress()
    every = {s.name: s for s in list_start_steps(config(tiny_model, tmp_path), facts(tmp_path), runtime, progress)}
    taken = _STEPS["files" if part == "files" else "weights"]
    assert taken - every.keys() <= {"image"}, "a step of GPUs alone"
    taken &= every.keys()
    assert all(taken.issuperset(every[name].needs) for name in taken)


def test_a_model_that_is_not_there_is_told_as_a_start_does(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        prewarm(config(tmp_path / "nowhere", tmp_path / "cache"), facts(tmp_path), "files")
