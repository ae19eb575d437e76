"""The models of workers against loops that take every step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_sim.profiles import WorkerProfile
from tandem_sim.workers import DecodeWorker, Flight, PrefillWorker

PROFILE = WorkerProfile(
    name="test", source="made up", prefill_token_seconds=1e-3, prefill_pair_seconds=1e-8, step_seconds=0.01,
    step_sequence_seconds=0.0005, step_context_seconds=1e-6, kv_tokens=1 << 20, chunk_tokens=512,
)  # fmt: skip


def make(prompt: int, output: int, *, at: float = 0.0, due: float = 100.0, blocks: tuple[int, ...] = ()) -> Flight:
    return Flight(0, at, prompt, output, blocks, 0, due)


def run_steps(joins: list[tuple[float, int, int]]) -> list[float]:
    """When each sequence ends, one step after the other; a sequence joins at the first step after its time."""
    now, active, ends = 0.0, [], [0.0] * len(joins)
    waiting = sorted((at, index, prompt, output) for index, (at, prompt, output) in enumerate(joins))
    while waiting or active:
        if not active and waiting[0][0] > now:
            now = waiting[0][0]
        while waiting and waiting[0][0] <= now:
            _, index, prompt, output = waiting.pop(0)
            active.append([index, prompt, output - 1])
        now += PROFILE.step(len(active), sum(context for _, context, _ in active))
        for entry in active:
            entry[1] += 1
            entry[2] -= 1
            if entry[2] <= 0:
                ends[entry[0]] = now
        active = [entry for entry in active if entry[2] > 0]
    return ends


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(10, 20_000), st.integers(50, 400)), min_size=1, max_size=8))
def test_a_batch_ends_when_a_loop_over_its_steps_says(joins: list[tuple[float, int, int]]) -> None:
    worker = DecodeWorker("d", PROFILE, 0.0)
    flights = [make(prompt, output) for _, prompt, output in joins]
    ends: dict[int, float] = {}
    pending = sorted(range(len(joins)), key=lambda index: joins[index][0])
    while len(ends) < len(joins):
        at = worker.next_event()
        if pending and joins[pending[0]][0] <= at:
            index = pending.pop(0)
            worker.join(flights[index], joins[index][0])
            continue
        for flight in worker.finish(at)[0]:
            ends[flights.index(flight)] = at
    for index, expected in enumerate(run_steps(joins)):
        step = PROFILE.step(len(joins), sum(p + o for _, p, o in joins))
        assert ends[index] == pytest.approx(expected, abs=3 * step + 0.02 * expected)
    assert worker.sequences == 0
    assert worker.context == 0.0


def test_prompts_are_computed_one_after_another_and_only_what_is_not_cached() -> None:
    worker = PrefillWorker("p", PROFILE, 0.0, deadlines=False)
    first, second = make(2000, 1, blocks=(1, 2, 3)), make(2000, 1, blocks=(1, 2, 9))
    worker.submit(first, 0.0)
    worker.submit(second, 0.5)
    assert second.hit == 1024
    end = worker.next_event()
    assert end == pytest.approx(PROFILE.prefill(2000, 0))
    assert worker.finish(end) is first
    assert worker.next_event() == pytest.approx(end + PROFILE.prefill(976, 1024))
    assert worker.finish(worker.next_event()) is second
    assert (worker.backlog, worker.queued_tokens, len(worker)) == (0.0, 0, 0)


def test_by_deadlines_a_tighter_one_interrupts_and_no_work_is_lost() -> None:
    worker = PrefillWorker("p", PROFILE, 0.0, deadlines=True)
    long, short = make(10_000, 1, due=30.0), make(1000, 1, due=3.0)
    worker.submit(long, 0.0)
    worker.submit(short, 1.0)
    assert worker.finish(worker.next_event()) is short
    assert worker.finish(worker.next_event()) is long
    assert worker.busy(100.0) == pytest.approx(PROFILE.prefill(10_000, 0) + PROFILE.prefill(1000, 0))


def test_what_is_late_whatever_happens_goes_behind_and_does_not_starve() -> None:
    worker = PrefillWorker("p", PROFILE, 0.0, deadlines=True)
    flights = [make(5000, 1, due=2.0 + number / 10) for number in range(6)]
    in_time = make(500, 1, due=9.0)
    for flight in (*flights, in_time):
        worker.submit(flight, 0.0)
    order = [worker.finish(worker.next_event()) for _ in range(7)]
    assert order.index(in_time) <= 1
    assert set(order) == {*flights, in_time}


def test_a_prompt_beside_answers_slows_them_and_all_ends() -> None:
    def run(*, prompt: bool) -> float:
        worker = DecodeWorker("d", PROFILE, 0.0)
        answers = [make(1000, 200) for _ in range(4)]
        for flight in answers:
            worker.join(flight, 0.0)
        if prompt:
            worker.submit(make(8192, 1), 0.0)
        last, ended = 0.0, 0
        while ended < 4:
            last = worker.next_event()
            ended += len(worker.finish(last)[0])
        assert worker.queued_tokens == 0
        return last

    assert run(prompt=True) > run(prompt=False) + 0.8 * PROFILE.prefill(8192, 0)


def run_chunks(answers: list[int], prompt: int, output: int = 400) -> tuple[float, list[float]]:
    """Step by step, with whole chunks: when the prompt is computed, and when each answer of so much context ends."""
    now, done, ends = 0.0, 0.0, [0.0] * len(answers)
    computed = 0.0
    context, left = float(sum(answers)), output - 1
    chunks = -(-prompt // (PROFILE.chunk_tokens - len(answers)))
    while left or done < prompt:
        chunk = prompt / chunks if done < prompt - 0.5 else 0.0
        now += max(PROFILE.step_seconds, chunk * PROFILE.prefill_token_seconds)
        now += PROFILE.prefill_pair_seconds * chunk * (done + chunk / 2)
        if left:
            now += PROFILE.step(len(answers), context) - PROFILE.step_seconds
            context, left = context + len(answers), left - 1
            ends = ends if left else [now] * len(answers)
        done += chunk or 1.0
        computed = now if chunk else computed
    return computed, ends


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(10, 20_000), min_size=1, max_size=8), st.integers(1, 60_000))
def test_chunks_beside_answers_take_as_long_as_a_loop_over_their_steps(answers: list[int], prompt: int) -> None:
    worker = DecodeWorker("d", PROFILE, 0.0)
    flights = [make(context, 400) for context in answers]
    for flight in flights:
        worker.join(flight, 0.0)
    worker.submit(make(prompt, 1), 0.0)
    computed = last = 0.0
    while (at := worker.next_event()) < float("inf"):
        ended, first = worker.finish(at)
        computed = at if first else computed
        last = at if ended else last
    expected, ends = run_chunks(answers, prompt)
    assert computed == pytest.approx(expected, rel=0.03)
    assert last == pytest.approx(ends[0], rel=0.03)


def test_short_prompts_share_a_step_and_a_lone_one_takes_a_whole_one() -> None:
    def run(prompts: int) -> float:
        worker = DecodeWorker("d", PROFILE, 0.0)
        for _ in range(prompts):
            worker.submit(make(4, 1), 0.0)
        last = 0.0
        while worker.queued_tokens:
            last = worker.next_event()
            worker.finish(last)
        return last

    assert run(1) == pytest.approx(PROFILE.step_seconds, rel=0.01)
    assert run(20) < 10 * run(1)


def test_workers_that_do_both_take_the_tighter_deadline_first_and_lose_no_work() -> None:
    worker = DecodeWorker("d", PROFILE, 0.0, deadlines=True)
    long, short = make(10_000, 1, due=30.0), make(1000, 1, due=3.0)
    worker.submit(long, 0.0)
    worker.submit(short, 1.0)
    assert worker.finish(worker.next_event())[1] is short
    last = worker.next_event()
    assert worker.finish(last)[1] is long
    whole = 11_000 * PROFILE.prefill_token_seconds + PROFILE.prefill_pair_seconds * (10_000**2 + 1000**2) / 2
    assert last == pytest.approx(whole, rel=0.02)


def test_a_lost_worker_gives_back_what_is_left_to_say() -> None:
    chance = random.Random(1)
    worker = DecodeWorker("d", PROFILE, 0.0)
    flights = [make(chance.randrange(100, 1000), 300) for _ in range(5)]
    whole = [flight.prompt + flight.output for flight in flights]
    for flight in flights:
        worker.join(flight, 0.0)
    lost = worker.clear(1.0)
    assert [flight.prompt + flight.output for flight in lost] == whole
    assert all(1 <= flight.output < 300 for flight in lost)
    assert worker.next_event() == float("inf")
