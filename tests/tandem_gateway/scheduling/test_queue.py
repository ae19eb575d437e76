"""The order of requests that wait, and how many a worker is given: tables, and what holds for any history."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.launch import TTFTDeadline
from tandem_api.names import Role
from tandem_gateway.scheduling import Endpoint, Worker
from tandem_gateway.scheduling.queue import (
    FIRST_WINDOW,
    LONGEST_LEAD,
    PRESUMED_SECONDS,
    DeadlineQueue,
    Ramp,
    Slot,
    Ticket,
    find_due,
)


def take_all(queue: DeadlineQueue[int], tickets: dict[int, Ticket[int]]) -> list[int]:
    taken: list[int] = []
    while (item := queue.first()) is not None:
        queue.remove(tickets[item])
        taken.append(item)
    return taken


@pytest.mark.parametrize(
    ("target", "tokens", "lead"),
    [
        (None, 100_000, 0.0),
        (TTFTDeadline(seconds=0.5), 100_000, 0.5),
        (TTFTDeadline(seconds=0.5, seconds_per_token=0.001), 2000, 2.5),
        (TTFTDeadline(seconds=0.5, seconds_per_token=0.001), 1_000_000, 0.5 + LONGEST_LEAD),
    ],
)
def test_when_a_first_token_is_due(target: TTFTDeadline | None, tokens: int, lead: float) -> None:
    assert find_due(100.0, tokens, target) == 100.0 + lead


Arrival = tuple[float, int]
arrivals = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 200_000)), min_size=1, max_size=40).map(sorted)


@given(arrivals=arrivals, per_token=st.floats(0, 0.01))
def test_nobody_is_overtaken_by_who_came_later_than_the_bound(arrivals: list[Arrival], per_token: float) -> None:
    queue, target = DeadlineQueue[int](), TTFTDeadline(seconds=0.5, seconds_per_token=per_token)
    tickets = {
        number: queue.add(number, find_due(at, tokens, target), tokens, at)
        for number, (at, tokens) in enumerate(arrivals)
    }
    order = take_all(queue, tickets)
    dues = [find_due(*arrivals[number], target) for number in order]
    assert dues == sorted(dues)
    for place, number in enumerate(order):
        for earlier in order[:place]:
            assert arrivals[earlier][0] <= arrivals[number][0] + LONGEST_LEAD + 1e-9


@given(dues=st.lists(st.integers(0, 3), max_size=60))
def test_equal_deadlines_keep_the_order_of_arrival(dues: list[int]) -> None:
    queue = DeadlineQueue[int]()
    tickets = {number: queue.add(number, due, 1, 0.0) for number, due in enumerate(dues)}
    assert take_all(queue, tickets) == sorted(range(len(dues)), key=lambda number: dues[number])


@given(steps=st.lists(st.tuples(st.sampled_from(["add", "leave", "take"]), st.integers(0, 1000)), max_size=400))
def test_counts_and_memory_follow_who_waits(steps: list[tuple[str, int]]) -> None:
    queue, waiting = DeadlineQueue[int](), dict[int, tuple[float, Ticket[int]]]()
    for number, (step, value) in enumerate(steps):
        if step == "add":
            waiting[number] = (value, queue.add(number, value, value, 0.0))
        elif waiting and step == "leave":
            gone = sorted(waiting)[value % len(waiting)]
            queue.remove(waiting.pop(gone)[1])
        elif waiting:
            item = queue.first()
            assert item == min(waiting, key=lambda each: (waiting[each][0], each))
            ticket = waiting.pop(item)[1]
            queue.remove(ticket)
            queue.remove(ticket)
        assert queue.size == len(waiting)
        assert queue.tokens == sum(ticket.tokens for _, ticket in waiting.values())
        assert len(queue._heap) <= 2 * queue.size + 65


def make_endpoint(name: str = "d") -> Endpoint:
    return Endpoint(Worker(name=name, address="h:1", role=Role.DECODE, revision="r"))


@dataclass
class Drive:
    """Gives one endpoint as much as it may have."""

    ramp: Ramp = field(default_factory=Ramp)
    endpoint: Endpoint = field(default_factory=make_endpoint)
    slots: list[Slot] = field(default_factory=list)

    def turn(self, now: float, *, stream: bool = True) -> int:
        """How many it was given."""
        self.ramp.begin_turn(now)
        before = len(self.slots)
        while self.endpoint.worker.name not in self.ramp.full:
            self.slots.append(self.ramp.take(self.endpoint, now, stream=stream))
        return len(self.slots) - before


def test_a_worker_is_given_few_and_twice_as_many_once_it_has_answered_them() -> None:
    drive = Drive()
    assert drive.turn(0.0) == FIRST_WINDOW
    assert drive.turn(0.1) == 0, "and no more while it answers none"
    for slot in drive.slots:
        slot.end(answered=True)
        slot.end(answered=True)
    assert drive.turn(0.2) == 2 * FIRST_WINDOW


def test_a_worker_that_fails_its_requests_is_given_as_many_again() -> None:
    drive = Drive()
    drive.turn(0.0)
    for slot in drive.slots:
        slot.end(answered=False)
    assert drive.turn(0.1) == FIRST_WINDOW


@pytest.mark.parametrize(("heard", "given"), [(True, 2 * FIRST_WINDOW), (False, FIRST_WINDOW)])
def test_answers_in_one_piece_count_as_begun_after_a_while(heard: bool, given: int) -> None:
    drive = Drive()
    drive.turn(0.0, stream=False)
    assert drive.turn(0.9 * PRESUMED_SECONDS, stream=False) == 0
    if heard:
        drive.endpoint.heard_at = 0.5
    assert drive.turn(PRESUMED_SECONDS, stream=False) == given


def test_each_worker_has_a_window_of_its_own_and_one_that_is_gone_has_none() -> None:
    ramp, first, second = Ramp(), make_endpoint("a"), make_endpoint("b")
    for endpoint in (first, second):
        for _ in range(FIRST_WINDOW):
            ramp.take(endpoint, 0.0, stream=True)
    assert ramp.full == {"a", "b"}
    first.gone = True
    ramp.begin_turn(0.1)
    assert ramp.full == {"b"}
    ramp.forget()
    assert not ramp.full


def test_what_a_queue_before_gave_says_nothing_about_the_next_one() -> None:
    ramp, worker = Ramp(), make_endpoint("a")
    before = [ramp.take(worker, 0.0, stream=True) for _ in range(FIRST_WINDOW)]
    ramp.forget()
    for slot in before[1:]:
        ramp.take(worker, 1.0, stream=True)
        slot.end(answered=False)
    assert not ramp.full
    ramp.take(worker, 1.0, stream=True)
    before[0].end(answered=True)
    ramp.begin_turn(1.1)
    assert ramp.full == {"a"}


@given(endings=st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_window_is_what_was_answered_and_what_it_began_with(endings: list[bool]) -> None:
    drive, answered = Drive(), 0
    for number, told in enumerate(endings):
        drive.turn(float(number))
        drive.slots.pop(0).end(answered=told)
        answered += told
        assert len(drive.slots) <= FIRST_WINDOW + answered


@given(steps=st.lists(st.tuples(st.sampled_from("abcde"), st.integers(0, 9)), max_size=200), most=st.integers(1, 12))
def test_places_of_a_full_queue_are_shared_among_sources(steps: list[tuple[str, int]], most: int) -> None:
    """`a` asks as often as it can. Nobody who has fewer places than somebody else is turned away."""
    queue = DeadlineQueue[int]()
    waiting: dict[int, Ticket[int]] = {}
    for number, (source, leaves) in enumerate((one, leaves) for step, leaves in steps for one in ("a", step)):
        if waiting and not leaves:
            queue.remove(waiting.pop(min(waiting)))
        counts = {one: sum(ticket.source == one for ticket in waiting.values()) for one in "abcde"}
        excess = queue.find_excess(source) if queue.size == most else None
        if queue.size == most and excess is None:
            assert counts[source] + 1 >= max(counts.values())
            continue
        if excess is not None:
            assert counts[excess.source] == max(counts.values()) > counts[source] + 1
            newest = max(number for number, ticket in waiting.items() if ticket.source == excess.source)
            assert excess is waiting.pop(newest)
            queue.remove(excess)
        waiting[number] = queue.add(number, number, 1, 0.0, source)
        assert queue.size == len(waiting) <= most
        assert sum(map(len, queue._sources.values())) == len(waiting)
        assert all(queue._sources.values())
