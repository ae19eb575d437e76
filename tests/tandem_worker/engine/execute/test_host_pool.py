"""Blocks in host memory: no byte changes on the way, layers come when they are waited for, and no answer changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.execute.host_pool import HostPool, LateCopies, open_direction
from tandem_worker.engine.execute.memory import plan_num_host_blocks
from tandem_worker.engine.schedule.host_cache import Moves, is_fetching_sooner
from tandem_worker.host.errors import StartupError
from tandem_worker.model.contract import ForwardBatch, KVCache, KVCacheSpec, KVLayerSpec, allocate_kv_cache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig


def build_cache(num_blocks: int, dtype: torch.dtype = torch.float32) -> KVCache:
    layers = (KVLayerSpec(block_shape=(2, 3)), KVLayerSpec(block_shape=(5,)))
    cache = allocate_kv_cache(KVCacheSpec(layers=layers, dtype=dtype, block_size=4), num_blocks, torch.device("cpu"))
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_blocks_come_back_as_they_went_each_in_one_piece(dtype: torch.dtype) -> None:
    cache = build_cache(9, dtype)
    before = [layer.clone() for layer in cache.layers]
    pool = HostPool(cache, 6)
    pool.launch(Moves(out=((3, 1), (8, 2), (2, 5)), into=()))
    pool.settle()
    parts = [before[0][8].view(-1).view(torch.uint8), before[1][8].view(-1).view(torch.uint8)]
    assert torch.equal(pool.rows[2], torch.cat(parts))
    for layer in cache.layers:
        layer[[3, 8, 2]] = 0
    pool.launch(Moves(out=(), into=((5, 2), (1, 7), (2, 8))))
    pool.settle()
    for layer, old in zip(cache.layers, before, strict=True):
        expected = old.clone()
        expected[7], expected[3] = old[3], 0
        assert torch.equal(layer, expected)


def test_a_layer_is_copied_when_it_is_waited_for_and_not_before() -> None:
    cache = build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    pool = HostPool(cache, 6)
    pool.launch(Moves(out=((3, 1), (4, 2)), into=()))
    assert pool.is_pending
    assert not pool.rows.any()
    pool.before_layer(0)
    cache.layers[0][3] = 7.0  # whoever got the block computes its first layer now
    pool.before_layer(1)
    assert not pool.is_pending
    pool.launch(Moves(out=(), into=((1, 5),)))
    pool.before_layer(0)
    assert torch.equal(cache.layers[0][5], before[0][3])
    assert torch.equal(cache.layers[1][5], before[1][5]), "the second layer is still on its way"
    assert pool.count_seconds()[1] == 0
    pool.before_layer(1)
    assert torch.equal(cache.layers[1][5], before[1][3])
    assert min(pool.count_seconds()) > 0


def test_what_has_only_gone_out_comes_in_at_once() -> None:
    """One batch's copies in read what its own, and earlier ones, have brought out, layer by layer."""
    cache = build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    pool = HostPool(cache, 6)
    pool.launch(Moves(out=((3, 1),), into=()))
    pool.launch(Moves(out=((4, 2),), into=((1, 7), (2, 8))))
    for layer in range(2):
        pool.before_layer(layer)
        assert torch.equal(cache.layers[layer][[7, 8]], before[layer][[3, 4]])


def test_a_fence_is_behind_all_that_goes_out() -> None:
    cache = build_cache(9)
    pool = HostPool(cache, 6)
    pool.wait(pool.fence())
    pool.launch(Moves(out=((3, 1),), into=()))
    pool.wait(pool.fence())
    assert torch.equal(pool.rows[1], torch.cat([layer[3].view(-1).view(torch.uint8) for layer in cache.layers]))


def test_moving_builds_no_tensor_from_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that would be a copy from pageable memory, which waits for the step under way."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a copy from pageable memory")

    pool = HostPool(build_cache(9), 6)
    monkeypatch.setattr(torch, "tensor", refuse)
    pool.launch(Moves(out=((3, 1), (8, 2)), into=((1, 7),)))
    pool.settle()


def test_measuring_leaves_every_block_as_it_was() -> None:
    cache = build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    assert HostPool(cache, 100).measure_fetch_seconds() > 0
    assert all(torch.equal(layer, old) for layer, old in zip(cache.layers, before, strict=True))


@pytest.mark.parametrize(
    "place",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_many_blocks_there_and_back_while_others_are_written(place: str) -> None:
    device = torch.device(place)
    layers = tuple(KVLayerSpec(block_shape=(2, 8, 16, 128)) for _ in range(4))
    spec = KVCacheSpec(layers=layers, dtype=torch.bfloat16, block_size=16)
    cache = allocate_kv_cache(spec, 65, device)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16))
    before = [layer.clone() for layer in cache.layers]
    pool = HostPool(cache, 129)
    order = random.Random(3).sample(range(1, 65), 64)
    for first in (0, 64):
        pool.launch(Moves(out=tuple(zip(order, range(first + 1, first + 65), strict=True)), into=()))
        for index, layer in enumerate(cache.layers):
            pool.before_layer(index)
            layer.zero_()
        pool.launch(Moves(out=(), into=tuple(zip(range(first + 1, first + 65), order, strict=True))))
        for index, (layer, old) in enumerate(zip(cache.layers, before, strict=True)):
            pool.before_layer(index)
            assert torch.equal(layer[1:], old[1:])
    pool.wait(pool.fence())
    piece = torch.cat([old[order[0]].flatten().view(torch.uint8) for old in before]).cpu()
    assert torch.equal(pool.rows[1], piece)
    assert torch.equal(pool.rows[65], piece)


class Timeline:
    """Stands in for `torch.cuda`: streams are queues that run only as far as somebody waits, in the order that events
    demand, so a wait that is missing shows as bytes that are not there."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = FakeStream("compute", self)
        self.now = self.compute

    def Stream(self, device: torch.device) -> FakeStream:
        return FakeStream(f"copy {len(self.log)}", self)

    def Event(self, **options: bool) -> FakeEvent:
        return FakeEvent()

    def current_stream(self) -> FakeStream:
        return self.now

    def stream(self, stream: FakeStream) -> Entered:
        return Entered(self, stream)


class Entered:
    def __init__(self, cuda: Timeline, stream: FakeStream) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        self._cuda.now = self._stream

    def __exit__(self, *error: object) -> None:
        self._cuda.now = self._cuda.compute


class FakeStream:
    def __init__(self, name: str, cuda: Timeline) -> None:
        self.name, self.cuda = name, cuda
        self.work: list[Any] = []
        self.ran = 0

    def wait_event(self, event: FakeEvent) -> None:
        self.work.append(event.run)

    def wait_stream(self, other: FakeStream) -> None:
        end = len(other.work)
        self.work.append(lambda: other.run(end))

    def run(self, end: int) -> None:
        while self.ran < end:
            work = self.work[self.ran]
            self.ran += 1
            work()


class FakeEvent:
    def __init__(self) -> None:
        self.stream: FakeStream | None = None
        self.end = 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.end = stream, len(stream.work)

    def run(self) -> None:
        assert self.stream is not None
        self.stream.run(self.end)

    synchronize = run

    def query(self) -> bool:
        return self.stream is not None and self.stream.ran >= self.end

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1500.0


def on_streams(cuda: Timeline, cache: KVCache, num_blocks: int) -> HostPool:
    """A pool whose copies are work of those streams."""

    def direction() -> Any:
        submit = open_direction(torch.device("cuda"), cuda)

        def queue(copies: Any, after: Any) -> Any:
            return submit([lambda copy=copy: cuda.now.work.append(copy) for copy in copies], after)

        return queue

    return HostPool(cache, num_blocks, (direction(), direction()))


def test_streams_wait_for_each_other_by_layers() -> None:
    """The first layer is computed while the second one is still being copied."""
    cuda, cache = Timeline(), build_cache(9)
    before = [layer.clone() for layer in cache.layers]
    pool = on_streams(cuda, cache, 6)
    pool.launch(Moves(out=((3, 1),), into=((1, 7),)))
    seen: list[torch.Tensor] = []
    for layer in range(2):
        pool.before_layer(layer)
        cuda.compute.work.append(lambda layer=layer: seen.append(cache.layers[layer][7].clone()))
        cuda.compute.run(len(cuda.compute.work))
        assert torch.equal(seen[layer], before[layer][3])
        assert pool.count_seconds() == ((1.5, 1.5) if layer == 1 else (0.0, 0.0))
    pool.launch(Moves(out=((4, 2),), into=()))
    fence = pool.fence()
    assert not pool.rows[2].any()
    pool.wait(fence)
    assert torch.equal(pool.rows[2], torch.cat([layer[4].view(-1).view(torch.uint8) for layer in before]))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_moves_and_steps_is_as_if_all_was_copied_at_once(data: st.DataObject) -> None:
    """Steps write to blocks that are on their way out, and read those that come in: late copies and streams agree with
    copies that are made when they are ordered."""
    cuda, caches = Timeline(), [build_cache(6) for _ in range(2)]
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        other.copy_(layer)
    late, streams = HostPool(caches[0], 5), on_streams(cuda, caches[1], 5)
    layers = [layer.clone() for layer in caches[0].layers]
    rows = [torch.zeros(5, *layer.shape[1:]) for layer in layers]
    ids = st.integers(1, 4)
    for step in range(data.draw(st.integers(1, 6))):
        out = data.draw(st.lists(st.tuples(st.integers(1, 5), ids), unique_by=lambda pair: pair[1], max_size=3))
        into = data.draw(st.lists(st.tuples(ids, st.integers(1, 5)), unique_by=lambda pair: pair[1], max_size=3))
        moves = Moves(out=tuple(out), into=tuple(into))
        for kept, layer in zip(rows, layers, strict=True):
            kept[[host for _, host in out]] = layer[[block for block, _ in out]]
            layer[[block for _, block in into]] = kept[[host for host, _ in into]]
        written, value = data.draw(st.integers(1, 5)), float(step)
        for pool in (late, streams):
            pool.launch(moves)
            if data.draw(st.booleans()):
                pool.settle()
        for index, layer in enumerate(layers):
            layer[written] = value
            late.before_layer(index)
            caches[0].layers[index][written] = value
            streams.before_layer(index)
            target = caches[1].layers[index]
            cuda.compute.work.append(lambda target=target, written=written, value=value: target[written].fill_(value))
    cuda.compute.run(len(cuda.compute.work))
    for pool, cache in zip((late, streams), caches, strict=True):
        pool.settle()
        assert all(torch.equal(layer, expected) for layer, expected in zip(cache.layers, layers, strict=True))
        expected = torch.cat([kept.view(5, -1).view(torch.uint8) for kept in rows], dim=1)
        assert torch.equal(pool.rows[1:], expected[1:])


class Hasty(HistoryModel):
    """Reads a layer without waiting for it."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        object.__setattr__(batch, "before_layer", None)
        return super().forward(batch, kv_cache)


def test_a_model_that_does_not_wait_is_found_out() -> None:
    rig = Rig(Hasty(), 8, host_blocks=20)
    rig.run("a", range(20), 4)
    rig.run("b", range(30, 50), 4)
    rig.run("a again", range(20), 4)
    assert "without waiting" in str(rig.out.last("a again").error)
    rig.engine.stop()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_host_blocks", [1, 12, 200])
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
    assert stats.preemptions_total > 0
    assert stats.host is not None
    assert stats.host.blocks_out_total > 0
    if num_host_blocks > 1:
        assert stats.host.blocks_in_total > 0
    assert stats.host.blocks_stored <= stats.host.blocks_total == num_host_blocks


def test_what_memory_gave_up_is_not_computed_again() -> None:
    """A prompt that was answered before another one took all its blocks."""
    rig = Rig(HistoryModel(), 12, host_blocks=40)
    first = rig.run("a", range(40), 4)
    rig.run("b", range(20, 60), 4)
    assert rig.run("a again", range(40), 4) == first
    stats = rig.engine.stats()
    assert stats.cached_tokens_total == 36
    assert stats.host is not None
    assert stats.host.blocks_in_total == 8, "one of them was in memory still"
    rig.close()


def test_the_cost_decides_between_fetching_and_computing_again() -> None:
    rig = Rig(HistoryModel(), 20, host_blocks=50)
    runner = rig.engine._runner.lanes[0]
    assert runner.executor.fetch_seconds > 0
    runner.executor.fetch_seconds = 0.01
    host = runner.scheduler.host
    assert host is not None
    runner.meter.prefill_tokens_per_second = 100.0
    assert host.prefers_fetch()
    assert runner.scheduler.hooks.fetch_tokens(30) == 30
    runner.meter.prefill_tokens_per_second = 1000.0
    assert not host.prefers_fetch()
    rig.close()
    assert is_fetching_sooner(16, seconds_per_block=1.0, prefill_tokens_per_second=None)


def test_host_memory_that_makes_no_sense_is_refused() -> None:
    assert plan_num_host_blocks(0, 100, 0) == 0
    assert plan_num_host_blocks(350, 100, 400) == 3
    with pytest.raises(StartupError, match="one block takes 100"):
        plan_num_host_blocks(150, 100, 400)
    with pytest.raises(StartupError, match="400 bytes of host memory are free"):
        plan_num_host_blocks(500, 100, 400)


def test_late_copies_know_when_they_are_done() -> None:
    made: list[int] = []
    copies = LateCopies([lambda layer=layer: made.append(layer) for layer in range(3)], None)
    copies.reach(1)
    assert (made, copies.done) == ([0, 1], False)
    copies.reach(0)
    copies.finish()
    assert (made, copies.done) == ([0, 1, 2], True)
