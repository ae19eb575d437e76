"""The engine as its users see it, on the model that notices wrong blocks."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tandem_api.launch import TTFTDeadline
from tandem_worker.engine import runner
from tandem_worker.engine.errors import ContextLengthError, EngineStoppedError, RequestError
from tandem_worker.engine.execute.step import StepAbandonedError
from tandem_worker.engine.lanes import LaneRunner
from tandem_worker.engine.schedule.params import FinishReason, SamplingParams, TokenDelta
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.snapshot import build_stats
from tandem_worker.model.contract import ForwardBatch, KVCache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import BLOCK_SIZE, Rig

MakeRig = Callable[..., Rig]


def random_prompt(rng: random.Random, low: int, high: int) -> tuple[int, ...]:
    return tuple(rng.randrange(64) for _ in range(rng.randint(low, high)))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 31, 32, 33])
def test_a_prompt_is_continued_greedily(make_rig: MakeRig, length: int) -> None:
    rig = make_rig()
    prompt = tuple(range(length))
    assert rig.run("r", prompt) == greedy_answer(prompt, 8)
    assert rig.out.reason("r") is FinishReason.LENGTH


@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_prompt_seen_before_is_computed_only_where_it_must_be(make_rig: MakeRig, length: int) -> None:
    rig = make_rig()
    prompt = tuple(range(length))
    first = rig.run("a", prompt)
    computed = rig.model.num_tokens
    assert rig.run("b", prompt) == first
    cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert rig.out.last("b").num_cached_tokens == cached
    assert rig.model.num_tokens - computed == length - cached + 7
    assert rig.engine.stats().cached_tokens_total == cached


def test_an_answer_is_cached_for_the_next_turn(make_rig: MakeRig) -> None:
    rig = make_rig()
    answer = rig.run("a", (1, 2, 3, 4, 5), max_tokens=8)
    rig.run("b", (1, 2, 3, 4, 5, *answer, 9), max_tokens=1)
    assert rig.out.last("b").num_cached_tokens == 12


def test_requests_that_have_ended_are_gone_without_a_collection(make_rig: MakeRig) -> None:
    """A request and its choices named each other: prompts stayed until Python looked for cycles of old objects."""
    rig = make_rig()
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            rig.run(str(number), tuple(range(20)))
        left = [each for each in gc.get_objects() if type(each) is Request]
    finally:
        gc.enable()
    assert len(left) <= 1, "the engine's thread may still have the last one in its hands"


def test_tenants_do_not_share_blocks(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run("a", tuple(range(20)), cache_salt="one")
    rig.run("b", tuple(range(20)), cache_salt="two")
    assert rig.out.last("b").num_cached_tokens == 0


def test_a_stop_token_ends_the_choice_and_is_not_part_of_it(make_rig: MakeRig) -> None:
    prompt = (1, 2, 3)
    answer = greedy_answer(prompt, 8)
    rig = make_rig(eos_token_ids=[answer[4]])
    assert rig.run("r", prompt) == answer[: answer.index(answer[4])]
    assert rig.out.last("r").finish_reason is FinishReason.STOP
    assert rig.out.last("r").stop_token_id == answer[4]
    assert rig.run("ignored", prompt, ignore_eos=True) == answer
    assert rig.run("own", prompt, ignore_eos=True, stop_token_ids=frozenset([answer[2]])) == answer[:2]
    assert len(rig.run("late", prompt, min_tokens=6)) >= 6


def test_many_requests_share_steps_and_get_their_own_answers(make_rig: MakeRig) -> None:
    rng = random.Random(1)
    rig = make_rig(num_blocks=400, scheduler={"max_batch_tokens": 64})
    prompts = {f"r{i}": random_prompt(rng, 1, 90) for i in range(30)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 20)
    rig.wait()
    for name, prompt in prompts.items():
        assert rig.out.tokens(name) == greedy_answer(prompt, 20)
    assert max(rig.model.batch_sizes) > 5


def test_a_block_space_too_small_for_all_preempts_and_changes_nothing(make_rig: MakeRig) -> None:
    rng = random.Random(2)
    rig = make_rig(num_blocks=20, scheduler={"max_batch_tokens": 32, "max_running_requests": 8})
    prompts = {f"r{i}": random_prompt(rng, 1, 30) for i in range(25)}
    for index, (name, prompt) in enumerate(prompts.items()):
        rig.submit(name, prompt, 40, priority=index % 3, n=1 + index % 2)
    rig.wait()
    for index, (name, prompt) in enumerate(prompts.items()):
        for choice in range(1 + index % 2):
            assert rig.out.tokens(name, choice) == greedy_answer(prompt, 40)
    assert rig.engine.stats().preemptions_total > 0
    assert rig.engine.stats().kv_eviction_horizon == pytest.approx(time.time(), abs=60), "unix seconds"


def test_the_order_of_requests_goes_by_a_clock_that_nobody_sets(make_rig: MakeRig) -> None:
    """Who came before the machine's time was set back would wait until it is as late again."""
    engine, began = make_rig().engine, time.monotonic()
    request = engine._build_request(
        id="r", prompt=(1, 2), sampling=SamplingParams(max_tokens=1), cache_salt="", priority=0
    )
    assert began <= request.arrival <= time.monotonic()
    assert began <= engine._scheduler.planner._clock() <= time.monotonic(), "lateness is by the same one"


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_answers_are_the_same_in_whatever_order_prompts_are_computed(
    make_rig: MakeRig, sampling: dict[str, float]
) -> None:
    """Short prompts come while a long one is computed: with a target they are computed in the middle of it."""
    rng = random.Random(3)
    prompts = [random_prompt(rng, 300, 301), *(random_prompt(rng, 1, 60) for _ in range(15))]
    answers = []
    for target in (None, TTFTDeadline(seconds=0.001, seconds_per_token=0.01)):
        rig = make_rig(num_blocks=90, scheduler={"max_batch_tokens": 16})
        rig.engine.order_by(target)
        for index, prompt in enumerate(prompts):
            rig.submit(f"r{index}", prompt, 12, priority=index % 2, n=1 + index % 2, **sampling)
        rig.wait()
        answers.append([rig.out.tokens(f"r{index}", index % 2) for index in range(len(prompts))])
    assert answers[0] == answers[1]
    assert sampling or answers[0] == [greedy_answer(prompt, 12) for prompt in prompts]


def test_choices_share_the_prompt_and_part_by_copy_on_write(make_rig: MakeRig) -> None:
    rig = make_rig()
    prompt = tuple(range(10))
    rig.submit("r", prompt, 12, n=4, temperature=1.0, seed=7)
    rig.wait()
    answers = [rig.out.tokens("r", choice) for choice in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert rig.engine.stats().prompt_tokens_total == 10
    for choice in range(4):  # each continues from its own blocks: alone it says the same
        alone = make_rig()
        alone.submit("r", prompt, 12, n=4, temperature=1.0, seed=7)
        alone.wait()
        assert alone.out.tokens("r", choice) == answers[choice]


def test_more_choices_than_rows_take_turns(make_rig: MakeRig) -> None:
    rig = make_rig(scheduler={"max_running_requests": 2})
    rig.submit("r", (1, 2, 3, 4, 5), 9, n=6)
    rig.wait()
    for choice in range(6):
        assert rig.out.tokens("r", choice) == greedy_answer((1, 2, 3, 4, 5), 9)


def test_abort_ends_every_open_choice_and_frees_its_blocks(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=300)
    rig.submit("r", tuple(range(9)), 1000, n=2)
    rig.out.wait_tokens("r", 3)
    rig.engine.abort("r")
    rig.engine.abort("unknown")
    rig.wait()
    assert rig.out.reason("r", 0) is rig.out.reason("r", 1) is FinishReason.ABORT
    _until(lambda: rig.engine.idle)
    assert rig.engine.stats().kv_blocks_used == 0


def test_a_choice_is_aborted_alone_and_frees_its_blocks_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=600)
    prompt = tuple(range(9))
    rig.submit("r", prompt, 700, n=3)
    rig.out.wait_tokens("r", 60)
    for choice in (0, 2):  # choice 0 computed the prompt that all share
        rig.engine.abort("r", choice)
    _until(lambda: rig.out.num_finished == 2)
    used = rig.engine.stats().kv_blocks_used
    assert used <= (len(prompt) + len(rig.out.tokens("r", 1))) // 4 + 2  # those of one choice, which has gone on since
    assert rig.out.reason("r", 0) is rig.out.reason("r", 2) is FinishReason.ABORT
    assert not rig.engine.idle
    rig.engine.abort("r", 0)  # it has ended: nothing happens
    rig.wait()
    assert rig.out.reason("r", 1) is FinishReason.LENGTH
    assert rig.out.tokens("r", 1) == greedy_answer(prompt, 700)


def test_a_failed_step_fails_its_requests_and_no_others(make_rig: MakeRig) -> None:
    model = HistoryModel()
    rig = make_rig(model)
    model.fail_once = ValueError("bad")
    rig.submit("r", (1, 2), 4)
    rig.wait()
    assert rig.out.reason("r") is FinishReason.ERROR
    assert "bad" in (rig.out.last("r").error or "")
    assert rig.run("next", (1, 2), 4) == greedy_answer((1, 2), 4)


def test_a_failed_step_lets_go_of_no_block_before_the_device_is_done(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    events: list[str] = []
    blocks, executor = rig.engine._scheduler.blocks, rig.engine._executor
    release = blocks.release
    monkeypatch.setattr(executor, "settle", lambda: events.append("settled"))
    monkeypatch.setattr(blocks, "release", lambda *args: (events.append("released"), release(*args)))
    rig.model.fail_once = ValueError("bad")
    rig.submit("r", (1, 2), 4)
    rig.wait()
    _until(lambda: rig.engine.idle)
    assert events == ["settled", "released"]


def test_a_dead_step_loop_says_so_and_ends_its_requests() -> None:
    model = HistoryModel()
    rig = Rig(model)
    model.fail_once = RuntimeError("CUDA error: device-side assert triggered")
    rig.submit("r", (1, 2), 4)
    rig.wait()
    assert rig.out.reason("r") is FinishReason.ERROR
    _until(lambda: rig.engine.idle)
    assert "device-side" in str(rig.engine.failure)
    with pytest.raises(EngineStoppedError):
        rig.submit("next", (1, 2))
    assert rig.engine.steps.vitals.problems() == [
        "engine: it has failed: RuntimeError: CUDA error: device-side assert triggered"
    ]


def test_a_step_loop_without_a_thread_takes_nothing_until_it_has_one(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineStoppedError, match="cannot start: thread engine cannot be started"):
            rig.submit("r", (1, 2), 4)
        assert any("no thread can be started" in problem for problem in rig.engine.steps.vitals.problems())
    assert rig.engine.idle
    rig.submit("r", (1, 2), 4)
    rig.wait()
    assert rig.out.reason("r") is FinishReason.LENGTH


def test_requests_that_cannot_be_served_are_refused(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=4)
    with pytest.raises(ContextLengthError, match=r"16 tokens.*requested 20 tokens.*12 in the prompt"):
        rig.submit("a", range(12), 8)
    with pytest.raises(ContextLengthError, match="16 tokens, but the prompt has 30"):
        rig.submit("a", range(30), 8)
    with pytest.raises(RequestError, match="empty"):
        rig.submit("a", (), 8)
    with pytest.raises(RequestError, match="outside 0 to 63"):
        rig.submit("a", (64,), 8)
    rig.run("longest", range(12), 4)


def test_a_full_queue_is_429(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=300, scheduler={"max_running_requests": 1, "max_queued_requests": 2})
    rig.submit("busy", (1,), 1000)
    rig.out.wait_tokens("busy", 1)
    rig.submit("a", (1,))
    rig.submit("b", (1,))
    with pytest.raises(RequestError) as error:
        rig.submit("c", (1,))
    assert error.value.status == 429
    for name in ("busy", "a", "b"):
        rig.engine.abort(name)
    rig.wait()


def test_draining_finishes_what_is_inside(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit("r", (1, 2), 50)
    rig.engine.drain()
    with pytest.raises(EngineStoppedError, match="draining"):
        rig.submit("late", (1,))
    rig.wait()
    assert rig.out.reason("r") is FinishReason.LENGTH
    _until(lambda: rig.engine.idle)


def test_an_idle_engine_uses_no_cpu(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.run("r", (1, 2))
    _until(lambda: rig.engine.idle)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.02


def test_a_step_delivers_all_its_tokens_in_one_call(make_rig: MakeRig) -> None:
    rig = make_rig()
    entered, barrier = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        barrier.wait(30)

    rig.engine._send(hold)
    assert entered.wait(30)
    for index in range(5):
        rig.submit(f"r{index}", (index,), 10)
    barrier.set()
    rig.wait()
    assert rig.out.num_calls == 10


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class SlowModel(HistoryModel):
    """Waits between its layers until it is let on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.gate = threading.Event(), threading.Event()
        self.num_finished_steps = 0

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        inner = batch.on_layer

        def on_layer(layer: int) -> None:
            self.entered.set()
            assert self.gate.wait(30)
            if inner is not None:
                inner(layer)

        logits = super().forward(replace(batch, on_layer=on_layer), kv_cache)
        self.num_finished_steps += 1
        return logits


def test_a_prompt_that_nobody_waits_for_is_left_between_layers(make_rig: MakeRig) -> None:
    model = SlowModel()
    rig = make_rig(model)
    rig.submit("r", tuple(range(30)))
    assert model.entered.wait(30)
    rig.engine.abort("r")
    model.gate.set()
    rig.wait()
    assert rig.out.reason("r") is FinishReason.ABORT
    assert model.num_finished_steps == 0
    assert rig.run("next", tuple(range(30))) == greedy_answer(tuple(range(30)), 8)


def test_stop_ends_what_is_inside_and_answers_what_was_waiting() -> None:
    rig = Rig(HistoryModel(), 300, scheduler={"max_running_requests": 1})
    rig.submit("running", (1,), 1000)
    rig.submit("waiting", (1,), 1000)
    rig.out.wait_tokens("running", 2)
    rig.close()
    assert rig.out.reason("running") is rig.out.reason("waiting") is FinishReason.ABORT
    assert rig.engine.idle
    assert rig.engine.failure is None
    with pytest.raises(EngineStoppedError):
        rig.submit("late", (1,))


def test_a_request_id_is_used_once_at_a_time(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=300)
    rig.submit("r", (1,), 1000)
    with pytest.raises(RequestError, match="in use"):
        rig.submit("r", (1,))
    rig.engine.abort("r")
    rig.wait()
    _until(lambda: rig.engine.idle)
    rig.submit("r", (1,), 2)
    rig.wait()


def test_a_delivery_that_fails_does_not_stop_the_engine(make_rig: MakeRig) -> None:
    rig = make_rig()
    deliver, failures = rig.engine._turns.deliver, iter([ValueError("no")])

    def fail_once(deltas: Sequence[TokenDelta]) -> None:
        deliver(deltas)
        for failure in failures:
            raise failure

    rig.engine._turns.deliver = fail_once
    assert rig.run("r", (1, 2)) == greedy_answer((1, 2), 8)


class TimedModel(HistoryModel):
    """Takes `seconds` for every forward pass."""

    seconds = 0.02

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(batch, kv_cache)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_seconds_are_busy_while_steps_run_and_at_no_other_time(make_rig: MakeRig, runs_ahead: bool) -> None:
    rig = make_rig(TimedModel(), runs_ahead=runs_ahead, scheduler={"max_batch_tokens": 16})
    began = time.perf_counter()
    rig.run("a", tuple(range(40)), max_tokens=5)
    _until(lambda: rig.engine.idle)
    ended = time.perf_counter()
    time.sleep(0.1)  # nothing is there to do
    steps = 3 + 4
    stats = rig.engine.stats()
    assert steps * TimedModel.seconds <= stats.busy_seconds_total <= ended - began
    assert 3 * TimedModel.seconds <= stats.prefill_seconds_total < stats.busy_seconds_total
    assert stats.computed_prompt_tokens_total == 40
    rig.run("b", (*range(40), 1, 2, 3), max_tokens=1)
    assert rig.engine.stats().computed_prompt_tokens_total == 43, "40 tokens were cached"
    _until(lambda: rig.engine.idle)
    began = time.perf_counter()
    rig.engine.begin_measuring()
    rig.run("c", (5, 4, 3), max_tokens=1)
    _until(lambda: rig.engine.idle)
    assert rig.engine.stats().computed_prompt_tokens_total == 3
    assert rig.engine.stats().busy_seconds_total <= time.perf_counter() - began


class ClockModel(HistoryModel):
    """Every forward pass takes 0.1 s of its own clock."""

    now = 0.0

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self.now += 0.1
        return super().forward(batch, kv_cache)


@pytest.mark.parametrize("length", [16, 256])
def test_the_velocity_is_that_of_prompts_whatever_decodes_beside_them(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Each prompt takes 0.1 s, short ones too."""
    model = ClockModel()
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: model.now))
    rig = make_rig(model, num_blocks=800, scheduler={"max_batch_tokens": 512})
    assert rig.engine.stats().prefill_tokens_per_second is None
    for number in range(11):
        rig.run(f"r{number}", tuple((number + i) % 64 for i in range(length)), max_tokens=2)
    assert rig.engine.stats().prefill_tokens_per_second == pytest.approx(10 * length)


def test_joint_steps_of_lanes_count_once(make_rig: MakeRig) -> None:
    """One lane decodes while the other computes a prompt: neither's time is added to, or lost to, the other's."""
    model = TimedModel()
    rigs = [make_rig(model), make_rig()]
    lanes = [rig.engine._runner.lanes[0] for rig in rigs]

    class Joint:
        def run_lanes(self, plans: Sequence[StepPlan | None]) -> list[object]:
            return [
                None if plan is None else lane.executor.run(plan, None)
                for lane, plan in zip(lanes, plans, strict=True)
            ]  # fmt: skip

    joint = LaneRunner(lanes, Joint())  # type: ignore[arg-type]
    for index, (lane, length) in enumerate(zip(lanes, (4, 24), strict=True)):
        request = rigs[index].engine._build_request(
            id=str(index), prompt=tuple(range(length)), sampling=SamplingParams(max_tokens=3, temperature=0.0),
            cache_salt="", priority=0.0,
        )  # fmt: skip
        request.n = 1
        lane.submit(request)
    began = time.perf_counter()
    with torch.inference_mode():
        while joint.step():
            pass
    took = time.perf_counter() - began
    stats = build_stats(lanes, joint.work, num_pending=0)
    assert stats.computed_prompt_tokens_total == 28
    assert 3 * TimedModel.seconds <= stats.busy_seconds_total <= took
    assert stats.kv_block_size == BLOCK_SIZE
    assert stats.kv_blocks_total == 2 * rigs[0].engine.stats().kv_blocks_total


class Holding(HistoryModel):
    """Remembers without holding it what a step computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[weakref.ref[torch.Tensor]] = []

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        hidden = torch.zeros(8)
        self.held.append(weakref.ref(hidden))
        if batch.on_layer is not None:
            batch.on_layer(0)
        return super().forward(batch, kv_cache)


@pytest.mark.parametrize("error", [ValueError("bad"), StepAbandonedError()])
def test_what_a_step_computed_with_is_let_go_of_when_it_fails(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Memory is measured for one step at a time, and a collector comes by when it likes."""
    monkeypatch.setattr(runner.logger, "error", lambda *args, **kw: None)  # pytest keeps what is logged
    model = Holding()
    rig = make_rig(model=model)
    model.fail_once = error
    gc.disable()
    try:
        rig.submit("r", (1, 2, 3), max_tokens=2)
        rig.wait()
        end = time.monotonic() + 60.0
        while any(held() is not None for held in model.held):
            assert time.monotonic() < end
            time.sleep(0.002)
    finally:
        gc.enable()
