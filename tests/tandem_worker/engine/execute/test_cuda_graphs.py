"""The handling of recordings, with a recorder that simply calls the function again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tandem_worker.engine.execute.cuda_graphs import DecodeGraphs, plan_batch_sizes
from tandem_worker.model.contract import allocate_kv_cache

from bench.gpu.random_model import SMALL, build_random_model
from bench.gpu.steps import build_decode_batch, compare_recorded
from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig

MakeRig = Callable[..., Rig]


class CallAgain:
    """Like a graph: the same tensors go in and out every time."""

    def __init__(self) -> None:
        self.num_replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        result = run()

        def replay() -> None:
            self.num_replays += 1
            result.copy_(run())

        return replay, result

    def memory_bytes(self) -> int:
        return 100 * self.num_replays


class PaddedModel(HistoryModel):
    """Padding rows write to one slot, which the model's own checks would take for a defect."""

    def _check(self, batch: object) -> None: ...


@pytest.mark.parametrize("max_rows", [1, 3, 8, 50, 64, 256, 300, 1000])
def test_sizes_reach_the_largest_batch(max_rows: int) -> None:
    sizes = plan_batch_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == max_rows


def test_decodes_from_recordings_give_the_same_tokens(make_rig: MakeRig) -> None:
    rng = random.Random(3)
    rig = make_rig(PaddedModel(), num_blocks=60, scheduler={"max_running_requests": 12})
    recorder = CallAgain()
    rig.engine._executor.record_graphs(recorder)
    prompts = [tuple(rng.randrange(64) for _ in range(rng.randint(1, 40))) for _ in range(25)]
    for index, prompt in enumerate(prompts):
        rig.submit(f"r{index}", prompt, 5 + index)
    rig.wait()
    for index, prompt in enumerate(prompts):
        assert rig.out.tokens(f"r{index}") == greedy_answer(prompt, 5 + index)
    assert recorder.num_replays > 20


def test_sizes_that_a_start_leaves_are_recorded_between_steps(make_rig: MakeRig) -> None:
    """Beside live streams, whose blocks the recordings must not touch though the fixed tensors still name them; tokens
    are what they are without."""
    rig = make_rig(PaddedModel(), num_blocks=60, scheduler={"max_running_requests": 12})
    engine, executor, recorder = rig.engine, rig.engine._executor, CallAgain()
    executor.record_graphs(recorder, num_now=1)
    assert engine.graphs_pending == len(plan_batch_sizes(12)) - 1
    recorded_beside_streams = 0

    class Eager(CallAgain):
        def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            nonlocal recorded_beside_streams
            recorded_beside_streams += not engine.idle
            return recorder.record(run)

    assert executor._graphs is not None
    executor._graphs._recorder = Eager()
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(64) for _ in range(rng.randint(1, 40))) for _ in range(25)]
    for index, prompt in enumerate(prompts):
        engine._turns.next_recording = 0.0
        rig.submit(f"r{index}", prompt, 5 + index)
    rig.wait()
    for index, prompt in enumerate(prompts):
        assert rig.out.tokens(f"r{index}") == greedy_answer(prompt, 5 + index)
    assert recorded_beside_streams
    deadline = time.monotonic() + 60
    while engine.graphs_pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.graphs_pending == 0


def test_recordings_wait_for_first_answers(make_rig: MakeRig) -> None:
    rig = make_rig(PaddedModel(), num_blocks=60, scheduler={"max_running_requests": 12})
    engine = rig.engine
    engine._executor.record_graphs(CallAgain(), num_now=1)
    pending = engine.graphs_pending
    engine.hold_recordings(held=True)
    rig.submit("r", (1, 2, 3), 12)
    rig.wait()
    assert rig.out.tokens("r") == greedy_answer((1, 2, 3), 12)
    assert engine.graphs_pending == pending > 0
    engine.hold_recordings(held=False)  # which wakes an engine that has nothing else to do
    deadline = time.monotonic() + 60
    while engine.graphs_pending and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.graphs_pending == 0


def test_what_earlier_steps_left_is_padding_while_more_is_recorded() -> None:
    model, written = PaddedModel(), []
    cache = allocate_kv_cache(model.kv_cache_spec(4), 8, torch.device("cpu"))
    graphs = DecodeGraphs(model, cache, max_blocks=4, batch_sizes=[1, 2, 4], recorder=CallAgain(), num_later=1)
    assert graphs.pending == [4]
    graphs._inputs.slot_mapping.fill_(9)  # as a step of many left it

    class Watching(CallAgain):
        def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            written.extend(graphs._inputs.slot_mapping.tolist())
            return super().record(run)

    graphs._recorder = Watching()
    assert graphs.record_next() == 4
    assert written == [0, 0, 0, 0]
    assert graphs.pending == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, OSError, Exception], ids=["memory", "disk", "compiler"])
def test_without_memory_for_more_recordings_the_engine_goes_on(
    make_rig: MakeRig, caplog: Any, error: type[Exception]
) -> None:
    """Nor does a full disk, or a compiler that gives up, end what runs."""

    class Full(CallAgain):
        def record(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            if self.num_replays:
                raise error("no memory is left")
            return super().record(run)

    rig = make_rig(PaddedModel(), num_blocks=60, scheduler={"max_running_requests": 4})
    recorder = Full()
    rig.engine._executor.record_graphs(recorder, num_now=1)
    recorder.num_replays = 1
    rig.submit("r", (1, 2, 3), 12)
    rig.wait()
    assert rig.out.tokens("r") == greedy_answer((1, 2, 3), 12)
    assert rig.engine.graphs_pending == 0
    assert "stay unrecorded: no memory is left" in caplog.text


def test_recordings_share_one_tensor_of_logits() -> None:
    model = PaddedModel()
    cache = allocate_kv_cache(model.kv_cache_spec(4), 8, torch.device("cpu"))
    graphs = DecodeGraphs(model, cache, max_blocks=4, batch_sizes=[1, 2, 4], recorder=CallAgain())
    assert len({recording.logits.data_ptr() for recording in graphs._recordings.values()}) == 1


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_a_recorded_step_of_a_real_model_reads_new_content(device: str) -> None:
    """Tokens, lengths, block tables and the cache itself change between replays; the logits are an eager step's."""
    model = build_random_model(SMALL, torch.device(device))
    contexts = [[80], [3, 33, 17], [64, 1, 90, 12, 5, 31, 2, 77]]
    first, second = (compare_recorded(model, contexts * times, max_context=96) for times in (1, 2))
    assert [each.rows for each in second] == [1, 3, 8, 1, 3, 8]
    for found in (*first, *second):
        assert found.error < 1.2e-2
        assert found.repeats
        assert found.flips == 0


def test_few_rows_are_not_padded_beyond_those_that_are_exact() -> None:
    """While the sizes between are still to be recorded, such a step runs unrecorded."""
    model = build_random_model(SMALL, torch.device("cpu"))
    assert model.exact_rows == 32
    cache = allocate_kv_cache(model.kv_cache_spec(16), 50, model.device)
    with torch.inference_mode():
        graphs = DecodeGraphs(model, cache, max_blocks=1, batch_sizes=[1, 8, 40], recorder=CallAgain())
        ran = {}
        for rows in (1, 5, 9, 33, 40):
            tables = torch.arange(1, rows + 1)[:, None]
            batch = build_decode_batch(model, tables, [3] * rows, torch.Generator())
            ran[rows] = graphs.run(batch) is not None
    assert ran == {1: True, 5: True, 9: False, 33: True, 40: True}
