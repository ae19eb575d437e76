"""Greedy answers of a group of processes are those of one."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.engine.schedule.params import FinishReason, GenerationRequest, SamplingParams

StartGroup = Callable[..., AbstractContextManager[Any]]


def draw_prompts() -> list[list[int]]:
    """Long ones that are cut into chunks and micro-batches, short ones beside them, and a prefix that is shared."""
    rng = random.Random(5)
    shared = [rng.randrange(97) for _ in range(40)]
    lengths = [1, 5, 250, 17, 64, 120, 3, 33]
    return [shared[: length // 3] + [rng.randrange(97) for _ in range(length - length // 3)] for length in lengths]


@pytest.mark.parametrize(
    ("family", "parallelism"),
    [
        pytest.param("llama", {"tensor": 2}, id="TP2"),
        pytest.param("llama", {"pipeline": 2}, id="PP2"),
        pytest.param("llama", {"tensor": 2, "pipeline": 2}, id="TP2xPP2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"pipeline": 4}, id="MoE-PP4", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"tensor": 2}, id="MoE-TP2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"expert": 2}, id="EP2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"expert": 2, "tensor": 2}, id="TP2xEP2", marks=pytest.mark.full),
        pytest.param("qwen3_moe", {"expert": 2, "pipeline": 2}, id="EP2xPP2", marks=pytest.mark.full),
        pytest.param("llama", {"data": 2}, id="DP2", marks=pytest.mark.full),
    ],
)
def test_answers_equal_those_of_one_process(
    checkpoints: dict[str, Path], start_group: StartGroup, family: str, parallelism: dict[str, int]
) -> None:
    prompts = draw_prompts()
    with start_group(checkpoints[family]) as single:
        expected = single.answer(prompts)
    with start_group(checkpoints[family], **parallelism) as group:
        assert group.answer(prompts) == expected
        assert group.answer(prompts) == expected  # from the prefix cache
        assert group.engine.stats().cached_tokens_total > 0


def test_a_killed_rank_ends_what_runs_within_seconds(checkpoints: dict[str, Path], start_group: StartGroup) -> None:
    with start_group(checkpoints["llama"], tensor=2) as rig:
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        rig.engine.submit(GenerationRequest(request_id="long", prompt_token_ids=(1, 2, 3), sampling=sampling))
        rig.out.wait_tokens("long", 3)
        (follower,) = rig.group.children.pids
        os.kill(follower, signal.SIGKILL)
        assert rig.causes.get(timeout=30).message.startswith("rank 1 was killed by SIGKILL")
        rig.out.wait_finished(1, timeout=30)
        assert rig.out.reason("long") is FinishReason.ERROR
        assert "rank 1 was killed" in (rig.out.last("long").error or "")
