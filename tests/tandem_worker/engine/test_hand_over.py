"""Where a model's layers are one call, tokens are handed over as the next step's call begins, and never later. So they
are, when it is launched, where a device waits for the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tandem_worker.engine.contract import RemotePrefill
from tandem_worker.engine.schedule.params import FinishReason
from tandem_worker.model.contract import ForwardBatch, KVCache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Rig

PROMPT = (1, 2, 3)


class OneCall(HistoryModel):
    """Notes how many tokens are out before a step says that its call begins, and when it does."""

    def __init__(self) -> None:
        super().__init__()
        self.is_one_call = True
        self.count_out: Callable[[], int] = lambda: 0
        self.out: list[tuple[int, int]] = []
        self.count_steps: Callable[[], int] = lambda: 0
        self.steps: list[int] = []
        """What the figures say as a step begins."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self.steps.append(self.count_steps())
        before = self.count_out()
        assert batch.on_compute is not None
        batch.on_compute()
        self.out.append((before, self.count_out()))
        return super().forward(batch, kv_cache)


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    model = OneCall()
    rig = make_rig(model=model, host_blocks=32, num_blocks=24)
    model.count_out = lambda: sum(len(rig.out.tokens(*key)) for key in list(rig.out.deltas))
    return rig


def test_a_token_goes_out_as_the_call_of_the_next_step_begins(rig: Rig) -> None:
    rig.submit("r", PROMPT, max_tokens=5)
    rig.wait()
    assert rig.out.tokens("r") == list(greedy_answer(PROMPT, 5))
    model: Any = rig.model
    assert model.out == [(0, 0), (0, 1), (1, 2), (2, 3), (3, 4)]


def test_the_last_token_waits_for_no_step(rig: Rig) -> None:
    for index in range(3):
        rig.submit(f"r{index}", PROMPT, max_tokens=1)
        rig.wait()
        assert rig.out.reason(f"r{index}") is FinishReason.LENGTH


def test_tokens_go_out_though_the_next_step_fails(rig: Rig) -> None:
    model: Any = rig.model

    def fail_in_time() -> int:
        if len(model.steps) == 3:
            model.fail_once = RuntimeError("no")
        return 0

    model.count_steps = fail_in_time
    rig.submit("r", PROMPT, max_tokens=50)
    rig.wait()
    assert rig.out.tokens("r") == list(greedy_answer(PROMPT, 3))
    assert rig.out.reason("r") is FinishReason.ERROR


def test_many_streams_lose_no_token(rig: Rig) -> None:
    """Beside preemptions and blocks that move to the host and back."""
    prompts = [tuple(range(index, index + 9)) for index in range(6)]
    for index, prompt in enumerate(prompts):
        rig.submit(f"r{index}", prompt, max_tokens=12)
    rig.out.wait_finished(len(prompts))
    for index, prompt in enumerate(prompts):
        assert rig.out.tokens(f"r{index}") == list(greedy_answer(prompt, 12))


class Launched(HistoryModel):
    """Notes how many tokens are out when a step is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.count_out: Callable[[], int] = lambda: 0
        self.out: list[int] = []

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        self.out.append(self.count_out())
        return super().forward(batch, kv_cache)


def test_a_device_that_waits_gets_its_next_step_before_tokens_go_out(make_rig: Callable[..., Rig]) -> None:
    """Steps whose tokens the host reports on do not run ahead."""
    model = Launched()
    rig = make_rig(model=model, runs_ahead=True)
    model.count_out = lambda: len(rig.out.tokens("r"))
    rig.submit("r", PROMPT, max_tokens=5, num_logprobs=0)
    rig.wait()
    assert model.out == [0, 0, 1, 2, 3]
    assert rig.out.tokens("r") == list(greedy_answer(PROMPT, 5))
    assert rig.run("next", PROMPT, 3) == list(greedy_answer(PROMPT, 3)), "nothing is held back when there is no step"


class Peer:
    """Who ordered a prompt."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def blocks_ready(self, request_id: str, layer: int, first_index: int, block_ids: object) -> None:
        pass

    def prefill_started(self, request_id: str) -> None:
        pass

    def prefill_done(self, request_id: str, logits: bytes, num_cached_tokens: int, prompt_name: bytes) -> None:
        self.done.set()

    def prefill_failed(self, request_id: str, message: str) -> None:
        raise AssertionError(message)


def test_figures_of_a_worker_that_only_prefills_are_of_its_last_step(make_rig: Callable[..., Rig]) -> None:
    """Who ordered the prompt is told of them: an engine whose steps do not count on is given up."""
    model = OneCall()
    rig = make_rig(model=model, scheduler={"max_batch_tokens": 8})
    model.count_steps = lambda: rig.engine.stats().steps_total
    order = RemotePrefill(
        request_id="p", generation=1, token_ids=tuple(range(60)), num_cached_tokens=0, block_ids=(), endpoints=(),
        cache_salt="", priority=0.0,
    )  # fmt: skip
    peer = Peer()
    rig.engine.submit_prefill(order, peer)
    assert peer.done.wait(60)
    rig.engine.release("p")
    assert len(model.steps) > 4
    assert model.steps == list(range(len(model.steps)))
