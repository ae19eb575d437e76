"""Worker processes that end, and others that begin where they were: what of their caches is on their disks."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tandem_worker.process.conftest import WorkerProcess, await_ready
from tests.tandem_worker.process.test_disaggregated import prompt_of

BLOCK, LENGTH, ANSWER = 16, 200, 8
PROMPTS = [prompt_of(LENGTH, seed=500 + number) for number in range(10)]
WHOLE = len(PROMPTS) * (LENGTH // BLOCK * BLOCK)
"""Tokens of the prompts' full blocks; the answers fill none."""


@contextmanager
def run(workers: SimpleNamespace, folder: Path, model: Path, *, write_through: bool) -> Iterator[WorkerProcess]:
    disk = {"path": str(folder / "disk"), "sizeBytes": 64 << 20, "writeThrough": write_through}
    Path(disk["path"]).mkdir(exist_ok=True)
    with workers.run(folder, "unified", model, kv={"memoryBytes": 32 << 20, "disk": disk}) as worker:
        await_ready(worker)
        workers.eventually(
            lambda: worker.metric("tandem_worker_kv_tier_ready", tier="disk") == 1, 60, "it has its disk"
        )
        yield worker


def ask(worker: WorkerProcess, prompt: list[int]) -> list[int]:
    answer = worker.complete(prompt, max_tokens=ANSWER, ignore_eos=True, return_token_ids=True)
    return answer["choices"][0]["token_ids"]


def stored(worker: WorkerProcess) -> float:
    return worker.metric("tandem_worker_kv_tier_stored_tokens", tier="disk")


@pytest.mark.parametrize(("number", "write_through"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_the_next_process_has_what_was_cached(
    workers: SimpleNamespace, tiny_model: Path, tmp_path: Path, number: int, write_through: bool
) -> None:
    """After SIGTERM everything that was in memory; after SIGKILL what was written, and that is all where it is written
    through. Whether a block comes in time is the machine's doing: answers are the same either way."""
    with run(workers, tmp_path, tiny_model, write_through=write_through) as first:
        answers = [ask(first, prompt) for prompt in PROMPTS]
        if write_through:
            workers.eventually(lambda: stored(first) >= WHOLE, 60, "everything idle is written")
        else:
            assert stored(first) < WHOLE // 2, "memory suffices: nearly nothing is written before the end"
        workers.end(first, number)
        assert first.process.wait(60) in (0, -number)
    with run(workers, tmp_path, tiny_model, write_through=write_through) as second:
        assert stored(second) >= 0.95 * WHOLE
        assert [ask(second, prompt) for prompt in PROMPTS] == answers
        assert second.metric("tandem_worker_kv_integrity_failures_total", kind="tier") == 0
