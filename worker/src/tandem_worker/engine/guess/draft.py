"""Guesses of a draft head, beside those by text: who is asked for them, how deep, and what they are worth.

A head's guesses cost passes over its weights, those by text cost nothing. So with `adaptive` a pass is made where the
tokens that it is likely to add are worth its time, by what passes took and by how often guesses of this depth were
right, for this choice above all. A choice whose guesses are worth none is tried again once in `_PROBE` steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol

from tandem_worker.engine.guess.budget import LEAST_GAIN, MOST_LOSS
from tandem_worker.engine.guess.contract import Guess, Guesser, Source
from tandem_worker.engine.guess.costs import StepCosts
from tandem_worker.engine.guess.rates import Luck
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence

_BUCKETS = 16
"""Confidences of a head that are told apart."""
_PRIOR_WEIGHT = 8.0
_PRIOR_DEPTH = 0.4
"""Chance of a guess whose confidence is not known yet."""
_MEMORY = 400.0
_OWN_WEIGHT, _OWN_DECAY = 2.0, 0.95
_PROBE = 32
_PRIOR_PASS = 0.1
"""Duration of a pass as a share of a step's, before one was measured."""
_PASS_WEIGHT, _FASTER_WEIGHT = 0.1, 0.5
"""A head whose passes are taken for long is asked once in `_PROBE` steps: it would be taken for slow for thousands."""
_DOUBT = 1 / 256
_MOST_READ = 1 << 16
"""Tokens of the texts that chains begin behind, in one step together: their entries are gathered in memory beside the
blocks, some 0.8 KiB for each with SmolLM2, 4 KiB with a model of 8 billion weights."""
_LEAST_VALUE = 0.05
"""Least chance of a guess to be reached and right, behind which nothing is guessed."""


class Draw(NamedTuple):
    """How the tokens of a choice are drawn; see `SamplingParams`."""

    seed: int
    choice: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float


class Place(NamedTuple):
    """The beginning of a chain of guesses; see `model.draft.chains.ChainStart`."""

    token: int
    position: int
    blocks: list[int]
    draw: Draw | None
    """None: the likeliest tokens are chosen."""


class Chain(Protocol):
    """Guesses behind many places, one depth at a time."""

    def advance(self, active: Rows[int]) -> tuple[list[int], list[float]]:
        """The next guess of each of these, and the head's confidence in it, 0 to 1."""
        ...


Begin = Callable[[Rows[Place], int], Chain]
"""Begins chains of up to so many guesses behind these places."""


class HeadRates:
    """How often a head's guesses are right: by its confidence in them, and by depth where that is not known yet."""

    def __init__(self) -> None:
        self._by_confidence = [[_PRIOR_WEIGHT * (bucket + 0.5) / _BUCKETS, _PRIOR_WEIGHT] for bucket in range(_BUCKETS)]
        self._by_depth: list[list[float]] = []

    def chance(self, confidence: float) -> float:
        """Chance of a guess to be right where those before it are, 0 to 1."""
        hits, trials = self._by_confidence[_bucket(confidence)]
        return hits / trials

    def expected(self, depth: int) -> float:
        """The same of the guess at a depth, 0 being the first, before the head is asked for it."""
        hits, trials = self._at(depth)
        return hits / trials

    def record(self, depth: int, confidence: float, *, hit: bool) -> None:
        """Such a guess was right, or was not; those before it were."""
        for counts in (self._by_confidence[_bucket(confidence)], self._at(depth)):
            counts[0] += hit
            counts[1] += 1.0
            if counts[1] > _MEMORY:
                counts[0] /= 2
                counts[1] /= 2

    def _at(self, depth: int) -> list[float]:
        while len(self._by_depth) <= depth:
            self._by_depth.append([_PRIOR_WEIGHT * _PRIOR_DEPTH, _PRIOR_WEIGHT])
        return self._by_depth[depth]


def _bucket(confidence: float) -> int:
    return min(_BUCKETS - 1, int(confidence * _BUCKETS))


@dataclass(slots=True)
class _Choice:
    """What is known of one choice."""

    rates: HeadRates
    """Those of choices whose tokens are chosen alike."""
    luck: Luck = field(default_factory=Luck)
    hits: float = 0.0
    trials: float = 0.0
    """First guesses that were right, and all of them; older ones fade."""
    known: int = 0
    """Tokens of the answer when it was guessed for last."""
    waited: int = _PROBE
    """Steps since then; it never was: it is tried at once."""
    tokens: list[int] = field(default_factory=list[int])
    confidences: list[float] = field(default_factory=list[float])
    """The head's, in the guesses behind those."""

    def expect(self, usual: float) -> float:
        """Chance of its next first guess, where that of others is the `usual` one. Falls to a tenth of it and less, as
        luck does not: a pass that is in vain has cost its time already."""
        return (_OWN_WEIGHT * usual + self.hits) / (_OWN_WEIGHT + self.trials)

    def record_first(self, *, hit: bool) -> None:
        """Its first guess was right, or was not."""
        self.hits = _OWN_DECAY * self.hits + hit
        self.trials = _OWN_DECAY * self.trials + 1.0


class DraftGuesser:
    """Implements `guess.contract.Guesser`."""

    def __init__(
        self,
        begin: Begin,
        block_size: int,
        *,
        lookup: Guesser | None = None,
        costs: StepCosts | None = None,
        may_guess: Callable[[Sequence], bool] = lambda sequence: True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`lookup` guesses too, and whose guess promises more is taken; None: the head guesses alone. `costs`: what
        steps cost, which passes are weighed against; None: every guess is made. `may_guess` as in `Speculator`."""
        self._begin = begin
        self._block_size = block_size
        self._lookup = lookup
        self._costs = costs
        self._may_guess = may_guess
        self._clock = clock
        self._rates = {is_greedy: HeadRates() for is_greedy in (False, True)}
        """A head that ranks by its likelihoods and the noise of draws is right less often."""
        self._choices: dict[Sequence, _Choice] = {}
        self._first_seconds: dict[int, float] = {}
        self._more_seconds: dict[int, float] = {}
        """Durations of passes, by the magnitude of their rows. A first one has its texts gathered besides."""

    def propose(self, sequences: Rows[Sequence], most: Mapping[Sequence, int], plan: StepPlan) -> dict[Sequence, Guess]:
        found = {} if self._lookup is None else self._lookup.propose(sequences, most, plan)
        for sequence in sequences:
            self._learn(sequence)
        # Who has more text than is read in a step is never tried: it would be due in every step, and others with it.
        able = [s for s in sequences if self._may_guess(s) and s.num_planned <= _MOST_READ]
        chosen = _fit(able if self._costs is None else self._choose(able, found, plan))
        if chosen:
            for sequence, guess in self._draft(chosen, found, most, plan).items():
                if _worth(guess) > _worth(found.get(sequence)):
                    found[sequence] = guess
        return found

    def forget(self, sequence: Sequence) -> None:
        self._choices.pop(sequence, None)
        if self._lookup is not None:
            self._lookup.forget(sequence)

    def _learn(self, sequence: Sequence) -> None:
        """Compare the guesses that were made last with what the answer says, as far as it goes."""
        choice = self._choices.get(sequence)
        if choice is None or not choice.tokens:
            return
        said = sequence.output[choice.known :]
        for depth, (token, guess, confidence) in enumerate(zip(said, choice.tokens, choice.confidences, strict=False)):
            hit = token == guess
            if not depth:
                choice.record_first(hit=hit)
            choice.luck.record(choice.rates.chance(confidence), hit=hit)
            choice.rates.record(depth, confidence, hit=hit)
            if not hit:
                break
        choice.tokens, choice.confidences = [], []

    def _choose(self, able: list[Sequence], found: Mapping[Sequence, Guess], plan: StepPlan) -> list[Sequence]:
        """Those for whom a first pass is likely to pay, and those whose turn it is to be tried."""
        if not able:
            return []
        count = max(1, len(plan.decodes))
        cost = self._pass_cost(len(able), plan, self._first_seconds) + self._check_cost(plan, 0, len(able))
        worth = cost * count / len(able) + (LEAST_GAIN - 1)
        paying: set[Sequence] = set()
        for sequence in able:
            choice = self._find(sequence)
            choice.waited += 1
            if choice.expect(choice.rates.expected(0)) - _worth(found.get(sequence)) > worth:
                paying.add(sequence)
        if len(paying) < count and self._pass_cost(len(paying), plan, self._first_seconds) > MOST_LOSS:
            paying = set()  # the others would pay for it
        # Who is nearly due is tried with who is: of many that began one after another some would be due in every step.
        least = _PROBE // 2 if max(self._choices[sequence].waited for sequence in able) >= _PROBE else _PROBE
        return [sequence for sequence in able if sequence in paying or self._choices[sequence].waited >= least]

    def _draft(
        self, chosen: list[Sequence], found: Mapping[Sequence, Guess], most: Mapping[Sequence, int], plan: StepPlan
    ) -> dict[Sequence, Guess]:
        """Guesses of the head, as deep as it pays."""
        sources = {target: source for source, target in plan.copies}
        depth = max(most[sequence] for sequence in chosen)
        began = self._clock()
        chain = self._begin([self._place(sequence, sources) for sequence in chosen], depth)
        drafts = [self._find(sequence) for sequence in chosen]
        chances: list[list[float]] = [[] for _ in chosen]
        values = [1.0] * len(chosen)
        for draft, sequence in zip(drafts, chosen, strict=True):
            draft.known, draft.waited = len(sequence.output), 0
            draft.tokens, draft.confidences = [], []
        gained, spent = 0.0, 0.0
        active = list(range(len(chosen)))
        others = sum(_worth(guess) for guess in found.values())
        for level in range(depth):
            active = [row for row in active if level < most[chosen[row]]]
            if level:
                made = sum(map(len, chances))
                expected = {row: values[row] * drafts[row].rates.expected(level) for row in active}
                active = self._go_on(expected, plan, gained + others, spent, made)
            if not active:
                break
            known = self._more_seconds if level else self._first_seconds
            spent += self._pass_cost(len(active), plan, known)
            tokens, confidences = chain.advance(active)
            began, seconds = self._clock(), self._clock() - began
            _measure(known, len(active), seconds)
            for row, token, confidence in zip(active, tokens, confidences, strict=True):
                chance = drafts[row].luck.apply(drafts[row].rates.chance(confidence))
                drafts[row].tokens.append(token)
                drafts[row].confidences.append(confidence)
                chances[row].append(chance)
                values[row] *= chance
                gained += values[row]
        return {
            sequence: Guess(tuple(draft.tokens), Source.HEAD, tuple(row))
            for sequence, draft, row in zip(chosen, drafts, chances, strict=True)
            if row
        }

    def _go_on(
        self, expected: Mapping[int, float], plan: StepPlan, gained: float, spent: float, made: int
    ) -> list[int]:
        """Those that one more pass is made for: it must add tokens at the rate at which the step has them. `expected`:
        the chance of each one's next guess to be reached and right."""
        if self._costs is None:
            return list(expected)
        worth = [row for row, chance in expected.items() if chance >= _LEAST_VALUE]
        if not worth:
            return []
        count = max(1, len(plan.decodes))
        cost = self._pass_cost(len(worth), plan, self._more_seconds) + self._check_cost(plan, made, len(worth))
        adds = sum(expected[row] for row in worth)
        rate = (1 + gained / count) / (1 + spent)
        leaves_others = len(worth) < count and spent + cost > MOST_LOSS
        if leaves_others or adds / count < rate * cost:
            self._doubt(len(worth), plan)
            return []
        return worth

    def _doubt(self, rows: int, plan: StepPlan) -> None:
        """A deeper pass is not made because it is taken for dear: only by being made can it show that it is not, so
        its duration fades down to what it was taken for at first."""
        if self._more_seconds and self._pass_cost(rows, plan, self._more_seconds) > _PRIOR_PASS:
            self._more_seconds[_nearest(self._more_seconds, rows)] *= 1 - _DOUBT

    def _find(self, sequence: Sequence) -> _Choice:
        choice = self._choices.get(sequence)
        if choice is None:
            choice = self._choices[sequence] = _Choice(self._rates[sequence.request.sampling.greedy])
        return choice

    def _place(self, sequence: Sequence, sources: Mapping[int, int]) -> Place:
        position = sequence.num_planned - 1
        blocks = sequence.block_ids[: -(-position // self._block_size)]
        if sources:
            blocks = [sources.get(block, block) for block in blocks]
        return Place(sequence.output[-1], position, blocks, _find_draw(sequence))

    def _check_cost(self, plan: StepPlan, made: int, more: int) -> float:
        """What so many guesses more make the step longer, where `made` are checked, as a share of the step's."""
        if self._costs is None:
            return 0.0
        relative, rows = self._costs.relative, plan.num_tokens
        return (relative(rows + made + more) - relative(rows + made)) / relative(rows)

    def _pass_cost(self, rows: int, plan: StepPlan, known: Mapping[int, float]) -> float:
        """Duration of a pass of so many chains, as a share of the step's; `known` are those of its kind."""
        step = None if self._costs is None else self._costs.predict(plan.num_tokens)
        if not step or not known:
            return _PRIOR_PASS
        nearest = _nearest(known, rows)
        return known[nearest] * 2.0 ** max(0, rows.bit_length() - nearest) / step


def _fit(chosen: list[Sequence]) -> list[Sequence]:
    """Those whose texts are read in one step."""
    fitting: list[Sequence] = []
    room = _MOST_READ
    for sequence in chosen:
        if sequence.num_planned <= room:
            fitting.append(sequence)
            room -= sequence.num_planned
    return fitting


def _find_draw(sequence: Sequence) -> Draw | None:
    params = sequence.request.sampling
    if params.greedy:
        return None
    return Draw(params.seed, sequence.choice, params.temperature, params.top_k, params.top_p, params.min_p)


def _nearest(known: Mapping[int, float], rows: int) -> int:
    """The size in `known` that is most like that of so many rows."""
    wanted = rows.bit_length()
    return min(known, key=lambda size: (abs(size - wanted), size))


def _measure(known: dict[int, float], rows: int, seconds: float) -> None:
    """A pass of so many chains took so long. What disturbed it says no more than that it took twice as long; one of
    less than half the time says that those before were disturbed, as the first one is by memory that it touches first.
    """
    size = rows.bit_length()
    before = known.get(size, seconds)
    weight = _PASS_WEIGHT if seconds > before / 2 else _FASTER_WEIGHT
    known[size] = before + weight * (min(seconds, 2 * before) - before)


def _worth(guess: Guess | None) -> float:
    """Tokens that a guess is expected to save."""
    return 0.0 if guess is None else sum(accumulate(guess.chances, mul))
