"""Steps launched before the tokens of the one before are known change no answer and keep no block."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tandem_worker.engine.execute.host_copy import CudaCopier, HostCopy
from tandem_worker.engine.sample.device_sampler import DeviceSampler
from tandem_worker.engine.sample.host_sampler import HostSampler
from tandem_worker.engine.schedule.params import FinishReason

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_sampling_in_engine import Counting

PROMPT = (1, 2, 3)


class LateCopier:
    """Hands tokens out when they are waited for, and notes how many steps were launched by then."""

    def __init__(self, model: HistoryModel) -> None:
        self._model = model
        self.lead: list[int] = []

    def start(self, tensor: torch.Tensor) -> HostCopy:
        return _Late(self, tensor.clone(), len(self._model.batch_sizes))

    def wait(self, tensor: torch.Tensor, launched: int) -> torch.Tensor:
        self.lead.append(len(self._model.batch_sizes) - launched)
        return tensor


class _Late:
    def __init__(self, copier: LateCopier, tensor: torch.Tensor, launched: int) -> None:
        self._copier, self._tensor, self._launched = copier, tensor, launched

    def wait(self) -> torch.Tensor:
        return self._copier.wait(self._tensor, self._launched)


@pytest.fixture(params=[HostSampler, DeviceSampler])
def make_ahead(make_rig: Callable[..., Rig], request: pytest.FixtureRequest) -> Callable[..., tuple[Rig, LateCopier]]:
    def make(**kw: Any) -> tuple[Rig, LateCopier]:
        rig = make_rig(runs_ahead=True, **kw)
        copier = LateCopier(rig.model)
        rig.engine._executor._copier = copier
        if request.param is DeviceSampler:  # the one that a GPU has; its kernels have twins
            rig.engine._executor.sampler = DeviceSampler(rig.model.vocab_size, torch.device("cpu"))
        return rig, copier

    return make


MakeAhead = Callable[..., tuple[Rig, LateCopier]]


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(make_ahead: MakeAhead) -> None:
    rig, copier = make_ahead()
    assert rig.run("r", PROMPT, 8) == greedy_answer(PROMPT, 8)
    assert copier.lead == [1] * 7 + [0], "only after the last token, whose place is known, nothing is launched"
    assert len(rig.model.batch_sizes) == 8


def test_steps_that_end_no_prompt_choose_no_token(make_ahead: MakeAhead) -> None:
    rig, copier = make_ahead(num_blocks=32, scheduler={"max_batch_tokens": 16})
    prompt = tuple(range(50))
    assert rig.run("r", prompt, 4) == greedy_answer(prompt, 4)
    assert len(copier.lead) == 4 + 3, "three steps of a part of the prompt"


def test_what_was_computed_after_a_stop_token_is_dropped(make_ahead: MakeAhead) -> None:
    answer = greedy_answer(PROMPT, 12)
    count = answer.index(answer[9])
    rig, _ = make_ahead()
    assert rig.run("r", PROMPT, 12, stop_token_ids=frozenset([answer[9]])) == answer[:count]
    assert rig.out.last("r").finish_reason is FinishReason.STOP
    assert len(rig.model.batch_sizes) == count + 2, "one step was computed in vain"
    assert rig.engine.stats().generated_tokens_total == count
    again = (*PROMPT, *answer[:count], 5, 6, 7, 8)
    assert rig.run("next", again, 6) == greedy_answer(again, 6), "the cache holds nothing of the dropped token"


def test_answers_under_pressure_are_those_without_it(make_ahead: MakeAhead) -> None:
    rng = random.Random(3)
    rig, _ = make_ahead(num_blocks=24, scheduler={"max_batch_tokens": 32, "max_running_requests": 8})
    prompts = {f"r{i}": tuple(rng.randrange(64) for _ in range(rng.randint(1, 30))) for i in range(25)}
    for index, (name, prompt) in enumerate(prompts.items()):
        options: dict[str, Any] = {"num_logprobs": 0} if index % 7 == 0 else {}
        stop = greedy_answer(prompt, 40)[index]
        rig.submit(name, prompt, 40, priority=index % 3, n=1 + index % 2, stop_token_ids=frozenset([stop]), **options)
    rig.wait()
    for index, (name, prompt) in enumerate(prompts.items()):
        for choice in range(1 + index % 2):
            answer = greedy_answer(prompt, 40)
            assert rig.out.tokens(name, choice) == answer[: answer.index(answer[index])]
    assert rig.engine.stats().preemptions_total > 0


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "min_tokens": 9},
        {"temperature": 0.0, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
        {"temperature": 1.0, "presence_penalty": 0.5, "n": 3, "logit_bias": {3: 2.0}},
    ],
)
def test_sampled_answers_are_the_same(
    make_ahead: MakeAhead, make_rig: Callable[..., Rig], options: dict[str, Any]
) -> None:
    ahead, copier = make_ahead()
    plain = make_rig()
    for rig in (ahead, plain):
        rig.submit("r", PROMPT, 30, seed=5, stop_token_ids=frozenset([9]), **options)
        rig.wait()
    for choice in range(options.get("n", 1)):
        assert ahead.out.tokens("r", choice) == plain.out.tokens("r", choice)
    assert 1 in copier.lead


def test_a_grammar_waits_for_its_tokens_and_holds_others_back_only_while_it_runs(make_ahead: MakeAhead) -> None:
    rig, copier = make_ahead()
    rig.submit("constrained", PROMPT, 9, grammar=Counting())
    rig.submit("free", PROMPT, 30)
    rig.wait()
    assert rig.out.tokens("constrained") == [10, 11, 12]
    assert rig.out.tokens("free") == greedy_answer(PROMPT, 30)
    assert sum(copier.lead) > 20


def test_tokens_are_delivered_before_a_step_that_is_waited_for(make_ahead: MakeAhead) -> None:
    rig, _ = make_ahead()
    waiting: list[int] = []
    executor, runner = rig.engine._executor, rig.engine._runner
    settle = executor.settle

    def watch() -> None:
        waiting.append(len(runner.outputs.deltas))
        settle()

    executor.settle = watch  # type: ignore[method-assign]
    rig.submit("free", PROMPT, 200)
    rig.out.wait_tokens("free", 3)
    rig.submit("constrained", PROMPT, 9, grammar=Counting())
    rig.wait()
    assert len(waiting) >= 3
    assert not any(waiting)
    assert rig.out.tokens("free") == greedy_answer(PROMPT, 200)


def test_an_abort_while_a_step_is_under_way_frees_its_blocks_afterwards(make_ahead: MakeAhead) -> None:
    rig, _ = make_ahead(num_blocks=300)
    rig.submit("r", PROMPT, 1000)
    rig.submit("other", (4, 5), 60)
    rig.out.wait_tokens("r", 3)
    rig.engine.abort("r")
    rig.wait()
    assert rig.out.reason("r") is FinishReason.ABORT
    assert rig.out.tokens("other") == greedy_answer((4, 5), 60)


def test_a_failed_step_ends_its_requests_after_the_one_before_is_delivered(make_ahead: MakeAhead) -> None:
    rig, copier = make_ahead()
    wait = copier.wait

    def fail_the_next(tensor: torch.Tensor, launched: int) -> torch.Tensor:
        if len(rig.model.batch_sizes) == 4:
            rig.model.fail_once = ValueError("bad")
        return wait(tensor, launched)

    copier.wait = fail_the_next  # type: ignore[method-assign]
    rig.submit("r", PROMPT, 20)
    rig.wait()
    assert rig.out.tokens("r") == greedy_answer(PROMPT, 4)
    assert rig.out.reason("r") is FinishReason.ERROR
    assert rig.run("next", (5, 6), 4) == greedy_answer((5, 6), 4)


def test_no_token_ends_the_choice_though_the_next_step_was_launched(make_ahead: MakeAhead) -> None:
    rig, _ = make_ahead()
    forward = rig.model.forward
    rig.model.forward = lambda batch, kv_cache: forward(batch, kv_cache) * torch.nan  # type: ignore[method-assign]
    assert rig.run("r", PROMPT) == []
    assert rig.out.reason("r") is FinishReason.ERROR


class FakeCuda:
    """What `CudaCopier` uses of `torch.cuda`, writing down what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._current = "compute"
        cuda = self

        class Stream:
            def __init__(self, device: object) -> None:
                self.name = "copies"

            def wait_stream(self, other: str) -> None:
                cuda.calls.append(f"{self.name} waits for {other}")

        class Event:
            def __init__(self, *, blocking: bool) -> None:
                assert blocking, "waiting must not spin"

            def record(self, stream: Stream) -> None:
                cuda.calls.append(f"event on {stream.name}")

            def synchronize(self) -> None:
                cuda.calls.append("host waits")

        class Use:
            def __init__(self, stream: Stream) -> None: ...

            def __enter__(self) -> None:
                cuda.calls.append("copy")

            def __exit__(self, *error: object) -> None: ...

        self.Stream, self.Event, self.stream = Stream, Event, Use

    def current_stream(self, device: object) -> str:
        return "compute"

    def is_available(self) -> bool:
        return False


def test_copies_run_beside_the_computation_and_the_host_waits_on_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: cuda.calls.append("kept"), raising=False)
    copy = CudaCopier(torch.device("cpu"), cuda).start(torch.tensor([3, 4]))
    assert cuda.calls == ["copies waits for compute", "copy", "kept", "event on copies"]
    assert copy.wait().tolist() == [3, 4]
    assert cuda.calls[-1] == "host waits"
