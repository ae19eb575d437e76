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


def draw_prompts(seed: int = 5) -> list[list[int]]:
    """Long ones that are cut into chunks and micro-batches, short ones beside them, and a prefix that is shared."""
    rng = random.Random(seed)
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


@pytest.mark.parametrize(
    "parallelism",
    [
        pytest.param({"tensor": 2}, id="TP2"),
        pytest.param({"pipeline": 2}, id="PP2", marks=pytest.mark.full),
        pytest.param({"data": 2}, id="DP2", marks=pytest.mark.full),
    ],
)
def test_every_rank_keeps_its_share_of_what_memory_gives_up(
    checkpoints: dict[str, Path], start_group: StartGroup, parallelism: dict[str, int]
) -> None:
    """Memory for little more than the longest prompt: most of what is found again comes from the host."""
    prompts = [*draw_prompts(), *draw_prompts(6)]
    ranks = 1 if "data" in parallelism else 2  # of a lane
    block = 4 * 2 * 2 * 4 * 12 * 4 // ranks  # bytes: layers, keys and values, heads, tokens, dimensions, float32
    with start_group(checkpoints["llama"]) as single:
        expected = single.answer(prompts)
    small = {"memory_bytes": 75 * block, "host_memory_bytes": 400 * block}
    with start_group(checkpoints["llama"], kv=small, **parallelism) as group:
        for lane in group.engine._runner.lanes:  # however slow the machine copies
            lane.scheduler.host.prefers_fetch = lambda: True
        for _ in range(3):
            assert group.answer(prompts) == expected
        host = group.engine.stats().host
        assert host.blocks_total == 399 * len(group.engine._runner.lanes)
        assert host.blocks_in_total > 100


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
