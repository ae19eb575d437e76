"""Workers that are killed at any moment, over one folder: the next one starts, finds a part, and says nothing wrong."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.tandem_worker.engine.history_model import greedy_answer
from tests.tandem_worker.tiers.rig import DiskRig, wait_until
from tests.tandem_worker.tiers.test_disk import make_prompt

PROMPTS = [make_prompt(seed, 45) for seed in range(8)]
OPTIONS = {"num_blocks": 48, "size": 1 << 20, "write_through": True}


def work_until_killed(folder: Path, seed: int, told: int) -> None:
    """In a process of its own. It is ended from outside, or ends with what it found to be wrong. To `told` it says that
    it has written something."""
    torch.set_num_threads(1)
    rng, number = random.Random(seed), 0
    rig = DiskRig(folder, **OPTIONS)  # type: ignore[arg-type]
    while True:
        prompt = rng.choice(PROMPTS)
        if rig.run(f"r{number}", prompt, max_tokens=2) != greedy_answer(prompt, 2):
            os._exit(3)
        if told >= 0 and (rig.written or rig.tier.stats().tokens_read):
            os.write(told, b".")
            os.close(told)
            told = -1
        number += 1


def kill_again_and_again(folder: Path, count: int, seed: int) -> None:
    rng = random.Random(seed)
    for turn in range(count):
        heard, told = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                work_until_killed(folder, rng.randrange(1 << 30) + turn, told)
            finally:
                os._exit(4)
        os.close(told)
        if turn % 2:
            os.read(heard, 1)
        os.close(heard)
        time.sleep(rng.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"kill {turn}: a worker ended by itself with {os.WEXITSTATUS(status)}"
    rig = DiskRig(folder, **OPTIONS)  # type: ignore[arg-type]
    for number, prompt in enumerate(PROMPTS):
        assert rig.run(f"r{number}", prompt, max_tokens=2) == greedy_answer(prompt, 2)
    wait_until(lambda: rig.tier.health.on)
    stats = rig.tier.stats()
    assert stats.integrity_failures == 0, "the machine lost nothing, so nothing is torn that has a name"
    assert stats.tokens_read > 0
    rig.close()
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 1 << 20
    assert not list(folder.rglob("*.new"))


def test_killed_workers_leave_nothing_wrong(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 20, seed=1)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_kills(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 1000, seed=2)
