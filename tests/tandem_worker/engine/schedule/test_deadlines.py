"""The order of prompts where first tokens have a target: what is due when, who goes first, and how far that goes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.launch import TTFTDeadline
from tandem_worker.engine.schedule.deadlines import find_late_place, find_place, is_late
from tandem_worker.engine.schedule.params import SamplingParams
from tandem_worker.engine.schedule.request import Request, SequenceState

from tests.tandem_worker.engine.schedule.test_scheduler import MAX_BATCH_TOKENS, ROOT, Driver

LEVEL = 30.0
PER_TOKEN = TTFTDeadline(seconds=1.0, seconds_per_token=0.25)
targets = st.builds(TTFTDeadline, seconds=st.floats(0, 100), seconds_per_token=st.floats(0, 1))


def make_request(tokens: int = 10, *, arrival: float = 0.0, priority: float = 0.0) -> Request:
    return Request(
        id="r", prompt=tuple(range(tokens)), sampling=SamplingParams(max_tokens=1), arrival=arrival, chain_root=ROOT,
        prompt_chain=[], priority=priority, num_uncached=tokens,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tokens", "priority", "target", "place"),
    [
        (10, 0, None, 100.0),
        (10, 2, None, 160.0),
        (10, 0, PER_TOKEN, 103.5),
        (40, 0, PER_TOKEN, 111.0),
        (40, -1, PER_TOKEN, 81.0),
        (100_000, 0, PER_TOKEN, 130.0),
    ],
)
def test_where_a_request_stands(tokens: int, priority: int, target: TTFTDeadline | None, place: float) -> None:
    assert find_place(make_request(tokens, arrival=100.0, priority=priority), target, LEVEL) == place


def test_who_has_tokens_already_stands_where_it_came() -> None:
    request = make_request(1000, arrival=100.0)
    request.resumed = ((1, 2),)
    assert find_place(request, PER_TOKEN, LEVEL) == 100.0


@given(
    target=targets,
    first=st.tuples(st.floats(0, 1000), st.integers(1, 10_000)),
    second=st.tuples(st.floats(0, 1000), st.integers(1, 10_000)),
    level=st.integers(-3, 3),
)
def test_bounds_of_overtaking(
    target: TTFTDeadline, first: tuple[float, int], second: tuple[float, int], level: int
) -> None:
    mine = make_request(first[1], arrival=first[0], priority=level)
    late = find_late_place(mine, LEVEL)
    assert find_place(mine, None, LEVEL) <= find_place(mine, target, LEVEL) <= late + 1e-9
    later = make_request(second[1], arrival=first[0] + LEVEL + 1e-3 + second[0], priority=level)
    assert late < find_place(later, target, LEVEL), "who came a level later is behind, whatever became of this one"
    lower = make_request(second[1], arrival=first[0], priority=level + 1)
    assert late <= find_place(lower, target, LEVEL) + 1e-9, "priority stays above"


@pytest.mark.parametrize(
    ("now", "rate", "late"),
    [
        (0.0, None, False),
        (3.5, None, False),
        (3.6, None, True),
        (0.0, 10.0, False),
        (0.0, 2.0, True),
        (2.6, 10.0, True),
    ],
)
def test_who_is_late(now: float, rate: float | None, late: bool) -> None:
    assert is_late(make_request(10), PER_TOKEN, now, rate) is late


def list_chunks(driver: Driver) -> list[tuple[str, int]]:
    """Requests and lengths of the chunks of the next step."""
    return [(chunk.sequence.request.id, chunk.length) for chunk in driver.step().chunks]


@pytest.mark.parametrize(("target", "chunks"), [(None, [("0", 16)]), (PER_TOKEN, [("1", 8), ("0", 8)])])
def test_a_tighter_deadline_takes_the_next_chunk(target: TTFTDeadline | None, chunks: list[tuple[str, int]]) -> None:
    driver = Driver(ttft_target=target)
    driver.add(list(range(64)), max_tokens=1)
    assert list_chunks(driver) == [("0", 16)]
    driver.add(list(range(100, 108)), max_tokens=1)
    assert list_chunks(driver) == chunks
    driver.run()


def test_a_cached_prompt_is_due_for_what_is_left_of_it() -> None:
    driver = Driver(ttft_target=PER_TOKEN)
    known = list(range(40))
    driver.add(known, max_tokens=1)
    driver.run()
    driver.add(list(range(500, 560)), max_tokens=1)
    driver.step()
    again = driver.add([*known, 7], max_tokens=1)
    assert again.num_uncached == 1
    driver.run()
    assert driver.finished == ["0", "2", "1"]


def test_one_without_blocks_for_it_interrupts_nobody() -> None:
    driver = Driver(num_blocks=15, ttft_target=PER_TOKEN)
    driver.add(list(range(56)), max_tokens=1)
    driver.step()
    short = driver.add(list(range(100, 108)), max_tokens=1)
    driver.step()
    assert short.choices[0].state is SequenceState.WAITING
    driver.run()
    assert driver.finished == ["0", "1"]


def test_one_that_is_late_whatever_happens_lets_those_pass_that_are_not_for_one_level_at_most() -> None:
    driver = Driver(max_running=1, ttft_target=TTFTDeadline(seconds=10.0), seconds_per_priority=30.0)
    driver.scheduler.hooks.prefill_rate = lambda: 4.0
    driver.add([1], max_tokens=1)
    hopeless = driver.add(list(range(60)), max_tokens=1)  # 15 seconds of computing
    others = [driver.add([number], max_tokens=1) for number in range(100, 103)]
    driver.run()
    assert driver.finished == ["0", *(other.id for other in others), hopeless.id]
    assert hopeless.set_back
    driver = Driver(max_running=1, ttft_target=TTFTDeadline(seconds=10.0), seconds_per_priority=30.0)
    driver.scheduler.hooks.prefill_rate = lambda: 4.0
    driver.add([1], max_tokens=40)
    driver.step()
    hopeless = driver.add(list(range(60)), max_tokens=1)
    driver.now += 31
    others = [driver.add([number], max_tokens=1) for number in range(100, 103)]
    driver.run()
    assert driver.finished == ["0", hopeless.id, *(other.id for other in others)], "they came too late to pass"


def test_one_that_is_late_and_alone_waits_for_nobody() -> None:
    driver = Driver(ttft_target=TTFTDeadline(seconds=0.5))
    driver.scheduler.hooks.prefill_rate = lambda: 1.0
    request = driver.add(list(range(8)), max_tokens=1)
    driver.run()
    assert not request.set_back


@settings(max_examples=60, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60)), min_size=2, max_size=25),
    target=targets,
    ahead=st.booleans(),
    rate=st.none() | st.floats(0.5, 50),
)
def test_first_tokens_come_in_the_order_of_deadlines_and_nobody_is_passed_beyond_the_bound(
    arrivals: list[tuple[int, int]], target: TTFTDeadline, ahead: bool, rate: float | None
) -> None:
    """One at a time, so that the order in which prompts begin is that in which they are taken."""
    driver = Driver(num_blocks=40, ahead=ahead, max_running=1, ttft_target=target, seconds_per_priority=LEVEL)
    driver.scheduler.hooks.prefill_rate = lambda: rate
    begun: dict[str, float] = {}

    def step() -> None:
        for chunk in driver.step().chunks:
            begun.setdefault(chunk.sequence.request.id, driver.now)

    for pause, length in arrivals:
        for _ in range(pause):
            step()
        driver.add([len(driver.requests) + 1000] * length, max_tokens=1)
    for _ in range(3000):
        if len(begun) == len(arrivals):
            break
        step()
    order = sorted(begun, key=begun.__getitem__)
    requests = {request.id: request for request in driver.requests}
    assert len(order) == len(arrivals), "requests starve"
    for place, one in enumerate(order):
        for earlier in order[:place]:
            mine, passed_by = requests[one], requests[earlier]
            assert passed_by.arrival <= mine.arrival + LEVEL
            alike = (passed_by.arrival, passed_by.num_uncached) == (mine.arrival, mine.num_uncached)
            if alike and int(passed_by.id) > int(mine.id):  # in their order nobody is passed, late or not
                assert mine.set_back >= passed_by.set_back


@given(lengths=st.lists(st.integers(1, 2), min_size=2, max_size=20), target=targets)
@settings(max_examples=40, deadline=None)
def test_equal_deadlines_keep_the_order_of_arrival(lengths: list[int], target: TTFTDeadline) -> None:
    driver = Driver(max_running=1, ttft_target=target)
    for number, length in enumerate(lengths):
        driver.add([number + 1000] * length, max_tokens=1)
    driver.run()
    for length in (1, 2):
        same = [name for name in driver.finished if lengths[int(name)] == length]
        assert same == sorted(same, key=int)


def share_in_time(*, ordered: bool) -> float:
    """Of 400 prompts, one in twelve of them long, at half of what can be computed at most."""
    rng = random.Random(11)
    target = TTFTDeadline(seconds=8.0, seconds_per_token=0.15)
    driver = Driver(num_blocks=400, max_running=32, ttft_target=target if ordered else None)
    driver.scheduler.hooks.prefill_rate = lambda: float(MAX_BATCH_TOKENS)
    first: dict[str, float] = {}
    lengths = [rng.choice([480] + 11 * [24]) for _ in range(400)]
    next_at = 0.0

    def step() -> None:
        for chunk in driver.step().chunks:
            if chunk.end == chunk.sequence.num_prompt:
                first[chunk.sequence.request.id] = driver.now

    for number, length in enumerate(lengths):
        while driver.now < next_at:
            step()
        driver.add([number + 1000] * length, max_tokens=1)
        next_at += rng.expovariate(0.5 * MAX_BATCH_TOKENS / (sum(lengths) / len(lengths)))
    for _ in range(1000):
        step()
    met = [first[each.id] <= each.arrival + target.limit(len(each.prompt)) for each in driver.requests]
    return sum(met) / len(met)


def test_more_first_tokens_are_in_time_than_by_arrival() -> None:
    by_arrival, by_deadline = share_in_time(ordered=False), share_in_time(ordered=True)
    assert by_deadline > by_arrival + 0.1, (by_arrival, by_deadline)
