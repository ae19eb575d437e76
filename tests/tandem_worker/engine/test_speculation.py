"""Guesses change no answer: tokens, logprobs, usage and ends are those of an engine without them, whoever guesses."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.launch import SpeculativeConfig
from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.guess.literals import LiteralFollower, LiteralText, Spelling, Word
from tandem_worker.engine.sample.device_sampler import DeviceSampler
from tandem_worker.engine.sample.host_sampler import HostSampler
from tandem_worker.engine.sample.masks import MaskCredit
from tandem_worker.engine.schedule.params import TokenDelta, TokenLogprob
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence
from tandem_worker.engine.snapshot import build_stats
from tandem_worker.engine.speculation import find_obstacle
from tandem_worker.model.contract import ForwardBatch, KVCache

from tests.tandem_worker.engine.history_model import HistoryModel, greedy_answer
from tests.tandem_worker.engine.rig import Collector, Rig
from tests.tandem_worker.engine.test_disaggregation import until
from tests.tandem_worker.engine.test_resume import KINDS, Alternating
from tests.tandem_worker.engine.test_sampling_in_engine import Counting, Exhausted
from tests.tandem_worker.engine.wire import Wire

MakeRig = Callable[..., Rig]
DOCS = Path(__file__).parents[3] / "docs"
LOOKUP = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=5)
ALL_KINDS: dict[str, dict[str, Any]] = {
    **KINDS,
    "min_p": {"temperature": 1.2, "seed": 8, "min_p": 0.05},
    "every logprob": {"num_logprobs": 20},
    "prompt logprobs": {"prompt_logprobs": 1, "num_logprobs": 0},
    "stop tokens": {"temperature": 1.0, "seed": 12, "stop_token_ids": frozenset([3, 40]), "num_logprobs": 1},
    "no end": {"ignore_eos": True, "max_tokens": 33},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "a grammar": {"temperature": 1.0, "seed": 2, "grammar": Alternating()},
    "a grammar that ends": {"temperature": 1.0, "seed": 2, "grammar": Counting()},
    "a grammar that fails": {"temperature": 1.0, "seed": 2, "grammar": Counting(refuse=11)},
    "a grammar without a way on": {"grammar": Exhausted()},
    "choices": {"temperature": 1.0, "seed": 5, "n": 3},
    "choices with penalties": {"temperature": 1.0, "seed": 7, "n": 2, "frequency_penalty": 0.7},
}


class Knowing:
    """A guesser that was told the answers, by prompt and choice, and lies now and then. A `guess.contract.Guesser`."""

    def __init__(
        self, answers: Mapping[tuple[tuple[int, ...], int], list[int]], lies: float = 0.3, vocab: int = 64
    ) -> None:
        self.answers = answers
        self.lies = lies
        self.vocab = vocab
        self.random = random.Random(3)

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        guesses: dict[Sequence, Guess] = {}
        for sequence in sequences:
            rest = self.answers.get((sequence.prompt, sequence.choice), [])[len(sequence.output) :][: most[sequence]]
            if rest:
                tokens = tuple((token + (self.random.random() < self.lies)) % self.vocab for token in rest)
                guesses[sequence] = Guess(tokens, Source.TEXT, (0.9,) * len(tokens))
        return guesses

    def forget(self, sequence: Sequence) -> None: ...


def tell(deltas: list[TokenDelta]) -> dict[str, Any]:
    """All that a client learns of a choice."""
    last = deltas[-1]
    return {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [entry for delta in deltas for entry in delta.logprobs or ()],
        "prompt": [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None],
        "end": (last.finish_reason, last.stop_token_id, last.stop_logprob, str(last.error)),
        "cached": {delta.num_cached_tokens for delta in deltas},
    }


def run_all(rig: Rig, requests: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]]) -> dict[tuple[str, int], Any]:
    for name, (prompt, options) in requests.items():
        rig.submit(name, prompt, **({"max_tokens": 24} | options))
    rig.wait()
    return {key: tell(deltas) for key, deltas in sorted(rig.out.deltas.items())}


def answers_of(out: Collector, requests: Mapping[str, tuple[tuple[int, ...], dict[str, Any]]]) -> dict[Any, list[int]]:
    return {(requests[name][0], choice): out.tokens(name, choice) for name, choice in list(out.deltas)}


def prompts(kinds: Mapping[str, dict[str, Any]], seed: int = 0) -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    generator = random.Random(seed)
    return {
        name: (tuple(generator.randrange(64) for _ in range(generator.randrange(3, 30))), options)
        for name, options in kinds.items()
    }


def replace_guesser(rig: Rig, guesser: Knowing) -> None:
    speculator = rig.engine._runner.lanes[0].speculator
    assert speculator is not None
    speculator._guesser = guesser


@pytest.fixture
def make_guessing(make_rig: MakeRig) -> Callable[..., Rig]:
    def make(answers: Mapping[Any, list[int]], lies: float = 0.3, **kw: Any) -> Rig:
        rig = make_rig(**({"speculative": LOOKUP} | kw))
        replace_guesser(rig, Knowing(answers, lies))
        return rig

    return make


def accepted(rig: Rig) -> int:
    return sum(rig.engine.stats().accepted_draft_tokens_total.values())


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_kind_of_request_is_answered_as_without_guesses(
    make_rig: MakeRig, make_guessing: MakeRig, kind: str
) -> None:
    requests = prompts({kind: ALL_KINDS[kind]})
    plain = make_rig()
    expected = run_all(plain, requests)
    rig = make_guessing(answers_of(plain.out, requests))
    assert run_all(rig, requests) == expected
    assert kind.startswith(("a grammar", "one", "two")) or accepted(rig) > 0
    assert len(rig.model.batch_sizes) <= len(plain.model.batch_sizes)


@pytest.mark.parametrize("num_blocks", [200, 40])
@pytest.mark.parametrize("host_blocks", [0, 30])
@pytest.mark.parametrize("adaptive", [False, True])
def test_all_kinds_at_once_with_room_and_without(
    make_rig: MakeRig, make_guessing: MakeRig, num_blocks: int, host_blocks: int, adaptive: bool
) -> None:
    requests = prompts(ALL_KINDS)
    alone = {}
    for name in requests:
        rig = make_rig(num_blocks=200)
        alone |= run_all(rig, {name: requests[name]})
    plain = make_rig(num_blocks=200)
    run_all(plain, requests)
    rig = make_guessing(
        answers_of(plain.out, requests),
        num_blocks=num_blocks,
        host_blocks=host_blocks,
        speculative=LOOKUP.model_copy(update={"adaptive": adaptive}),
    )
    told = run_all(rig, requests)
    assert {key: {**one, "cached": None} for key, one in told.items()} == {
        key: {**one, "cached": None} for key, one in alone.items()
    }
    if num_blocks == 40:
        assert rig.engine.stats().preemptions_total > 0
    assert adaptive or accepted(rig) > 0


def test_several_tokens_of_a_step_come_in_one_delta(make_rig: MakeRig, make_guessing: MakeRig) -> None:
    answer = greedy_answer((1, 2, 3), 13)
    rig = make_guessing({((1, 2, 3), 0): answer}, lies=0.0)
    rig.submit("r", (1, 2, 3), 13, num_logprobs=1)
    rig.wait()
    deltas = rig.out.deltas["r", 0]
    assert [len(delta.token_ids) for delta in deltas] == [1, 6, 6]
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)
    assert rig.out.tokens("r") == answer
    assert rig.model.batch_sizes == [1, 1, 1]
    stats = rig.engine.stats()
    assert stats.draft_tokens_total["text"] == stats.accepted_draft_tokens_total["text"] == 10
    assert stats.generated_tokens_total == 13
    assert stats.decode_tokens_per_step > 1.05


def test_no_token_is_computed_beyond_the_last_one(make_guessing: MakeRig) -> None:
    rig = make_guessing({((1, 2, 3), 0): greedy_answer((1, 2, 3), 100)}, lies=0.0)
    rig.run("r", (1, 2, 3), 4)
    assert rig.model.num_tokens == 3 + 3, "the answer's last token is never computed"


def test_blocks_of_right_guesses_are_named_and_those_of_wrong_ones_are_not(make_guessing: MakeRig) -> None:
    prompt = tuple(range(8))
    for lies in (0.0, 1.0, 0.5):
        rig = make_guessing({(prompt, 0): greedy_answer(prompt, 40)}, lies=lies)
        answer = rig.run("r", prompt, 33)
        assert answer == greedy_answer(prompt, 33)
        assert rig.run("next", (*prompt, *answer), 8) == greedy_answer((*prompt, *answer), 8)
        assert rig.out.last("next").num_cached_tokens == 40


def test_a_remote_prefill_is_followed_by_guesses(make_rig: MakeRig, make_guessing: MakeRig) -> None:
    prefill = make_rig(num_blocks=200, scheduler={"max_batch_tokens": 16}, speculative=LOOKUP)
    prompt = tuple(range(40))
    decode = make_guessing(
        {(prompt, 0): greedy_answer(prompt, 20)}, num_blocks=100, scheduler={"local_prefill_max_tokens": 2}
    )
    Wire(prefill.engine, decode.engine)
    assert decode.run("r", prompt, 20, prefill_endpoints=("prefill-0:1",)) == greedy_answer(prompt, 20)
    assert accepted(decode) > 5
    until(lambda: prefill.engine.idle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_choice_that_moves_goes_on_the_same_whoever_guesses(
    make_rig: MakeRig, make_guessing: MakeRig, kind: str
) -> None:
    """From an engine without guesses to one with them and back, cut anywhere."""
    prompt, options = tuple(range(3, 14)), {"max_tokens": 16, "n": 2} | KINDS[kind]
    plain = make_rig(num_blocks=200)
    plain.submit("whole", prompt, **options)
    plain.wait()
    whole = {(prompt, choice): plain.out.tokens("whole", choice) for choice in range(2)}
    least = min(map(len, whole.values()))
    for cut in range(1, least - 1, 3):
        rig = make_guessing(whole, num_blocks=200)
        rig.resume("rest", prompt, tuple(tuple(tokens[:cut]) for tokens in whole.values()), **options)
        rig.wait()
        assert {(prompt, choice): rig.out.tokens("rest", choice) for choice in range(2)} == {
            key: tokens[cut:] for key, tokens in whole.items()
        }


class Slow(Alternating):
    """A grammar that takes more per token than is free."""

    def new(self) -> Slow:
        return Slow()

    def fill_mask(self, mask: Any) -> None:
        super().fill_mask(mask)
        self.seconds += 0.001


def test_a_slow_grammar_gets_one_token_a_step(make_rig: MakeRig, make_guessing: MakeRig) -> None:
    """Its masks cost credit that comes back between steps: several in a step would end it for its haste."""
    requests = prompts({"slow": {"grammar": Slow()}})
    plain = make_rig()
    expected = run_all(plain, requests)
    rig = make_guessing(answers_of(plain.out, requests), lies=0.0)
    assert run_all(rig, requests) == expected
    assert accepted(rig) == 0


class Slowing(Alternating):
    """Quick for five tokens, and slow from then on."""

    def new(self) -> Slowing:
        return Slowing()

    def fill_mask(self, mask: Any) -> None:
        super().fill_mask(mask)
        self.seconds += 0.0001 if self.place < 5 else 0.012


def test_grammars_that_become_slow_within_a_step_get_no_further_tokens_in_it(make_guessing: MakeRig) -> None:
    """For one token of each in a step there is time; for five of each a client would be told that there is none."""
    requests = prompts({name: {"grammar": Slowing(), "max_tokens": 14} for name in ("a", "b", "c")})
    plain = make_guessing({}, lies=0.0)
    slow_steps(plain)
    expected = run_all(plain, requests)
    assert {told["end"][0] for told in expected.values()} == {"length"}
    rig = make_guessing(answers_of(plain.out, requests), lies=0.0)
    slow_steps(rig)
    assert run_all(rig, requests) == expected
    assert accepted(rig) > 0, "while they were quick: of the first alone where the others came late"


def slow_steps(rig: Rig) -> None:
    """By the clock of masks each step takes 0.1 s, and nothing else takes any time."""
    sampler = rig.engine._executor.sampler
    assert isinstance(sampler, HostSampler)
    model = rig.model
    assert isinstance(model, HistoryModel)
    sampler._credit = MaskCredit(lambda: 0.1 * len(model.batch_sizes))


class Broken(HistoryModel):
    """Fails in its third step."""

    def forward(self, batch: Any, kv_cache: Any) -> torch.Tensor:
        if len(self.batch_sizes) == 2:
            self.fail_once = RuntimeError("a bit has flipped")
        return super().forward(batch, kv_cache)


def test_a_failed_step_with_guesses_leaves_nothing(make_guessing: MakeRig) -> None:
    answer = greedy_answer((1, 2), 40)
    rig = make_guessing({((1, 2), 0): answer}, lies=0.2, model=Broken())
    rig.submit("r", (1, 2), 40)
    rig.wait()
    assert "a bit has flipped" in str(rig.out.last("r").error)
    assert rig.run("again", (1, 2), 40) == answer


@settings(max_examples=25, deadline=None)
@given(
    lies=st.floats(0, 1),
    most=st.integers(1, 9),
    num_blocks=st.sampled_from([14, 30, 200]),
    batch=st.sampled_from([9, 16, 64]),
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(1, 2)), min_size=1, max_size=5),
)
def test_random_guesses_in_random_company(
    lies: float, most: int, num_blocks: int, batch: int, lengths: list[tuple[int, int, int]]
) -> None:
    torch.set_num_threads(1)
    config = SpeculativeConfig(method="Lookup", adaptive=False, max_tokens=most)
    rig = Rig(HistoryModel(), num_blocks, scheduler={"max_batch_tokens": batch}, speculative=config)
    plan = {f"r{i}": (tuple(range(i, i + length)), count, n) for i, (length, count, n) in enumerate(lengths)}
    answers = {(prompt, c): greedy_answer(prompt, count) for prompt, count, n in plan.values() for c in range(n)}
    replace_guesser(rig, Knowing(answers, lies))
    for name, (prompt, count, n) in plan.items():
        rig.submit(name, prompt, count, n=n)
    rig.wait()
    rig.close()
    assert rig.engine._scheduler.blocks.num_held == 0
    for name, (prompt, count, n) in plan.items():
        for choice in range(n):
            assert rig.out.tokens(name, choice) == answers[prompt, choice][:count]


@pytest.mark.parametrize("method", ["Auto", "Lookup"])
def test_auto_is_off_where_answers_might_differ(
    make_rig: MakeRig, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(speculative=SpeculativeConfig(method=method))
    assert (rig.engine.stats().guess_seconds_total is None) == (method == "Auto")
    exact = HistoryModel()
    exact.inexact = None
    auto = SpeculativeConfig(method="Auto")
    assert make_rig(exact, speculative=auto).engine.stats().guess_seconds_total is not None
    assert make_rig(exact).engine.stats().guess_seconds_total is not None, "the default"
    off = SpeculativeConfig(method="Off")
    assert make_rig(exact, speculative=off).engine.stats().guess_seconds_total is None


@pytest.mark.parametrize("method", ["Auto", "Lookup"])
def test_auto_keeps_to_steps_in_which_rows_are_exact(make_rig: MakeRig, method: str) -> None:
    """And a method that is asked for does not."""
    model = HistoryModel()
    model.exact_rows = 6
    rig = make_rig(model, speculative=LOOKUP.model_copy(update={"method": method}))
    prompts = {f"r{number}": tuple(range(number, number + 5)) for number in range(4)}
    answers = {(prompt, 0): greedy_answer(prompt, 60) for prompt in prompts.values()}
    replace_guesser(rig, Knowing(answers, lies=0.2))
    rows: list[int] = []
    forward = model.forward

    def watch(batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        if not batch.is_decode and batch.is_decode_with_guesses:
            rows.append(batch.token_ids.shape[0])
        return forward(batch, kv_cache)

    model.forward = watch
    for number, (name, prompt) in enumerate(prompts.items()):
        rig.submit(name, prompt, 60 - 10 * number)
    rig.wait()
    for name, prompt in prompts.items():
        assert rig.out.tokens(name) == answers[prompt, 0][: len(rig.out.tokens(name))]
    assert accepted(rig) > 0
    assert (max(rows) <= 6) is (method == "Auto")


@pytest.mark.parametrize("device_sampler", [False, True])
@pytest.mark.parametrize("adaptive", [False, True])
def test_steps_run_ahead_until_guesses_pay(make_rig: MakeRig, adaptive: bool, device_sampler: bool) -> None:
    requests = prompts(ALL_KINDS)
    plain = make_rig(num_blocks=200)
    expected = run_all(plain, requests)
    config = LOOKUP.model_copy(update={"adaptive": adaptive})
    rig = make_rig(num_blocks=200, speculative=config, runs_ahead=True)
    if device_sampler:
        rig.engine._executor.sampler = DeviceSampler(64, torch.device("cpu"))
    replace_guesser(rig, Knowing(answers_of(plain.out, requests)))
    told = run_all(rig, requests)
    assert told.keys() == expected.keys()
    for key, one in expected.items():
        assert same_but_rounded(told[key], one), key
    assert adaptive or accepted(rig) > 0


def same_but_rounded(ours: Any, theirs: Any) -> bool:
    """Equal, but for logprobs that another sampler has rounded."""
    if isinstance(theirs, float):
        return ours == pytest.approx(theirs, abs=1e-5)
    if isinstance(theirs, dict):
        return all(same_but_rounded(ours[key], value) for key, value in theirs.items() if key != "cached")
    if isinstance(theirs, TokenLogprob):
        return same_but_rounded([ours.token_id, ours.logprob, ours.top], [theirs.token_id, theirs.logprob, theirs.top])
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same_but_rounded, ours, theirs))
    return ours == theirs


def test_who_has_nothing_to_guess_is_looked_at_seldom(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=200, speculative=LOOKUP, runs_ahead=True)

    class Nothing(Knowing):
        asked = 0

        def propose(self, sequences: Rows[Sequence], most: Any, plan: StepPlan) -> dict[Sequence, Guess]:
            Nothing.asked += 1
            return {}

    replace_guesser(rig, Nothing({}))
    assert rig.run("r", (1, 2, 3), 120) == greedy_answer((1, 2, 3), 120)
    assert 120 / 8 <= Nothing.asked <= 120 / 8 + 8


def test_a_prediction_of_tokens_that_do_not_exist_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(speculative=LOOKUP)
    with pytest.raises(RequestError, match="prediction"):
        rig.submit("r", (1, 2), 4, prediction=(64,))


def test_a_prediction_that_is_right_saves_steps(make_rig: MakeRig) -> None:
    answer = tuple(greedy_answer((1, 2, 3), 31))
    rig = make_rig(speculative=LOOKUP)
    assert tuple(rig.run("r", (1, 2, 3), 31, prediction=answer)) == answer
    assert len(rig.model.batch_sizes) == 1 + 5
    assert rig.engine.stats().accepted_draft_tokens_total["prediction"] == 25


@pytest.mark.parametrize("seed", range(3))
def test_lookup_answers_as_without_it(make_rig: MakeRig, seed: int) -> None:
    """Of four tokens there is something to be found all the time, right or wrong."""
    generator = random.Random(seed)
    requests = {
        f"{name} {i}": (tuple(generator.randrange(4) for _ in range(generator.randrange(1, 40))),
                        {key: value for key, value in options.items() if key not in {"logit_bias", "stop_token_ids"}})
        for i in range(2) for name, options in KINDS.items()
    }  # fmt: skip
    plain = make_rig(HistoryModel(4), num_blocks=300)
    expected = run_all(plain, requests)
    rig = make_rig(HistoryModel(4), num_blocks=300, speculative=LOOKUP)
    assert run_all(rig, requests) == expected
    stats = rig.engine.stats()
    assert 0 < stats.accepted_draft_tokens_total["text"] < stats.draft_tokens_total["text"]
    assert stats.guess_seconds_total is not None
    assert stats.guess_seconds_total > 0


def test_nothing_is_guessed_from_answers_with_another_salt(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=200, speculative=LOOKUP)
    prompt = tuple(range(10, 20))
    answer = greedy_answer(prompt, 40)

    def guesses(name: str, salt: str) -> int:
        before = rig.engine.stats().draft_tokens_total["history"]
        assert rig.run(name, prompt, 40, cache_salt=salt) == answer
        rig.submit(f"{name} of another prompt", (5, *prompt, *answer[:6]), 4, cache_salt=salt)
        rig.wait()
        return rig.engine.stats().draft_tokens_total["history"] - before

    guesses("first", "one")
    for number, salt in enumerate(("two", "", "One", "one ", "on")):
        assert guesses(f"other {number}", salt) == 0, salt
    known = rig.engine.stats()
    assert guesses("again", "one") > 0
    assert rig.engine.stats().accepted_draft_tokens_total["history"] > known.accepted_draft_tokens_total["history"]
    assert rig.engine.stats().steps_total - known.steps_total < 40


def test_without_memory_for_it_there_is_no_history(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=200, speculative=LOOKUP.model_copy(update={"history_bytes": 0}))
    for name in ("first", "again"):
        rig.run(name, (1, 2, 3), 40)
    assert rig.engine.stats().draft_tokens_total["history"] == 0
    assert rig.engine.stats().guess_bytes == 0


def test_what_earlier_answers_take_is_told_and_bounded(make_rig: MakeRig) -> None:
    bound = 100_000
    rig = make_rig(num_blocks=200, speculative=LOOKUP.model_copy(update={"history_bytes": bound}))
    assert rig.engine.stats().guess_bytes == 0, "memory is taken as answers come"
    taken: list[int] = []
    for number in range(30):
        rig.run(f"{number}", (number, 1), 60)
        taken.append(rig.engine.stats().guess_bytes or 0)
    assert taken[0] >= 60 * 100
    assert max(taken) > bound / 2
    assert max(taken) <= bound


WEIGHTS = torch.tensor([0.7, 0.1, 0.08, 0.05, 0.04, 0.02, 0.008, 0.002])


class Unchanging(HistoryModel):
    """A model whose next token is always as likely."""

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        return WEIGHTS.log().expand(super().forward(batch, kv_cache).shape[0], -1).clone()


class Insisting:
    """A guesser that always guesses the likeliest token. A `guess.contract.Guesser`."""

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        return {one: Guess((0,) * most[one], Source.TEXT, (0.7,) * most[one]) for one in sequences}

    def forget(self, sequence: Sequence) -> None: ...


@pytest.mark.parametrize("count", [4_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_tokens_are_true_draws_at_each_depth(make_rig: MakeRig, count: int) -> None:
    """Chi-square of the tokens that stood in a step's n-th place, at a chance of 1 in 10,000 to fail for each."""
    rig = make_rig(Unchanging(8), num_blocks=2000, speculative=LOOKUP, scheduler={"max_running_requests": 32})
    speculator = rig.engine._runner.lanes[0].speculator
    assert speculator is not None
    speculator._guesser = Insisting()
    for number in range(count // 1000):
        rig.submit(f"{number}", (1, 2, 3), 250, temperature=1.0, seed=number, n=4, ignore_eos=True)
        rig.wait()  # rows of logits for guesses are those that no answer takes
    seen = torch.zeros(6, 8)
    for deltas in rig.out.deltas.values():
        for delta in deltas:
            for depth, token in enumerate(delta.token_ids):
                seen[depth, token] += 1
    assert seen.sum() == count
    for row in seen:
        expected = row.sum() * WEIGHTS
        assert row.sum() > count / 30
        assert float(((row - expected) ** 2 / expected).sum()) < 29.9


def test_a_lane_that_has_decoded_nothing_hides_no_figure_of_the_others(make_rig: MakeRig) -> None:
    """Gateways and the planner of replicas go by them."""
    idle, busy = make_rig(speculative=LOOKUP), make_rig(speculative=LOOKUP)
    busy.run("r", (1, 2, 3), 40)
    alone, lanes = busy.engine.stats(), [rig.engine._runner.lanes[0] for rig in (idle, busy)]
    assert alone.decode_token_seconds is not None
    for figure in ("decode_token_seconds", "plain_step_seconds", "decode_tokens_per_step"):
        assert getattr(build_stats(lanes, lanes[1].work, num_pending=0), figure) == getattr(alone, figure)


@pytest.mark.parametrize(
    ("method", "inexact", "embedding"), [("Off", None, None), ("Auto", "of its sums", None), ("Lookup", None, "mean")]
)
def test_why_nobody_guesses_is_documented(method: Any, inexact: str | None, embedding: str | None) -> None:
    model: Any = SimpleNamespace(embedding=embedding, inexact=inexact, exact_rows=1)
    why = find_obstacle(SpeculativeConfig(method=method), model)
    assert why is not None
    assert f"| {why.partition(',')[0]} |" in (DOCS / "speculation.md").read_text()


def spell(text: bytes, *more: bytes) -> Callable[[], LiteralFollower]:
    """Follows answers through these texts, whose bytes are their tokens."""
    literals = LiteralText([Word(each) for each in (text, *more)])
    return partial(LiteralFollower, literals, Spelling(lambda text: list(text.encode()), lambda token: bytes((token,))))


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_schema_saves_steps_and_changes_nothing(make_rig: MakeRig, kind: str) -> None:
    """Right, half right and wrong, for several choices, and after a move."""
    prompt, options = (5, 9, 2, 33), {"max_tokens": 24, "n": 2} | KINDS[kind]
    plain = make_rig(num_blocks=200)
    plain.submit("r", prompt, **options)
    plain.wait()
    whole = [plain.out.tokens("r", choice) for choice in range(2)]
    expected = [tell(plain.out.deltas["r", choice]) for choice in range(2)]
    said = bytes(whole[0])
    for literals in (spell(said), spell(said[:4], said[9:]), spell(said[4:]), spell(bytes(range(64)))):
        rig = make_rig(num_blocks=200, speculative=LOOKUP)
        rig.submit("r", prompt, literals=literals, **options)
        rig.wait()
        assert [tell(rig.out.deltas["r", choice]) for choice in range(2)] == expected
        rig.resume("rest", prompt, tuple(tuple(tokens[:3]) for tokens in whole), literals=literals, **options)
        rig.wait()
        assert [rig.out.tokens("rest", choice) for choice in range(2)] == [tokens[3:] for tokens in whole]
    rig = make_rig(num_blocks=200, speculative=LOOKUP)
    rig.submit("r", prompt, literals=spell(said), **options)
    rig.wait()
    assert rig.engine.stats().accepted_draft_tokens_total["schema"] > 5


def test_a_long_answer_that_moved_is_followed_where_it_stands(make_rig: MakeRig) -> None:
    answer = greedy_answer((1, 2, 3), 300)
    rig = make_rig(num_blocks=200, speculative=LOOKUP)
    rig.resume("rest", (1, 2, 3), (tuple(answer[:200]),), max_tokens=300, literals=spell(bytes(answer)))
    rig.wait()
    assert rig.out.tokens("rest") == answer[200:]
    assert rig.engine.stats().accepted_draft_tokens_total["schema"] > 60


class Failing:
    """What follows a choice through texts, and fails: at once, or when the answer says something."""

    source = Source.SCHEMA
    length = 0

    def __init__(self, error: BaseException, *, at_once: bool) -> None:
        self.error = error
        if at_once:
            raise error

    def peek(self) -> int | None:
        return None

    def feed(self, text: list[int]) -> None:
        raise self.error


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", [ValueError, BaseException])
def test_guesses_that_fail_end_no_answer(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture, kind: type[BaseException], at_once: bool
) -> None:
    rig = make_rig(num_blocks=200, speculative=LOOKUP)
    rig.submit("r", (1, 2, 3), max_tokens=12, literals=lambda: Failing(kind("a strange text"), at_once=at_once))
    rig.submit("other", (4, 5, 6), max_tokens=12)
    rig.wait()
    assert rig.out.tokens("r") == greedy_answer((1, 2, 3), 12)
    assert rig.out.tokens("other") == greedy_answer((4, 5, 6), 12)
    assert [record.message for record in caplog.records if "without guesses" in record.message] == [
        "an answer of r goes on without guesses, which failed"
    ]


def test_a_very_long_answer_that_moved_is_guessed_without_its_schema(make_rig: MakeRig, monkeypatch: Any) -> None:
    monkeypatch.setattr("tandem_worker.engine.guess.lookup._MOST_READ", 100)
    answer = greedy_answer((1, 2, 3), 130)
    rig = make_rig(num_blocks=200, speculative=LOOKUP)
    rig.resume("rest", (1, 2, 3), (tuple(answer[:110]),), max_tokens=130, literals=spell(bytes(answer)))
    rig.wait()
    assert rig.out.tokens("rest") == answer[110:]
    assert not rig.engine.stats().draft_tokens_total["schema"]
