"""Who is asked for a head's guesses, how deep, and what is learned from them: decisions alone, without a model."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import Any

import pytest
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.guess.costs import StepCosts
from tandem_worker.engine.guess.draft import Chain, DraftGuesser, HeadRates, Place
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Request, Sequence

STEP = 0.010


class Heads:
    """A head that guesses 1, 2, 3 and so on, with one confidence, and takes so long for each pass."""

    def __init__(self, confidence: float = 0.9, seconds: float = 0.0005) -> None:
        self.confidence, self.seconds, self.now = confidence, seconds, 0.0
        self.places: list[list[Place]] = []
        self.passes: list[int] = []

    def begin(self, places: Rows[Place], depth: int) -> Chain:
        self.places.append(list(places))
        self.level = 0
        return self

    def advance(self, active: Rows[int]) -> tuple[list[int], list[float]]:
        self.level += 1
        self.now += self.seconds
        self.passes.append(len(active))
        return [self.level] * len(active), [self.confidence] * len(active)


class Told:
    """A guesser by text that was told its guesses."""

    def __init__(self, guesses: dict[Sequence, Guess]) -> None:
        self.guesses = guesses
        self.forgotten: list[Sequence] = []

    def propose(self, sequences: Rows[Sequence], most: object, plan: StepPlan) -> dict[Sequence, Guess]:
        return dict(self.guesses)

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence)


def make_sequence(number: int = 0, prompt: int = 10, output: int = 2, **sampling: Any) -> Sequence:
    request = Request(
        id=str(number), prompt=tuple(range(prompt)), arrival=0.0, chain_root=b"", prompt_chain=[],
        sampling=SamplingParams(**({"max_tokens": 100, "temperature": 0.0} | sampling)),
    )  # fmt: skip
    sequence = Sequence(request, 0, (0.0, number, 0))
    sequence.output = [7] * output
    sequence.num_planned = sequence.num_tokens
    sequence.block_ids = [100 * number + index for index in range(1, 40)]
    return sequence


def costs(base: float = STEP) -> StepCosts:
    known = StepCosts()
    known.learn(1, base)
    return known


def ask(guesser: DraftGuesser, sequences: list[Sequence], most: int = 4, **plan: Any) -> dict[Sequence, Guess]:
    return guesser.propose(sequences, dict.fromkeys(sequences, most), StepPlan(decodes=sequences, **plan))


def say(sequence: Sequence, tokens: list[int]) -> None:
    sequence.output += tokens
    sequence.num_planned = sequence.num_tokens


def live(
    heads: Heads, truth: Callable[[int], list[int]], steps: int, known: StepCosts
) -> tuple[DraftGuesser, Sequence]:
    """A choice that is guessed for in each step and goes on with what `truth` says of the step."""
    guesser = DraftGuesser(heads.begin, 4, costs=known, clock=lambda: heads.now)
    sequence = make_sequence()
    for step in range(steps):
        ask(guesser, [sequence])
        say(sequence, truth(step))
    return guesser, sequence


def test_chains_begin_behind_what_is_computed() -> None:
    heads = Heads()
    guesser = DraftGuesser(heads.begin, 4)
    sequences = [make_sequence(0, 10, 2), make_sequence(1, 10, 3), make_sequence(2, 1, 1)]
    ask(guesser, sequences)
    assert heads.places == [[(7, 11, [1, 2, 3], None), (7, 12, [101, 102, 103], None), (7, 1, [201], None)]]


def test_who_draws_is_guessed_for_with_the_noise_of_the_draw() -> None:
    heads = Heads()
    drawn = make_sequence(0, temperature=0.7, seed=-5, top_k=40, top_p=0.9, min_p=0.1)
    sure = make_sequence(1, temperature=0.7, top_k=1)
    ask(DraftGuesser(heads.begin, 4), [drawn, sure])
    assert [place.draw for place in heads.places[0]] == [(-5, 0, 0.7, 40, 0.9, 0.1), None]


def test_draws_do_not_spoil_what_is_known_of_likeliest_tokens() -> None:
    """A head with one confidence is always right for who takes the likeliest token, and never for who draws."""
    heads = Heads()
    guesser = DraftGuesser(heads.begin, 4, clock=lambda: heads.now)
    greedy, drawn = make_sequence(0), make_sequence(1, temperature=1.0)
    for _ in range(100):
        found = ask(guesser, [greedy, drawn])
        say(greedy, [1, 2, 3, 4])
        say(drawn, [9])
    assert found[greedy].chances[0] > 0.9
    assert found[drawn].chances[0] < 0.1


def test_blocks_that_are_copied_in_this_step_are_read_where_they_are_copied_from() -> None:
    heads = Heads()
    sequence = make_sequence(0, 10, 2)
    ask(DraftGuesser(heads.begin, 4), [sequence], copies=[(77, 3), (78, 33)])
    assert heads.places[0][0].blocks == [1, 2, 77]


def test_each_choice_is_guessed_no_deeper_than_it_has_room() -> None:
    heads = Heads()
    one, other = make_sequence(0), make_sequence(1)
    found = DraftGuesser(heads.begin, 4).propose([one, other], {one: 1, other: 3}, StepPlan(decodes=[one, other]))
    assert {key: guess.tokens for key, guess in found.items()} == {one: (1,), other: (1, 2, 3)}
    assert heads.passes == [2, 1, 1]
    assert all(guess.source is Source.HEAD for guess in found.values())


def test_who_may_not_guess_costs_no_pass() -> None:
    heads = Heads()
    one, other = make_sequence(0), make_sequence(1)
    guesser = DraftGuesser(heads.begin, 4, may_guess=lambda sequence: sequence is other)
    assert set(ask(guesser, [one, other])) == {other}


@pytest.mark.parametrize(("worth", "source"), [((0.98,) * 6, Source.TEXT), ((0.2,), Source.HEAD)])
def test_the_guess_that_promises_more_is_taken(worth: tuple[float, ...], source: Source) -> None:
    sequence = make_sequence()
    lookup = Told({sequence: Guess((9,) * len(worth), Source.TEXT, worth)})
    guesser = DraftGuesser(Heads().begin, 4, lookup=lookup)
    assert ask(guesser, [sequence])[sequence].source is source
    guesser.forget(sequence)
    assert lookup.forgotten == [sequence]


def test_passes_go_deeper_while_guesses_are_right() -> None:
    heads = Heads()
    live(heads, lambda step: [1, 2, 3, 4], 60, costs())
    assert len(heads.passes) > 3.5 * 60
    slow = Heads(seconds=STEP)
    live(slow, lambda step: [1, 2, 3, 4], 60, costs())
    assert len(slow.passes) < 15, "a pass that takes as long as a step gains nothing"


def test_a_head_that_is_never_right_is_hardly_asked() -> None:
    heads = Heads()
    live(heads, lambda step: [50], 320, costs())
    assert len(heads.passes) < 50
    assert heads.passes[-1] == 1, "now and then it is tried again"


def test_a_head_that_becomes_right_is_asked_again() -> None:
    heads = Heads()
    live(heads, lambda step: [50] if step < 200 else [1, 2, 3], 400, costs())
    before = len(heads.passes)
    assert before > 300


def test_first_passes_that_took_long_are_forgotten() -> None:
    """Of every kind: the first pass of a chain and those behind it."""
    heads = Heads(seconds=2 * STEP)
    marks: list[int] = []

    def truth(step: int) -> list[int]:
        heads.seconds = 0.05 * STEP
        marks.append(len(heads.passes))
        return [1, 2, 3, 4]

    live(heads, truth, 800, costs())
    assert marks[-1] - marks[-100] > 3 * 95


class SlowBehind(Heads):
    """All passes but the first of a chain take two steps."""

    def advance(self, active: Rows[int]) -> tuple[list[int], list[float]]:
        self.seconds = 0.05 * STEP if not self.level else 2 * STEP
        return super().advance(active)


def test_deeper_passes_that_do_not_pay_are_seldom_tried() -> None:
    heads = SlowBehind()
    live(heads, lambda step: [1, 2], 1000, costs())
    assert 1000 < len(heads.passes) < 1060


def test_others_lose_little() -> None:
    """Passes cost a tenth of a step, and the head is right for one choice of eight: that one gains less than the others
    would lose. They are tried now and then."""
    heads = Heads(seconds=0.1 * STEP)
    known = costs()
    guesser = DraftGuesser(heads.begin, 4, costs=known, clock=lambda: heads.now)
    sequences = [make_sequence(number) for number in range(8)]
    for _step in range(200):
        guesser.propose(sequences, dict.fromkeys(sequences, 4), StepPlan(decodes=sequences))
        for number, sequence in enumerate(sequences):
            say(sequence, [1, 2, 3, 4] if number == 0 else [50])
    assert len(heads.passes) < 60


def test_who_is_tried_again_is_tried_with_others() -> None:
    """Answers that began one after another, and for none of which the head is ever right: not every step has a pass."""
    heads = Heads(seconds=0.1 * STEP)
    guesser = DraftGuesser(heads.begin, 4, costs=costs(), clock=lambda: heads.now)
    sequences = [make_sequence(number, max_tokens=1000) for number in range(32)]
    for step in range(400):
        begun = sequences[: step + 1]
        ask(guesser, begun)
        for sequence in begun:
            say(sequence, [50])
        if step == 199:
            heads.passes.clear()
    assert sum(heads.passes) >= 5 * 32, "each of them is tried"
    assert len(heads.passes) < 200 / 10


def test_chances_follow_confidence() -> None:
    rates = HeadRates()
    assert rates.chance(0.9) > rates.chance(0.5) > rates.chance(0.1) > 0
    for number in range(300):
        rates.record(0, 0.9, hit=number % 4 == 0)
        rates.record(0, 0.2, hit=number % 2 == 0)
    assert rates.chance(0.9) == pytest.approx(0.25, abs=0.05)
    assert rates.chance(0.2) == pytest.approx(0.5, abs=0.05)
    assert rates.expected(0) == pytest.approx(0.375, abs=0.05)
    assert 0 <= rates.chance(1.0) <= 1


def test_one_of_many_is_guessed_for_where_others_hardly_notice() -> None:
    heads = Heads(seconds=0.02 * STEP)
    guesser = DraftGuesser(heads.begin, 4, costs=costs(), clock=lambda: heads.now)
    sequences = [make_sequence(number) for number in range(8)]
    for _step in range(200):
        guesser.propose(sequences, dict.fromkeys(sequences, 4), StepPlan(decodes=sequences))
        for number, sequence in enumerate(sequences):
            say(sequence, [1, 2, 3, 4] if number == 0 else [50])
    assert len(heads.passes) >= 200
    assert sum(heads.passes[-100:]) < 200, "the others are left out"


def test_texts_that_are_read_together_are_bounded() -> None:
    heads = Heads()
    sequences = [make_sequence(number, prompt) for number, prompt in enumerate((30_000, 30_000, 10_000, 5_000, 70_000))]
    found = ask(DraftGuesser(heads.begin, 4), sequences)
    assert set(found) == {sequences[0], sequences[1], sequences[3]}


def test_who_has_too_long_a_text_does_not_make_others_due() -> None:
    """Beside such a one, answers that began one after another are tried no more often, and not each in its own step."""
    heads = Heads(seconds=0.1 * STEP)
    guesser = DraftGuesser(heads.begin, 4, costs=costs(), clock=lambda: heads.now)
    long = make_sequence(99, prompt=70_000, max_tokens=1000)
    sequences = [make_sequence(number, max_tokens=1000) for number in range(32)]
    for step in range(400):
        begun = [long, *sequences[: step + 1]]
        ask(guesser, begun)
        for sequence in begun:
            say(sequence, [50])
        if step == 199:
            heads.passes.clear()
    assert sum(heads.passes) >= 5 * 32, "each of them is tried"
    assert len(heads.passes) < 200 / 10
