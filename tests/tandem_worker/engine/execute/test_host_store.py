"""Preemption that moves KV to the host: no byte changes on the way, and no answer."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tandem_worker.engine.execute.host_store import HostStore, find_runs
from tandem_worker.engine.execute.memory import plan_num_host_blocks
from tandem_worker.host.errors import StartupError
from tandem_worker.model.contract import KVCache, KVCacheSpec, KVLayerSpec, allocate_kv_cache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig


def build_cache(num_blocks: int) -> KVCache:
    layers = (KVLayerSpec(block_shape=(2, 3)), KVLayerSpec(block_shape=(5,)))
    cache = allocate_kv_cache(
        KVCacheSpec(layers=layers, dtype=torch.float32, block_size=4), num_blocks, torch.device("cpu")
    )
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    return cache


def test_runs() -> None:
    assert find_runs([3, 4, 5, 9, 1, 2]) == [(0, 3, 3), (3, 9, 1), (4, 1, 2)]
    assert find_runs([]) == []


def test_blocks_come_back_as_they_went() -> None:
    cache = build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    store = HostStore(cache, 6)
    store.move_out([(3, 0), (8, 1), (2, 4)])
    for layer in cache.layers:
        layer[[3, 8, 2]] = 0
    store.move_in([(4, 2), (0, 7), (1, 8)])
    for layer, old in zip(cache.layers, before, strict=True):
        expected = old.clone()
        expected[7], expected[3] = old[3], 0
        assert torch.equal(layer, expected)


def test_moving_builds_no_tensor_from_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would be a copy from pageable memory, which waits for the step under way."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a copy from pageable memory")

    store = HostStore(build_cache(9), 6)
    monkeypatch.setattr(torch, "tensor", refuse)
    store.move_out([(3, 0), (8, 1)])
    store.move_in([(1, 2), (0, 7)])


def test_measuring_leaves_every_block_as_it_was() -> None:
    cache = build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    assert HostStore(cache, 100).measure_seconds_per_block() > 0
    assert all(torch.equal(layer, old) for layer, old in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_host_blocks", [12, 200])
def test_answers_under_pressure_are_those_without_it(num_host_blocks: int, ahead: bool) -> None:
    rng = random.Random(4)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.0, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 0.7, "n": 2, "presence_penalty": 0.2, "stop_token_ids": frozenset([7])},
    ]
    prompts = [tuple(rng.randrange(64) for _ in range(rng.randint(1, 30))) for _ in range(24)]
    rigs = [
        Rig(HistoryModel(), 20, host_blocks=num_host_blocks, runs_ahead=ahead, scheduler={"max_running_requests": 8}),
        Rig(HistoryModel(), 2000),
    ]
    rigs[0].engine._runner.scheduler.hooks.prefers_move = lambda num_tokens, num_blocks: num_tokens % 4 != 0
    for rig in rigs:
        for index, prompt in enumerate(prompts):
            rig.submit(f"r{index}", prompt, 40, **options[index % 4])
        rig.wait()
        rig.close()
    tight, roomy = rigs
    for index, prompt in enumerate(prompts):
        for choice in range(options[index % 4].get("n", 1)):
            assert tight.out.tokens(f"r{index}", choice) == roomy.out.tokens(f"r{index}", choice)
        if index % 4 == 0:
            assert tight.out.tokens(f"r{index}") == greedy_answer(prompt, 40)
    stats = tight.engine.stats()
    assert stats.preemptions_move_total > 0
    assert stats.preemptions_recompute_total > 0
    assert tight.engine._scheduler.queues.host.num_held == 0


def test_the_cost_decides_between_moving_and_computing_again() -> None:
    rig = Rig(HistoryModel(), 20, host_blocks=50)
    runner = rig.engine._runner
    assert runner.executor.seconds_per_moved_block > 0
    runner.executor.seconds_per_moved_block = 0.01
    runner.meter.prefill_tokens_per_second = 100.0
    assert runner.scheduler.hooks.prefers_move(8, 2)
    runner.meter.prefill_tokens_per_second = 1000.0
    assert not runner.scheduler.hooks.prefers_move(8, 2)
    rig.close()


def test_host_memory_that_makes_no_sense_is_refused() -> None:
    assert plan_num_host_blocks(0, 100, 0) == 0
    assert plan_num_host_blocks(350, 100, 400) == 3
    with pytest.raises(StartupError, match="one block takes 100"):
        plan_num_host_blocks(50, 100, 400)
    with pytest.raises(StartupError, match="400 bytes of host memory are free"):
        plan_num_host_blocks(500, 100, 400)
