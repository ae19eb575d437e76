"""A request that goes on in another engine says what the first one would have said, from every token on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.schedule.params import FinishReason

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.engine.rig import Rig
from tests.tandem_worker.engine.test_disaggregation import until
from tests.tandem_worker.engine.wire import Wire

MakeRig = Callable[..., Rig]
PROMPT = tuple(range(3, 14))
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 11},
    "nucleus": {"temperature": 0.8, "seed": 5, "top_p": 0.7, "top_k": 20},
    "penalties": {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5,
                  "repetition_penalty": 1.3},
    "bias and a least length": {"temperature": 1.0, "seed": 4, "logit_bias": {5: 4.0}, "min_tokens": 6,
                                "stop_token_ids": frozenset(range(0, 64, 9))},
    "logprobs": {"temperature": 1.0, "seed": 6, "num_logprobs": 2},
}  # fmt: skip


class Alternating:
    """A grammar: even tokens at even places, odd ones at odd places."""

    def __init__(self) -> None:
        self.place = 0
        self.seconds = 0.0
        self.terminated = self.failed = False

    def new(self) -> Alternating:
        return Alternating()

    def fill_mask(self, mask: Any) -> None:
        mask[:] = 0x55555555 if self.place % 2 == 0 else -0x55555556

    def accept(self, token_id: int) -> None:
        if token_id % 2 != self.place % 2:
            raise RequestError(f"{token_id} is not allowed")
        self.place += 1
        self.terminated = self.place == 20

    def give_up(self, reason: str) -> None:
        raise AssertionError(reason)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "runs_ahead"), [(1, False), (3, False), (1, True), (3, True)])
def test_every_cut_gives_the_same_rest(make_rig: MakeRig, kind: str, n: int, runs_ahead: bool) -> None:
    rig = make_rig(num_blocks=200)
    options = {"max_tokens": 10, "n": n} | KINDS[kind]
    rig.submit("whole", PROMPT, **options)
    rig.wait()
    whole = [rig.out.tokens("whole", choice) for choice in range(n)]
    for cut in range(9):
        other = make_rig(num_blocks=200, runs_ahead=runs_ahead)
        resumed = tuple(None if len(tokens) <= cut + choice else tuple(tokens[: cut + choice])
                        for choice, tokens in enumerate(whole))  # fmt: skip
        if all(tokens is None for tokens in resumed):
            continue
        open_choices = [choice for choice in range(n) if resumed[choice] is not None]
        other.resume("rest", PROMPT, resumed, **options)
        other.out.wait_finished(len(open_choices))
        for choice in open_choices:
            assert other.out.tokens("rest", choice) == whole[choice][cut + choice :], (cut, choice)
            assert other.out.reason("rest", choice) is rig.out.reason("whole", choice)
            logprobs = [(entry.token_id, entry.top[0][0]) for entry in rig.out.logprobs("whole", choice) if entry.top]
            again = [(entry.token_id, entry.top[0][0]) for entry in other.out.logprobs("rest", choice) if entry.top]
            assert again == logprobs[cut + choice :]


@pytest.mark.parametrize("cut", range(8))
def test_a_grammar_goes_on_where_it_was(make_rig: MakeRig, cut: int) -> None:
    rig = make_rig()
    options = {"max_tokens": 8, "temperature": 1.0, "seed": 9, "grammar": Alternating()}
    whole = rig.run("whole", PROMPT, **options)
    assert [token % 2 for token in whole] == [0, 1] * 4
    other = make_rig()
    other.resume("rest", PROMPT, (tuple(whole[:cut]),), **options)
    other.wait()
    assert other.out.tokens("rest") == whole[cut:]


@given(
    lengths=st.lists(st.one_of(st.none(), st.integers(0, 15)), min_size=1, max_size=5).filter(
        lambda lengths: any(length is not None for length in lengths)
    ),
    num_prompt=st.integers(1, 40),
    seed=st.integers(0, 1 << 60),
    max_running=st.sampled_from([2, 3, 8]),
)
@settings(max_examples=40)
def test_choices_may_stand_anywhere(lengths: list[int | None], num_prompt: int, seed: int, max_running: int) -> None:
    prompt, n = tuple(range(num_prompt)), len(lengths)
    options = {"max_tokens": 16, "n": n, "temperature": 1.0, "seed": seed}
    rig = Rig(HistoryModel(), 100)
    other = Rig(HistoryModel(), 40, scheduler={"max_running_requests": max_running})
    try:
        rig.submit("whole", prompt, **options)
        rig.wait()
        whole = [rig.out.tokens("whole", choice) for choice in range(n)]
        other.resume(
            "rest",
            prompt,
            tuple(None if length is None else tuple(whole[choice][:length]) for choice, length in enumerate(lengths)),
            **options,
        )
        other.out.wait_finished(sum(length is not None for length in lengths))
        for choice, length in enumerate(lengths):
            assert other.out.tokens("rest", choice) == ([] if length is None else whole[choice][length:])
        assert other.engine._scheduler.blocks.num_held == 0
        until(lambda: other.engine.idle)
    finally:
        rig.close()
        other.close()


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
def test_a_prefill_worker_computes_the_prompt_and_what_was_said(make_rig: MakeRig, cut: int) -> None:
    whole = make_rig().run("whole", PROMPT, temperature=1.0, seed=2)
    prefill, decode = make_rig(), make_rig(scheduler={"local_prefill_max_tokens": 2})
    wire = Wire(prefill.engine, decode.engine)
    decode.resume("rest", PROMPT, (tuple(whole[:cut]),), temperature=1.0, seed=2, prefill_endpoints=("prefill-0:1",))
    decode.wait()
    assert decode.out.tokens("rest") == whole[cut:]
    assert wire.orders["rest"].token_ids == (*PROMPT, *whole[:cut])
    assert decode.engine.stats().prefills_remote_total == 1
    until(lambda: prefill.engine.idle)


def test_aborting_the_leader_lets_the_others_go_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.submit("whole", PROMPT, n=2, temperature=1.0, seed=1, max_tokens=30)
    rig.wait()
    other = make_rig()
    first, second = (tuple(rig.out.tokens("whole", choice)[:4]) for choice in range(2))
    other.resume("rest", PROMPT, (first, second), n=2, temperature=1.0, seed=1, max_tokens=30)
    other.engine.abort("rest", 0)
    other.out.wait_finished(2)
    assert other.out.tokens("rest", 1) == rig.out.tokens("whole", 1)[4:]
    assert other.out.reason("rest", 0) in (FinishReason.ABORT, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("resumed", "n", "why"),
    [
        ((None,), 1, "one of which is open"),
        (((1,), (2,)), 1, "every choice"),
        (((99,),), 1, "outside 0 to 63"),
        (((1, 2, 3, 4, 5, 6, 7, 8),), 1, "all of its 8 tokens"),
    ],
)
def test_what_cannot_be_resumed_says_so(make_rig: MakeRig, resumed: Any, n: int, why: str) -> None:
    rig = make_rig()
    with pytest.raises(RequestError, match=why) as raised:
        rig.resume("r", PROMPT, resumed, n=n)
    assert (raised.value.status, raised.value.code) == (409, "cannot_resume")


@pytest.mark.parametrize(("tokens", "why"), [((2, 2), "do not follow"), ((0, 1) * 10, "is complete")])
def test_tokens_that_a_grammar_does_not_know_are_refused(make_rig: MakeRig, tokens: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        make_rig().resume("r", PROMPT, (tokens,), max_tokens=40, grammar=Alternating())
