"""How many guesses are checked, what steps cost, how often guesses are right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.guess.budget import LEAST_GAIN, MOST_DEBT, MOST_LEAD, MOST_LOSS, choose_lengths, next_lead
from tandem_worker.engine.guess.contract import Guess, Source
from tandem_worker.engine.guess.costs import ON_CPU, ON_GPU, StepCosts
from tandem_worker.engine.guess.rates import Luck, Rates
from tandem_worker.engine.guess.speculator import SpeculationSettings, Speculator
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import SequenceState

CHANCES = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=3)


def gain(chances: list[float], length: int) -> float:
    return sum(itertools.accumulate(chances[:length], lambda a, b: a * b))


def rate(chances: list[list[float]], lengths: tuple[int, ...], n: int, cost: Callable[[int], float]) -> float:
    """Tokens per second over those without guesses; 0 where somebody loses too much."""
    gains = [gain(row, length) for row, length in zip(chances, lengths, strict=True)]
    slower = cost(sum(lengths))
    least = 1 + (0 if n > len(gains) else min(gains))
    return (1 + sum(gains) / n) / slower if least >= slower * (1 - MOST_LOSS) - 1e-12 else 0.0


@given(
    chances=CHANCES,
    more=st.integers(0, 2),
    per_row=st.floats(0.001, 0.5),
    per_pass=st.floats(0, 0.5),
    most=st.integers(0, 12),
)
def test_no_other_choice_of_guesses_is_faster(
    chances: list[list[float]], more: int, per_row: float, per_pass: float, most: int
) -> None:
    n = len(chances) + more

    def cost(count: int) -> float:
        return 1 + per_row * count + per_pass * ((n + count - 1) // 6)

    chosen = tuple(choose_lengths(chances, n, lambda count: cost(count) / cost(0), most))
    assert sum(chosen) <= most
    assert all(length <= len(row) for length, row in zip(chosen, chances, strict=True))
    value = rate(chances, chosen, n, lambda count: cost(count) / cost(0))
    assert sum(chosen) == 0 or value > LEAST_GAIN - 1e-9
    if per_pass == 0 and more == 0 and len(chances) == 1:
        options = itertools.product(*(range(len(row) + 1) for row in chances))
        best = max(rate(chances, each, n, lambda k: cost(k) / cost(0)) for each in options if sum(each) <= most)
        assert value >= best - 1e-9 or best <= LEAST_GAIN + 1e-9


@given(
    chances=st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=4), min_size=1, max_size=12),
    more=st.integers(0, 3),
    once=st.floats(0, 1),
    per_row=st.floats(0.001, 0.1),
)
def test_the_best_guesses_are_found_whatever_the_first_costs(
    chances: list[list[float]], more: int, once: float, per_row: float
) -> None:
    """A step with guesses cannot run ahead, however few they are."""
    n = len(chances) + more
    values = sorted(
        (
            (-value, choice)
            for choice, row in enumerate(chances)
            for value in itertools.accumulate(row, lambda a, b: a * b)
        )
    )
    prefixes = [
        tuple(sum(c == choice for _, c in values[:k]) for choice in range(len(chances))) for k in range(1 + len(values))
    ]
    cost = lambda count: 1 + once * (count > 0) + per_row * count  # noqa: E731
    chosen = tuple(choose_lengths(chances, n, cost, 99))
    best = max(rate(chances, each, n, cost) for each in prefixes)
    assert best <= LEAST_GAIN + 1e-9 or rate(chances, chosen, n, cost) >= best - 1e-9


def test_many_choices_share_what_the_first_guess_costs() -> None:
    """64 streams on an H200: a fifth of a step for its not running ahead."""
    assert choose_lengths([[0.7] * 7] * 64, 64, lambda count: 1.2 + 0.0035 * count, 192) == [3] * 64
    assert choose_lengths([[0.7] * 7] * 64, 64, lambda count: 2.2 + 0.0035 * count, 192) == [0] * 64


def test_a_choice_without_guesses_loses_little() -> None:
    sure = [[0.98] * 8]
    assert choose_lengths(sure, 1, lambda count: 1 + 0.02 * count, 8) == [8]
    assert choose_lengths(sure, 2, lambda count: 1 + 0.02 * count, 8) == [2], "5% are two rows"
    assert choose_lengths(sure * 2, 2, lambda count: 1 + 0.02 * count, 16) == [8, 8]


def test_what_a_choice_has_gained_it_may_lose_to_others() -> None:
    sure, dear = [[0.98] * 8], lambda count: 1 + 0.06 * count
    assert choose_lengths(sure, 2, dear, 8) == [0]
    assert choose_lengths(sure, 2, dear, 8, leads=[0.0], least_lead=0.2) == [4], "1 + .2 against 1.24 less 5%"
    assert choose_lengths(sure, 2, dear, 8, leads=[0.0], least_lead=5.0) == [8]
    unlike = [[0.98] * 8, [0.1]]
    assert choose_lengths(unlike, 2, dear, 9) == [0, 0]
    assert choose_lengths(unlike, 2, dear, 9, leads=[0.0, 5.0]) == [8, 0]


@pytest.mark.parametrize("hopeless", [True, False])
@pytest.mark.parametrize("luckless", [set[int](), {0}, {1}, {0, 1}])
def test_no_choice_is_ever_far_behind(luckless: set[int], hopeless: bool) -> None:
    """However often others are guessed for, and however wrong what is expected of its own guesses: in tokens, beside a
    run without guesses that had the same time."""
    chances: list[list[float]] = [[0.9] * 8, [0.5] * 2, *([[]] if hopeless else [])]
    n, generator = len(chances), random.Random(7)
    leads, had, time, dear = [0.0] * n, [0] * n, 0.0, lambda count: 1 + 0.03 * count
    for _ in range(200):
        found = [at for at, row in enumerate(chances) if row and generator.random() < 0.7]
        least = min((leads[at] for at in range(n) if at not in found), default=0.0)
        told = [leads[at] for at in found]
        lengths = choose_lengths([chances[at] for at in found], n, dear, 16, leads=told, least_lead=least)
        count = sum(lengths)
        time += dear(count)
        for at in range(n):
            length = lengths[found.index(at)] if at in found else 0
            right = 0 if at in luckless else generator.randint(0, length)
            had[at] += 1 + right
            leads[at] = next_lead(leads[at], right, dear(count))
            assert leads[at] <= MOST_LEAD
            # Nobody can know before a step that its guesses will be wrong, but is to remember it behind the step.
            assert had[at] >= time * (1 - MOST_LOSS) - MOST_DEBT - gain(chances[at], 8) - 1e-9


def test_the_best_guesses_are_taken_and_hopeless_ones_are_not() -> None:
    chances = [[0.9, 0.9, 0.9], [0.5, 0.1, 0.1], [0.05]]
    assert choose_lengths(chances, 3, lambda count: 1 + 0.08 * count, 9)[2] == 0
    assert choose_lengths([[0.01] * 8] * 8, 8, lambda count: 1 + 0.03 * count, 64) == [0] * 8
    assert choose_lengths([], 3, lambda count: 1.0, 9) == []


def test_costs_are_learned_from_steps_on_a_machine_of_any_speed() -> None:
    generator = random.Random(4)
    for scale, row, more in ((0.01, 0.01, 0.1), (1.0, 0.04, 0.4), (0.2, 0.02, 0.2)):
        costs = StepCosts()
        for _ in range(6000):
            rows = generator.choice((1, 1, 2, 4, 7, 9, 16, 24))
            true = scale * (1 + row * (rows - 1) + more * (-(-rows // ON_CPU.rows_per_pass) - 1))
            noise = 5.0 if generator.random() < 0.05 else generator.uniform(0.97, 1.03)
            costs.learn(rows, true * noise)
        for rows in (2, 6, 9, 24):
            true = 1 + row * (rows - 1) + more * (-(-rows // ON_CPU.rows_per_pass) - 1)
            assert costs.relative(rows) == pytest.approx(true, rel=0.05)
    assert StepCosts().predict(3) is None


def test_the_first_steps_touch_fresh_memory_and_say_little_of_what_rows_cost() -> None:
    costs = StepCosts()
    for number in range(60):
        rows = (1, 9)[number % 2]
        costs.learn(rows, StepCosts().relative(rows) * (20.0 if number < 5 else 1.0))
    for rows in (1, 6, 9, 16):
        assert costs.relative(rows) == pytest.approx(StepCosts().relative(rows), rel=0.02)
        assert costs.predict(rows) == pytest.approx(StepCosts().relative(rows), rel=0.02)


class Slow:
    """A guesser that takes half a second, by the clock of the test, and knows nothing."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock

    def propose(self, sequences: Any, most: Any, plan: StepPlan) -> dict[Any, Any]:
        self.clock[0] += 0.5
        return {}

    def forget(self, sequence: Any) -> None: ...


class Choice:
    most_guesses = 4
    lead = 0.0
    sampler_state = None
    state = SequenceState.RUNNING


def decodes(count: int) -> StepPlan:
    return StepPlan(decodes=[Choice() for _ in range(count)])  # pyright: ignore[reportArgumentType]


def test_what_guesses_of_a_step_that_failed_took_is_no_part_of_the_next_one() -> None:
    clock = [0.0]
    speculator = Speculator(Slow(clock), SpeculationSettings(), max_rows=64, wall=lambda: clock[0])
    speculator.plan(decodes(2), 8)  # and its step fails: nobody says that it is over
    full = decodes(2)  # is as full as a step may be: nobody is asked for guesses
    assert speculator.without_guesses(full, 0.25) == 0.25
    speculator.record(full, {}, 0.25)
    assert speculator.costs.predict(2) == pytest.approx(0.25)
    later = decodes(2)
    speculator.plan(later, 8)
    assert speculator.without_guesses(later, 0.75) == pytest.approx(0.25)
    speculator.record(later, {}, 0.75)
    assert speculator.costs.predict(2) == pytest.approx(0.25)


class Offering:
    """A guesser whose guesses are right with a given chance, as it says."""

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self.asked = 0

    def propose(self, sequences: Any, most: Any, plan: StepPlan) -> dict[Any, Guess]:
        self.asked += 1
        return {one: Guess((1,) * most[one], Source.TEXT, (self.chance,) * most[one]) for one in sequences}

    def forget(self, sequence: Any) -> None: ...


def test_who_has_lost_too_much_makes_up_for_it_in_steps_without_guesses() -> None:
    speculator = Speculator(Offering(0.3), SpeculationSettings(), max_rows=256)
    plan = decodes(2)
    assert speculator.plan(plan, 64)
    ahead, behind = plan.decodes
    ahead.lead, behind.lead = 3.0, -0.5 - MOST_DEBT
    steps = 0
    while not speculator.plan(plan, 64):
        speculator.record(StepPlan(decodes=plan.decodes), {}, 0.01)
        assert ahead.lead == 3.0
        steps += 1
        assert steps < 10, "a twentieth of a token in each"
    assert steps


@pytest.mark.parametrize(("lost", "chance", "worth"), [(0.05, 0.3, True), (0.6, 0.3, False), (0.6, 0.9, True)])
def test_what_running_ahead_saves_is_learned_and_decides(lost: float, chance: float, worth: bool) -> None:
    """Steps with guesses take as much longer as the host needs between them."""
    guesser, costs = Offering(chance), StepCosts(ON_GPU)
    speculator = Speculator(guesser, SpeculationSettings(), max_rows=64, runs_ahead=True, costs=costs, wall=lambda: 0.0)
    true = StepCosts(ON_GPU)
    for number in range(400):
        plan = decodes(2)
        if number % 2:
            plan.guesses = dict.fromkeys(plan.decodes, (1, 1))
            speculator._sources = dict.fromkeys(plan.decodes, Source.TEXT)
        speculator.record(plan, {}, 0.004 * true.relative(plan.num_tokens) * (1 + lost * bool(plan.guesses)))
    assert speculator._ahead == pytest.approx(lost, abs=0.05)
    with_guesses = decodes(2)
    with_guesses.guesses = dict.fromkeys(with_guesses.decodes, (1, 1))
    plain = speculator.without_guesses(with_guesses, 0.004 * true.relative(6) * (1 + lost))
    assert plain == pytest.approx(0.004 * true.relative(2), rel=0.05)
    assert speculator.is_worth_waiting(decodes(2)) is worth
    assert bool(speculator.plan(decodes(2), 16)) is worth


@pytest.mark.parametrize(("lost", "share"), [(0.1, 0.9), (1.5, 0.05)], ids=["it was something else", "it is so"])
def test_slow_steps_are_not_held_against_guesses_for_ever(lost: float, share: float) -> None:
    """Of steps with guesses alone comes what they cost, and those are slow for a while: still to be recorded, beside
    another process. Without guesses nothing would ever contradict it."""
    speculator = Speculator(
        Offering(0.5), SpeculationSettings(), max_rows=64, runs_ahead=True, costs=StepCosts(ON_GPU), wall=lambda: 0.0
    )
    true, guessed = StepCosts(ON_GPU), []
    for number in range(4000):
        plan = decodes(1)
        plan.guesses = speculator.plan(plan, 16) if number > 50 and speculator.is_worth_waiting(plan) else {}
        seconds = true.relative(plan.num_tokens) + lost * bool(plan.guesses)
        right = dict.fromkeys(plan.guesses, 1)
        speculator.record(plan, right, 0.004 * seconds * (3.0 if 500 <= number < 540 else 1.0))
        guessed.append(bool(plan.guesses))
    late = sum(guessed[-1000:]) / 1000
    assert late >= share if lost < 1 else late <= share


def test_where_all_steps_might_have_guesses_the_first_have_none() -> None:
    """What the device waits for the host is told from what a step takes by those alone."""
    speculator = Speculator(
        Offering(0.4), SpeculationSettings(), max_rows=64, runs_ahead=True, costs=StepCosts(ON_GPU), wall=lambda: 0.0
    )
    true, guessed = StepCosts(ON_GPU), 0
    for _ in range(1000):
        plan = decodes(1)
        plan.guesses = speculator.plan(plan, 16) if speculator.is_worth_waiting(plan) else {}
        seconds = true.relative(plan.num_tokens) + 2.0 * bool(plan.guesses)
        speculator.record(plan, dict.fromkeys(plan.guesses, 1), 0.004 * seconds)
        guessed += bool(plan.guesses)
    assert guessed < 50
    assert speculator.costs.predict(1) == pytest.approx(0.004, rel=0.05)


def test_nobody_asks_for_guesses_that_have_no_room() -> None:
    """A GPU's host has no time to lose."""
    guesser = Offering(0.9)
    speculator = Speculator(guesser, SpeculationSettings(), max_rows=256, most_rows=32, runs_ahead=True)
    assert speculator.plan(decodes(32), 100) == {}
    assert not speculator.is_worth_waiting(decodes(40))
    assert guesser.asked == 0
    assert sum(map(len, speculator.plan(decodes(30), 100).values())) <= 2


def test_rates_are_learned_by_source_and_length() -> None:
    rates = Rates()
    before = rates.chance(Source.TEXT, 3)
    for _ in range(1000):
        rates.record(Source.TEXT, 3, hit=True)
        rates.record(Source.HISTORY, 3, hit=False)
    assert rates.chance(Source.TEXT, 3) > 0.95 > before
    assert rates.chance(Source.HISTORY, 3) < 0.05
    assert rates.chance(Source.PREDICTION, 3) == before
    assert rates.chance(Source.TEXT, 10_000) == rates.chance(Source.TEXT, 32)
    for _ in range(1000):
        rates.record(Source.TEXT, 3, hit=False)
    assert rates.chance(Source.TEXT, 3) < 0.2, "texts change"


def test_a_choice_that_deceives_is_believed_no_more_and_then_again() -> None:
    luck = Luck()
    assert luck.apply(0.8) == 0.8
    for _ in range(10):
        luck.record(0.8, hit=False)
    assert luck.apply(0.8) < 0.35
    for _ in range(15):
        luck.record(0.8, hit=True)
    assert luck.apply(0.8) > 0.75
    assert luck.apply(0.97) < 1.0, "nothing is certain"
