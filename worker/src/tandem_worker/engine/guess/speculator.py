"""Puts guesses into steps, and keeps the accounts: who guessed how much, how much of it was right, what it took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem_worker.engine.guess.budget import choose_lengths, next_lead
from tandem_worker.engine.guess.contract import Guess, Guesser, Source
from tandem_worker.engine.guess.costs import StepCosts
from tandem_worker.engine.schedule.plan import StepPlan
from tandem_worker.engine.schedule.request import Sequence, SequenceState

_WAVES = 0.02
"""What choosing tokens in several waves costs beside the rows, as a share of a step."""
_LEAST_AHEAD, _MOST_AHEAD = 0.0, 2.0
_AHEAD, _AHEAD_WEIGHT = 0.15, 0.05
"""What running ahead is taken to save before anything was measured, as a share of a step of one row, guessing included,
and how fast that is learned. It is the host's time, which hardly grows with the rows."""
_DOUBT = 0.001
"""Share by which a step without guesses brings what is above that back to it. Steps with guesses alone teach, and where
they were slow for another reason, as while theirs are still to be recorded, there would never be one again."""
_FIRST_STEPS = 8
"""Steps without guesses before any waits for some: if all had them, what running ahead saves would be taken for what
steps cost anyway."""
_MOST_PAUSE = 7
"""Steps ahead, at the most, in which nobody looks whether guesses would pay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    max_tokens: int = 8
    """Guesses of a choice in a step."""
    adaptive: bool = True
    """Only what makes the worker faster is checked; else all that is guessed."""


class Speculator:
    """One per engine, on its thread."""

    def __init__(
        self,
        guesser: Guesser,
        settings: SpeculationSettings,
        *,
        max_rows: int,
        most_rows: int | None = None,
        runs_ahead: bool = False,
        may_guess: Callable[[Sequence], bool] = lambda sequence: True,
        measure_bytes: Callable[[], int] = lambda: 0,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`max_rows`: rows of logits that a step has room for. `most_rows`: rows of a whole step up to which guesses
        may be in it; None: any. `runs_ahead`: steps without guesses are launched before the tokens of the step before
        are known, which those with guesses cannot be. `may_guess`: may a choice get several tokens at once?
        `measure_bytes`: what guesses are made from takes so many bytes now. `costs`: where the guesser wants to know
        them too. `wall` is the clock of the durations that are recorded."""
        self.drafted: Counter[Source] = Counter()
        """Guesses that were checked."""
        self.accepted: Counter[Source] = Counter()
        """Guesses that were checked, were right and saved a step."""
        self.seconds = 0.0
        """Seconds of computing that were spent on guessing."""
        self.costs = costs or StepCosts()
        self._guesser = guesser
        self._settings = settings
        self._max_rows = max_rows
        self._most_rows = most_rows
        self._ahead = _AHEAD if runs_ahead else None
        """What running ahead saves, as a share of a step of one row; None: steps never do."""
        self._first_steps = _FIRST_STEPS if runs_ahead else 0
        """So many are still to come."""
        self._pause = self._misses = 0
        """Steps ahead until somebody looks for guesses again, and looks since that was last worth it."""
        self._may_guess = may_guess
        self._measure_bytes = measure_bytes
        self._clock = clock
        self._wall = wall
        self._planned: StepPlan | None = None
        """The step that guesses were made for last."""
        self._spent = 0.0
        """Seconds of that step which went into its guesses."""
        self._sources: dict[Sequence, Source] = {}
        """Sources of the guesses in it."""

    @property
    def num_bytes(self) -> int:
        """Memory of what guesses are made from, beside what belongs to requests that run."""
        return self._measure_bytes()

    def plan(self, plan: StepPlan, budget: int) -> dict[Sequence, tuple[int, ...]]:
        """What `Scheduler.guess` asks for: the guesses of this step, `budget` at the most."""
        began, started = self._clock(), self._wall()
        chosen = self._choose(plan, min(budget, self._count_room(plan)))
        self._sources = {sequence: guess.source for sequence, guess in chosen.items()}
        self.seconds += self._clock() - began
        self._planned, self._spent = plan, self._wall() - started
        return {sequence: guess.tokens for sequence, guess in chosen.items()}

    def is_worth_waiting(self, plan: StepPlan) -> bool:
        """Whether the next step is to have guesses, for which the tokens of `plan`'s step, which is under way, have to
        be known. Judged by what would have been guessed in that step itself; not in every step, where that was seldom
        anything."""
        if self._first_steps and self._settings.adaptive:
            return False
        if self._pause:
            self._pause -= 1
            return False
        began = self._clock()
        running = [each for each in plan.decodes if each.state is SequenceState.RUNNING]
        found = self._choose(StepPlan(decodes=running), self._count_room(plan)) if running else {}
        self.seconds += self._clock() - began
        self._misses = 0 if found else self._misses + 1
        self._pause = min(_MOST_PAUSE, (1 << min(self._misses, 8)) - 1) if self._misses else 0
        return bool(found)

    def _count_room(self, plan: StepPlan) -> int:
        """Guesses that fit into the step."""
        room = self._max_rows - len(plan.decodes) - len(plan.chunks)
        return room if self._most_rows is None else min(room, self._most_rows - plan.num_tokens)

    def _choose(self, plan: StepPlan, most: int) -> dict[Sequence, Guess]:
        rooms = {s: min(s.most_guesses, self._settings.max_tokens) for s in plan.decodes}
        asked = [sequence for sequence, room in rooms.items() if room > 0]
        if self._ahead is not None and (most <= 0 or not asked):
            return {}  # what is not asked for is learned later, and the host has no time to lose
        found = self._guesser.propose(asked, rooms, plan)
        found = {sequence: guess for sequence, guess in found.items() if self._may_guess(sequence)}
        if not found or most <= 0:
            return {}
        if not self._settings.adaptive:
            return _take_all(found, most)
        lengths = choose_lengths(
            [guess.chances for guess in found.values()],
            len(plan.decodes),
            self._slowness(plan.num_tokens),
            most,
            leads=[sequence.lead for sequence in found],
            least_lead=min((each.lead for each in plan.decodes if each not in found), default=0.0),
        )
        return {
            sequence: guess._replace(tokens=guess.tokens[:length])
            for (sequence, guess), length in zip(found.items(), lengths, strict=True)
            if length
        }

    def _slowness(self, rows: int) -> Callable[[int], float]:
        """The duration of a step of so many rows and guesses beside them, by their number, over one without any."""
        relative, ahead = self.costs.relative, self._ahead or 0.0
        before = relative(rows)
        return lambda count: (relative(rows + count) + ahead) / before + _WAVES

    def without_guesses(self, plan: StepPlan, seconds: float) -> float:
        """What a step that took so many seconds would have taken without guesses, by what rows cost."""
        rows, guesses = plan.num_tokens, plan.num_guesses
        computing = seconds - self._spent_on(plan)
        if not guesses:
            return computing
        relative = self.costs.relative(rows)
        if self._ahead is not None:
            computing = seconds * relative / (relative + self._ahead)
        return computing * self.costs.relative(rows - guesses) / relative

    def record(self, plan: StepPlan, right: Mapping[Sequence, int], seconds: float) -> None:
        """A step is over. `right`: how many guesses of a choice saved it a step; where none did it has no entry."""
        for sequence, tokens in plan.guesses.items():
            source = self._sources[sequence]
            self.drafted[source] += len(tokens)
            self.accepted[source] += right.get(sequence, 0)
        guesses = plan.num_guesses
        slower = self._slowness(plan.num_tokens - guesses)(guesses) if guesses else 1.0
        for sequence in plan.decodes:
            if guesses or sequence.lead < 0:
                sequence.lead = next_lead(sequence.lead, right.get(sequence, 0), slower)
        if not plan.chunks:
            self._learn(plan, seconds)
        self._planned, self._sources = None, {}

    def _learn(self, plan: StepPlan, seconds: float) -> None:
        """A step of decodes alone took so long. One with guesses that could not run ahead says how much that costs, and
        guessing, for which the device has waited too."""
        if self._ahead is not None and plan.guesses:
            relative, predicted = self.costs.relative(plan.num_tokens), self.costs.predict(plan.num_tokens)
            if predicted is not None:
                error = (seconds / predicted - 1) * relative - self._ahead
                self._ahead += _AHEAD_WEIGHT * max(-1.0, min(1.0, error))
                self._ahead = max(_LEAST_AHEAD, min(_MOST_AHEAD, self._ahead))
            self.costs.learn(plan.num_tokens, seconds * relative / (relative + self._ahead))
            return
        if self._ahead is not None:
            self._ahead -= _DOUBT * max(0.0, self._ahead - _AHEAD)
            self._first_steps = max(0, self._first_steps - 1)
        self.costs.learn(plan.num_tokens, seconds - self._spent_on(plan))

    def _spent_on(self, plan: StepPlan) -> float:
        """Seconds that went into this step's guesses. None were made for a step without room for them, nor were those
        for it which an earlier step had that failed."""
        return self._spent if plan is self._planned else 0.0

    def forget(self, sequence: Sequence) -> None:
        """The choice has ended."""
        self._guesser.forget(sequence)


def _take_all(found: Mapping[Sequence, Guess], most: int) -> dict[Sequence, Guess]:
    taken: dict[Sequence, Guess] = {}
    for sequence, guess in found.items():
        tokens = guess.tokens[:most]
        most -= len(tokens)
        if tokens:
            taken[sequence] = guess._replace(tokens=tokens)
    return taken
