"""Sampling options through the whole engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tandem_worker.engine.schedule.params import FinishReason

from tests.tandem_worker.engine.history_model import HistoryModel, HistoryOracle, greedy_answer
from tests.tandem_worker.engine.rig import Rig

MakeRig = Callable[..., Rig]
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "frequency_penalty": 0.3, "repetition_penalty": 1.1}


def test_a_seed_gives_the_same_tokens_alone_crowded_and_preempted(make_rig: MakeRig) -> None:
    alone = make_rig()
    expected = alone.run("r", (1, 2, 3), 40, seed=11, **SAMPLED)
    crowded = make_rig(num_blocks=20, scheduler={"max_batch_tokens": 32})
    for index in range(6):
        crowded.submit(f"r{index}", (1, 2, 3), 40, seed=11 if index == 5 else index, **SAMPLED)
    crowded.wait()
    assert crowded.engine.stats().preemptions_total > 0
    assert crowded.out.tokens("r5") == expected
    assert crowded.out.tokens("r4") != expected


def test_a_choice_can_be_resumed_from_its_tokens(make_rig: MakeRig) -> None:
    rig = make_rig()
    whole = rig.run("whole", (1, 2, 3), 20, seed=5, temperature=1.0)
    rest = rig.run("rest", (1, 2, 3, *whole[:8]), 12, seed=5, temperature=1.0)
    assert whole[:8] + rest == whole


@pytest.mark.parametrize("length", [1, 4, 5, 23])
def test_prompt_logprobs_cover_the_prompt(make_rig: MakeRig, length: int) -> None:
    rig = make_rig(scheduler={"max_batch_tokens": 12})
    prompt = tuple(range(length))
    rig.run("warm", prompt, 1)
    rig.submit("r", prompt, 2, prompt_logprobs=2, num_logprobs=1, n=2)
    rig.wait()
    for choice in range(2):
        first, *later = rig.out.deltas["r", choice]
        scores = first.prompt_logprobs
        assert scores is not None
        assert len(scores) == length
        assert scores[0] is None
        assert all(delta.prompt_logprobs is None for delta in later)
        for index, score in enumerate(scores[1:], start=1):
            expected = torch.log_softmax(HistoryOracle().extend(prompt[:index]).logits(), -1)
            assert score is not None
            assert score.token_id == prompt[index]
            assert score.logprob == pytest.approx(float(expected[prompt[index]]), abs=1e-5)
            assert score.rank == 1 + int((expected > expected[prompt[index]]).sum())
            assert [token for token, _ in score.top] == expected.topk(2).indices.tolist()
        assert rig.out.tokens("r", choice) == greedy_answer(prompt, 2)
    assert rig.out.last("r").num_cached_tokens == 0


def test_a_prompt_can_be_scored_without_an_answer(make_rig: MakeRig) -> None:
    rig = make_rig()
    assert rig.run("r", (1, 2, 3), 0, prompt_logprobs=0) == []
    assert len(rig.out.last("r").prompt_logprobs or ()) == 3
    assert rig.out.reason("r") is FinishReason.LENGTH


def test_every_token_has_its_logprob_and_that_of_the_stop_token_is_apart(make_rig: MakeRig) -> None:
    answer = greedy_answer((1, 2), 6)
    rig = make_rig(eos_token_ids=[answer[5]])
    kept = answer[: answer.index(answer[5])]
    assert rig.run("r", (1, 2), 20, num_logprobs=0) == kept
    assert [entry.token_id for entry in rig.out.logprobs("r")] == kept
    assert rig.out.last("r").logprobs is None
    stop = rig.out.last("r").stop_logprob
    assert stop is not None
    assert stop.token_id == answer[5]
    expected = torch.log_softmax(HistoryOracle().extend((1, 2, *kept)).logits(), -1)[answer[5]]
    assert stop.logprob == pytest.approx(float(expected), abs=1e-5)


class Counting:
    """Allows 10, then 11, then 12, and is complete; refuses what it is told to."""

    def __init__(self, refuse: int | None = None) -> None:
        self.accepted: list[int] = []
        self.refuse = refuse

    def new(self) -> Counting:
        return Counting(self.refuse)

    def fill_mask(self, mask: object) -> None:
        assert isinstance(mask, torch.Tensor)
        mask.zero_()
        mask[0] = 1 << (10 + len(self.accepted))

    def accept(self, token_id: int) -> None:
        if token_id == self.refuse:
            raise ValueError("not in the language")
        self.accepted.append(token_id)

    @property
    def terminated(self) -> bool:
        return len(self.accepted) == 3

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def failed(self) -> bool:
        return False

    def give_up(self, reason: str) -> None: ...


def test_a_grammar_leads_each_choice_to_its_end(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit("r", (1, 2), 9, n=2, temperature=1.0, grammar=Counting())
    rig.wait()
    for choice in range(2):
        assert rig.out.tokens("r", choice) == [10, 11, 12]
        assert rig.out.reason("r", choice) is FinishReason.STOP


def test_a_grammar_that_fails_ends_its_choice_only(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit("bad", (1, 2), 9, grammar=Counting(refuse=11))
    rig.submit("good", (1, 2), 9)
    rig.wait()
    assert rig.out.reason("bad") is FinishReason.ERROR
    assert "not in the language" in (rig.out.last("bad").error or "")
    assert rig.out.tokens("good") == greedy_answer((1, 2), 9)


class Exhausted(Counting):
    """Has reached its limits: the token that its mask leaves says nothing."""

    def new(self) -> Exhausted:
        return Exhausted(refuse=10)

    @property
    def failed(self) -> bool:
        return True


def test_a_stop_token_does_not_end_the_answer_of_a_grammar_that_failed_as_if_it_were_complete(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    rig.submit("r", (1, 2), 9, grammar=Exhausted(), stop_token_ids=frozenset({10}))
    rig.wait()
    assert rig.out.reason("r") is FinishReason.ERROR
    assert rig.out.tokens("r") == []


def test_logits_that_are_no_number_are_an_error_not_a_token(make_rig: MakeRig) -> None:
    model = HistoryModel()
    forward = model.forward
    model.forward = lambda batch, kv_cache: forward(batch, kv_cache) * torch.nan  # type: ignore[method-assign]
    rig = make_rig(model)
    assert rig.run("r", (1, 2)) == []
    assert rig.out.reason("r") is FinishReason.ERROR
