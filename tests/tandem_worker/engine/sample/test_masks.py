"""Which grammars end when all of them together take too long."""

from __future__ import annotations

import random

from tandem_worker.engine.errors import RequestError
from tandem_worker.engine.sample.masks import (
    CREDIT_SECONDS,
    OVERDRAFT_SECONDS,
    QUICK_SECONDS,
    REFILL,
    MaskCredit,
    is_quick,
)
from tandem_worker.engine.sample.state import SamplingState
from tandem_worker.engine.schedule.params import SamplingParams

STEP_SECONDS = 0.02
"""Of the model, between the masks of two steps."""


class Taking:
    """A grammar whose masks take the given seconds, one after the other; the last of them for ever."""

    def __init__(self, *seconds: float) -> None:
        self._coming = list(seconds)
        self.seconds = 0.0
        self.reason: RequestError | None = None

    def new(self) -> Taking:
        return self

    def fill_mask(self, mask: object) -> None:
        if self.reason is None:
            self.seconds += self._coming.pop(0) if len(self._coming) > 1 else self._coming[0]

    def accept(self, token_id: int) -> None: ...

    @property
    def terminated(self) -> bool:
        return False

    @property
    def failed(self) -> bool:
        return self.reason is not None

    def give_up(self, reason: RequestError) -> None:
        self.reason = self.reason or reason


class Worker:
    def __init__(self) -> None:
        self.now = 100.0
        self.credit = MaskCredit(lambda: self.now)
        self.running: list[tuple[SamplingState, Taking]] = []
        self.ended: list[Taking] = []

    def admit(self, *grammars: Taking) -> None:
        self.running += [
            (SamplingState(SamplingParams(max_tokens=9, grammar=grammar), frozenset()), grammar) for grammar in grammars
        ]

    def step(self) -> float:
        """Seconds that its masks took."""
        before = sum(grammar.seconds for _, grammar in self.running)
        self.credit.fill([(state, None) for state, _ in self.running])
        taken = sum(grammar.seconds for _, grammar in self.running) - before
        self.now += taken + STEP_SECONDS
        self.ended += [grammar for _, grammar in self.running if grammar.failed]
        self.running = [(state, grammar) for state, grammar in self.running if not grammar.failed]
        return taken


def test_grammars_as_clients_write_them_never_end() -> None:
    worker = Worker()
    worker.admit(*(Taking(0.005, 0.002, QUICK_SECONDS) for _ in range(8)), *(Taking(0.0001) for _ in range(250)))
    for _ in range(500):
        worker.step()
    assert not worker.ended


def test_one_slow_grammar_alone_is_left_to_its_own_budget() -> None:
    worker = Worker()
    worker.admit(Taking(0.04, *[0.01] * 4, 0.005))
    for _ in range(200):
        worker.step()
    assert not worker.ended


def test_many_slow_ones_end_and_no_step_takes_much_longer_than_the_credit() -> None:
    """Each keeps within its request's 5 ms per token; together they would take half a second of every step."""
    worker = Worker()
    sound = [Taking(0.002, 0.0001) for _ in range(20)]
    worker.admit(*sound)
    worker.step()
    slow = [Taking(0.005) for _ in range(100)]
    worker.admit(*slow)
    longest = max(worker.step() for _ in range(300))
    assert longest <= CREDIT_SECONDS + 0.005 + 20 * 0.0001
    assert 90 <= len(worker.ended) < 100
    assert not set(worker.ended) & set(sound)


def test_who_turns_slow_ends_and_not_who_comes_last() -> None:
    worker = Worker()
    turning = [Taking(*[0.0001] * 10, 0.02) for _ in range(3)]
    steady = [Taking(0.003) for _ in range(3)]
    worker.admit(*turning, *steady)
    for _ in range(12):
        worker.step()
    assert set(worker.ended) <= set(turning)
    assert "this is the slowest: one token took 20.0 ms" in str(worker.ended[0].reason)


def test_even_those_that_were_quick_cannot_all_turn_slow_at_once() -> None:
    worker = Worker()
    worker.admit(*(Taking(*[0.0001] * 10, 0.005) for _ in range(100)))
    longest = max(worker.step() for _ in range(12))
    assert longest <= CREDIT_SECONDS + OVERDRAFT_SECONDS + 0.005


def test_a_flood_of_new_ones_costs_those_with_a_history_nothing() -> None:
    worker, rng = Worker(), random.Random(0)
    sound = [Taking(0.0002) for _ in range(10)]
    worker.admit(*sound)
    longest = 0.0
    for _ in range(200):
        worker.admit(*(Taking(rng.uniform(0.001, 0.02)) for _ in range(rng.randrange(20))))
        longest = max(longest, worker.step())
    assert longest <= CREDIT_SECONDS + OVERDRAFT_SECONDS + 0.02 + 10 * 0.0002
    assert len(worker.ended) > 1000
    assert not set(worker.ended) & set(sound)


def test_nobody_with_a_grammar_gets_several_tokens_while_there_is_little_time_for_masks() -> None:
    """More masks in the same time would end a request that had time for one a step."""
    worker = Worker()
    worker.admit(Taking(0.03, *[0.0001] * 30), Taking(0.0001))
    worker.step()
    assert not any(is_quick(state) for state, _ in worker.running), "20 of 50 ms are left"
    steps = 0
    while not is_quick(worker.running[1][0]):
        worker.step()
        steps += 1
    assert 0 < steps * STEP_SECONDS * REFILL < CREDIT_SECONDS
    plain = SamplingState(SamplingParams(max_tokens=9), frozenset())
    plain.credit_is_low = True
    assert is_quick(plain)
