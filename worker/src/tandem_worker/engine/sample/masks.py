"""What the grammars of all choices together may cost a step, for which all streams of the worker wait.

Each request has a budget of its own (`MaskBudget`), which many requests at once would add up. So there is one
credit for all: it comes back with time, masks that are not quick take from it, and when it is used up the slowest lose.
Grammars as clients write them take a tenth of a millisecond per token, which costs no credit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.sample.state import SamplingState

CREDIT_SECONDS = 0.05
"""Time of grammars that are not quick, between two steps."""
LOW_SECONDS = 0.04
"""With less credit left no choice with a grammar gets several tokens in a step: where masks take long now and then, as
on a busy machine, guesses would make more of them in the same time, and end a request that had time for one a step."""
OVERDRAFT_SECONDS = 0.025
"""Beyond it, for those that were quicker until now than the slowest of this step. Whatever comes then loses."""
REFILL = 0.5
"""Share of the time between steps: slow grammars together take a third of a busy engine's time at most."""
QUICK_SECONDS = 0.00025
"""Who takes less per token costs no credit."""
_NEWCOMER_SECONDS = 0.001
"""The first masks of a grammar find most of its states."""
_FORGET = 0.5


class MaskCredit:
    """One per engine. `clock` is the wall's; what grammars take they measure themselves, in time of computing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._credit = CREDIT_SECONDS
        self._since = clock()

    def fill(self, rows: Sequence[tuple[SamplingState, object]]) -> None:
        """Write the mask of every state, all of which have grammars; some end instead, with an error."""
        if not rows:
            return
        self._credit = min(CREDIT_SECONDS, self._credit + REFILL * (self._clock() - self._since))
        taken: list[tuple[float, SamplingState]] = []
        slowest = 0.0
        for state, mask in sorted(rows, key=_guess):  # so that those who may have to lose come last
            seconds = self._fill(state, mask, slowest)
            slowest = max(slowest, seconds)
            taken.append((seconds, state))
        if self._credit < 0:
            self._end_slowest(taken)
        for state, _ in rows:
            state.credit_is_low = self._credit < LOW_SECONDS
        self._since = self._clock()

    def _fill(self, state: SamplingState, mask: object, slowest: float) -> float:
        """Seconds since the last mask of this choice: for its token, and for this mask."""
        grammar = state.grammar
        assert grammar is not None
        if self._credit <= 0 and not self._may_overdraw(state, slowest):
            grammar.give_up(_too_slow("there is no time for this one: try again"))
        grammar.fill_mask(mask)
        seconds = grammar.seconds - state.grammar_seconds
        state.grammar_seconds = grammar.seconds
        state.grammar_pace = max(seconds, _FORGET * (state.grammar_pace or 0.0))
        self._credit -= _price(seconds)
        return seconds

    def _may_overdraw(self, state: SamplingState, slowest: float) -> bool:
        """A slower one than this will end for it."""
        return self._credit > -OVERDRAFT_SECONDS and state.grammar_pace is not None and state.grammar_pace < slowest

    def _end_slowest(self, taken: list[tuple[float, SamplingState]]) -> None:
        """What they took is not held against those who stay."""
        for seconds, state in sorted(taken, key=lambda pair: -pair[0]):
            if self._credit >= 0 or not _price(seconds):
                break
            assert state.grammar is not None
            state.grammar.give_up(_too_slow(f"this is the slowest: one token took {seconds * 1e3:.1f} ms"))
            self._credit += _price(seconds)


def is_quick(state: SamplingState) -> bool:
    """Whether the choice may get several tokens in a step. A slow grammar may not: its masks cost credit, which comes
    back with the time between steps, so more of them in a step would end requests that have the time for one each."""
    if state.grammar is None:
        return True
    return not state.credit_is_low and state.grammar_pace is not None and state.grammar_pace <= QUICK_SECONDS


def _too_slow(why: str) -> RequestError:
    return RequestError(
        f"The grammars of all requests here take too long together, and {why}.", code="grammars_too_slow", status=429
    )


def _guess(row: tuple[SamplingState, object]) -> float:
    """Seconds that the next token may take."""
    pace = row[0].grammar_pace
    return _NEWCOMER_SECONDS if pace is None else pace


def _price(seconds: float) -> float:
    return seconds if seconds > QUICK_SECONDS else 0.0
