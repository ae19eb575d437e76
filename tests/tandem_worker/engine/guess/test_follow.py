"""Where a choice is followed: in its own text, in a prediction, in earlier answers."""

from __future__ import annotations

import random
import tracemalloc
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.guess.contract import Source
from tandem_worker.engine.guess.follow import DocumentFollower, TextFollower, match_length
from tandem_worker.engine.guess.history import BYTES_PER_TOKEN, History, HistoryFollower, Shelf
from tandem_worker.engine.guess.lookup import LookupGuesser
from tandem_worker.engine.guess.ngrams import LONG, SHORT, CompleteIndex, GrowingIndex, long_key, short_key
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Request, Sequence

TOKENS = st.lists(st.integers(0, 3), min_size=0, max_size=60)


@given(text=TOKENS, at=st.integers(0, 60))
def test_an_index_finds_the_last_run_and_the_next_one(text: list[int], at: int) -> None:
    index = CompleteIndex(text)
    for size, key, long in ((SHORT, short_key, False), (LONG, long_key, True)):
        for run in {tuple(text[i : i + size]) for i in range(len(text) - size + 1)} | {(3,) * size}:
            ends = [i + size for i in range(len(text) - size + 1) if tuple(text[i : i + size]) == run]
            assert index.find_last(key(run), long=long) == (ends[-1] if ends else None)
            after = [end for end in ends if end >= at] or ends[-1:]
            assert index.find_after(key(run), at, long=long) == (after[0] if after else None)


@given(tokens=st.lists(st.integers(0, 1 << 18), min_size=4, max_size=4), others=TOKENS)
def test_keys_of_both_indices_are_the_same(tokens: list[int], others: list[int]) -> None:
    index = CompleteIndex([*others, *tokens])
    assert index.find_last(long_key(tokens), long=True) == len(others) + 4


def test_a_growing_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.engine.guess.ngrams.MOST_TOKENS", 10)
    index = GrowingIndex()
    for place in range(25):
        index.add(place, place, long=True)
    assert index.find_last(24, long=True) == 24
    assert index.find_last(3, long=True) is None
    assert len(index._places[True]) <= 10


def feed(follower: TextFollower | DocumentFollower | HistoryFollower, text: list[int], tokens: list[int]) -> None:
    for token in tokens:
        text.append(token)
        follower.feed(text)


def follow_text(prompt: list[int]) -> tuple[TextFollower, list[int]]:
    index = CompleteIndex(prompt[:-1])
    text = [*index.tokens, prompt[-1]]
    return TextFollower(text, index), text


@given(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40), answer=TOKENS, count=st.integers(1, 12))
def test_a_text_is_followed_where_its_last_tokens_stood_before(
    prompt: list[int], answer: list[int], count: int
) -> None:
    follower, text = follow_text(prompt)
    feed(follower, text, answer)
    tokens = follower.read(count)
    assert (follower.peek() is None) == (tokens == [])
    whole = [*prompt, *answer]
    repeated = len(whole) >= SHORT and any(whole[i : i + 2] == whole[-2:] for i in range(len(whole) - 2))
    assert bool(tokens) or not repeated, "it has been there"
    if tokens:
        assert len(tokens) == count
        assert tokens[0] == follower.peek()
        length = match_length(text, follower._at or 0, text)
        assert follower.length <= length, "what it says of the match is true"


def test_a_text_that_repeats_itself_is_read_beyond_its_end() -> None:
    follower, text = follow_text([9])
    feed(follower, text, [1, 2, 3, 1, 2, 3])
    assert follower.read(8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_a_token_may_stand_for_another_and_two_may_not() -> None:
    follower, text = follow_text([1, 2, 3, 4, 5, 6, 7, 8, 9])
    feed(follower, text, [1, 2, 3])
    assert (follower.peek(), follower.length) == (4, 3)
    feed(follower, text, [70])
    assert (follower.peek(), follower.length) == (5, 0)
    feed(follower, text, [5])
    assert (follower.peek(), follower.length) == (6, 1)
    feed(follower, text, [71, 72])
    assert follower.peek() is None


def test_a_single_token_is_better_than_none() -> None:
    follower, text = follow_text([1, 2, 3, 2, 4, 9])
    feed(follower, text, [2])
    assert (follower.peek(), follower.length) == (4, 1), "its last occurrence"
    feed(follower, text, [8])
    assert follower.peek() is None
    feed(follower, text, [2])
    assert follower.peek() == 8, "in the answer, which is nearer"


def test_the_longer_match_is_followed() -> None:
    prompt = [1, 2, 3, 4, 50, 9, 3, 4, 60, 9, 9]
    follower, text = follow_text(prompt)
    feed(follower, text, [1, 2, 3, 4])
    assert follower.peek() == 50, "four tokens stood there, and two at the later place"


def test_a_prediction_is_followed_from_its_beginning_and_found_again() -> None:
    document = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]
    follower, text = DocumentFollower(Source.PREDICTION, CompleteIndex(document), from_start=True), [1]
    assert follower.read(3) == [10, 11, 12]
    feed(follower, text, [10, 11, 12])
    assert follower.read(9) == document[3:]
    feed(follower, text, [77, 78])
    assert follower.peek() is None
    feed(follower, text, [14])
    assert follower.peek() is None, "one token is too little"
    feed(follower, text, [15])
    assert follower.peek() == 16
    feed(follower, text, document[6:])
    assert follower.peek() is None, "it is at the end"


def test_what_stands_twice_in_a_prediction_is_found_behind_where_it_was_left() -> None:
    document = [1, 2, 30, 9, 8, 1, 2, 40, 7, 6, 1, 2, 50]
    follower, text = DocumentFollower(Source.PREDICTION, CompleteIndex(document), from_start=True), [0]
    feed(follower, text, [1, 2, 30, 99, 1, 2])
    assert follower.peek() == 40
    feed(follower, text, [98, 97, 1, 2])
    assert follower.peek() == 50


PROMPT, ANSWER = (1, 2, 3, 4, 5), [10, 11, 12, 13, 14, 15, 16, 17, 18]


def test_earlier_answers_are_known_to_the_same_salt_alone() -> None:
    history = History(1 << 20)
    history.add("one", PROMPT, ANSWER)
    for salt in ("", "two", "one ", "On"):
        follower, text = HistoryFollower(history, salt, PROMPT, from_start=True), list(PROMPT)
        assert follower.peek() is None
        feed(follower, text, ANSWER[:6])
        assert follower.peek() is None
        assert follower.read(3) == []
    follower = HistoryFollower(history, "one", PROMPT, from_start=True)
    assert follower.read(20) == ANSWER, "the same prompt; no token of another answer"


def test_an_earlier_answer_is_found_in_its_middle_and_newer_ones_first() -> None:
    history = History(1 << 20)
    history.add("", PROMPT, ANSWER)
    history.add("", PROMPT, [*ANSWER[:6], 90, 91, 92])
    follower, text = HistoryFollower(history, "", (7, 7), from_start=True), [7, 7]
    assert follower.peek() is None
    feed(follower, text, ANSWER[2:6])
    assert follower.read(9) == [90, 91, 92]
    feed(follower, text, [16])
    assert follower.peek() == 17, "the other one goes on so"


def test_history_keeps_what_it_may() -> None:
    history, generator = History(100_000), random.Random(1)
    for number in range(400):
        history.add(str(number % 3), (number,), [generator.randrange(1000) for _ in range(50)])
        assert history.num_bytes <= 100_000
    assert history.num_bytes > 40_000
    for number, known in ((0, False), (399, True)):
        follower = HistoryFollower(history, str(number % 3), (number,), from_start=True)
        assert (follower.peek() is not None) is known
    tiny = History(BYTES_PER_TOKEN)
    tiny.add("", PROMPT, ANSWER)
    assert tiny.num_bytes == 0


def test_short_answers_are_not_worth_keeping() -> None:
    history = History(1 << 20)
    history.add("", PROMPT, ANSWER[:4])
    assert history.num_bytes == 0


@given(prompt=TOKENS, answers=st.lists(st.lists(st.integers(0, 3), min_size=8, max_size=40), min_size=1, max_size=3))
def test_every_run_of_an_answer_is_found_behind_its_last_place(prompt: list[int], answers: list[list[int]]) -> None:
    shelf = Shelf()
    expected: dict[int, int] = {}
    for answer in answers:
        start, whole = len(shelf.tokens), [*prompt, *answer]
        shelf.add(tuple(prompt), answer)
        for end in range(max(LONG, len(prompt)), len(whole)):
            expected[long_key(whole[:end])] = start + end - len(prompt)
    assert shelf.places == expected


def test_an_answer_that_was_dropped_is_let_go_of_when_the_match_breaks() -> None:
    history = History(4000)
    history.add("", PROMPT, ANSWER)
    follower, text = HistoryFollower(history, "", PROMPT, from_start=True), list(PROMPT)
    (shelf,) = history.shelves("")
    dropped = weakref.ref(shelf.tokens)
    del shelf
    for number in range(9):
        history.add("another", (number,), ANSWER)
    feed(follower, text, ANSWER[:3])
    assert follower.peek() == ANSWER[3], "it is kept while it is followed"
    feed(follower, text, [90, 91])
    assert follower.peek() is None
    assert dropped() is None


def begin(prompt: tuple[int, ...], **options: Any) -> Sequence:
    """A choice whose first token is known."""
    request = Request(
        id="r", prompt=prompt, sampling=SamplingParams(max_tokens=99), arrival=0.0, chain_root=b"", prompt_chain=[],
        **options,
    )  # fmt: skip
    sequence = Sequence(request, 0, (0.0, 0, 0))
    sequence.output = [prompt[0]]
    return sequence


def test_a_step_indexes_no_more_than_one_long_text_or_some_short_ones() -> None:
    """Many long prompts from the cache may begin to decode in one step, beside streams of others."""
    guesser = LookupGuesser()
    long = [begin(tuple(range(20_000)), prediction=tuple(range(20_000))) for _ in range(3)]
    short = [begin(tuple(range(number, number + 20))) for number in range(40)]
    everyone = [*long, *short]
    most = dict.fromkeys(everyone, 4)
    assert set(guesser.propose(everyone, most, StepPlan())) == {long[0]}
    assert set(guesser.propose(everyone, most, StepPlan())) == {*long[:2]}
    assert set(guesser.propose(everyone, most, StepPlan())) == set(long)
    assert set(guesser.propose(everyone, most, StepPlan())) == set(everyone), "short ones are begun together"


class Counting:
    """Follows nothing, and notes what it is given."""

    source = Source.SCHEMA
    length = 0

    def __init__(self) -> None:
        self.read: list[int] = []

    def peek(self) -> int | None:
        return None

    def feed(self, text: list[int]) -> None:
        self.read.append(text[-1])


def test_what_was_said_while_nobody_asked_is_read_in_many_steps() -> None:
    """Beside prompts that fill steps, and on a GPU beside many streams, nobody asks for thousands of tokens."""
    guesser = LookupGuesser()
    everyone = [begin(tuple(range(number, number + 20))) for number in range(12)]
    counting: list[Counting] = []
    for sequence in everyone:
        sequence.request.literals = lambda: counting.append(Counting()) or counting[-1]
    most = dict.fromkeys(everyone, 4)
    guesser.propose(everyone, most, StepPlan())
    generator = random.Random(5)
    for sequence in everyone:
        sequence.output += [generator.randrange(900) for _ in range(1500)]
    said, steps = 0, 0
    while said < 12 * 1501:
        guesser.propose(everyone, most, StepPlan())
        before, said = said, sum(len(each.read) for each in counting)
        assert 0 < said - before <= 4096 + 12 * 48
        steps += 1
    assert steps == 5
    assert [each.read for each in counting] == [sequence.output for sequence in everyone]


def test_a_prediction_takes_little_memory() -> None:
    tokens = random.Random(1).sample(range(1 << 17), 1 << 14)
    tracemalloc.start()
    try:
        follower = DocumentFollower(Source.PREDICTION, CompleteIndex(tokens), from_start=True)
        feed(follower, [1], [*tokens[:40], 7, 7, *tokens[90:100], 5, 5])
        assert tracemalloc.get_traced_memory()[0] < 40 * len(tokens)
    finally:
        tracemalloc.stop()
