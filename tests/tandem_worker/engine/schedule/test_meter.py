from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.schedule.meter import SpeedMeter, WorkMeter


def test_pure_decode_steps_and_prefill_shares_are_measured_apart() -> None:
    meter = SpeedMeter()
    meter.record(num_prefill_tokens=0, num_decodes=4, seconds=0.1)
    meter.record(num_prefill_tokens=300, num_decodes=100, seconds=2.0)
    assert meter.decode_step_seconds == 0.1
    assert meter.prefill_tokens_per_second == 200
    assert meter.mixed_step_seconds == 2.0
    meter.record(num_prefill_tokens=300, num_decodes=0, seconds=9.0)
    assert meter.mixed_step_seconds == 2.0, "nobody waited for a token"
    meter.record(num_prefill_tokens=0, num_decodes=4, seconds=0.2)
    assert 0.1 < meter.decode_step_seconds < 0.2


def test_small_chunks_and_empty_steps_are_no_measurement() -> None:
    meter = SpeedMeter()
    meter.record(num_prefill_tokens=8, num_decodes=0, seconds=1.0)
    meter.record(num_prefill_tokens=0, num_decodes=0, seconds=1.0)
    assert meter.prefill_tokens_per_second is meter.decode_step_seconds is None


def test_the_step_size_follows_the_measured_rate() -> None:
    meter = SpeedMeter()
    assert meter.plan_step_tokens(None) is None
    assert meter.plan_step_tokens(0.5) == 256
    meter.record(num_prefill_tokens=1000, num_decodes=0, seconds=1.0)
    assert meter.plan_step_tokens(0.5) == 500
    meter.record(num_prefill_tokens=40, num_decodes=0, seconds=400.0)
    assert meter.plan_step_tokens(0.5) > 470  # 40 tokens say little
    for _ in range(200):
        meter.record(num_prefill_tokens=40, num_decodes=0, seconds=400.0)
    assert meter.plan_step_tokens(0.5) == 64


def test_a_large_chunk_corrects_what_small_ones_beside_decodes_have_left() -> None:
    meter = SpeedMeter()
    for _ in range(100):
        meter.record(num_prefill_tokens=64, num_decodes=31, seconds=0.2)
    assert meter.plan_step_tokens(1.0) < 500
    meter.record(num_prefill_tokens=1000, num_decodes=0, seconds=1.0)
    assert meter.plan_step_tokens(1.0) > 750


@pytest.mark.parametrize("most", [1, 4, 9])
def test_the_time_of_a_token_is_that_of_steps_that_make_one_and_of_those_that_make_many(most: int) -> None:
    """Whoever plans by it is within a tenth, at any time of a load that is a mean of steps that differ by a factor."""
    generator, meter = random.Random(most), SpeedMeter()
    steps = [(0.01 * generator.uniform(0.95, 1.05) * (1 + 0.05 * saved), saved)
             for saved in (generator.choice((0, 0, most - 1, most // 2)) for _ in range(3000))]  # fmt: skip
    truth = sum(seconds for seconds, _ in steps) / sum(1 + saved for _, saved in steps)
    off: list[float] = []
    for number, (seconds, saved) in enumerate(steps):
        for prefill in (0, 40):
            meter.record(num_prefill_tokens=prefill, num_decodes=4, seconds=seconds, num_guesses=4 * most,
                         num_saved=4 * saved)  # fmt: skip
        if number >= 300:
            off += [abs(time.seconds / truth - 1) for time in (meter.decode_token, meter.mixed_token) if time.seconds]
    assert sum(error < 0.1 for error in off) > 0.9 * len(off)
    assert sum(off) / len(off) < 0.05


def test_chunks_are_sized_by_what_decodes_would_take_without_guesses() -> None:
    """A step that checks guesses lasts longer and makes more tokens: a prompt beside it loses nothing by that."""
    plain, guessing = SpeedMeter(), SpeedMeter()
    for _ in range(50):
        plain.record(num_prefill_tokens=0, num_decodes=4, seconds=0.02)
        guessing.record(
            num_prefill_tokens=0, num_decodes=4, seconds=0.04, num_guesses=20, num_saved=15, plain_seconds=0.02
        )
        plain.record(num_prefill_tokens=100, num_decodes=4, seconds=0.03)
        guessing.record(
            num_prefill_tokens=100, num_decodes=4, seconds=0.034, num_guesses=4, num_saved=4, plain_seconds=0.03
        )
    assert guessing.decode_step_seconds == pytest.approx(0.04)
    assert guessing.plain_step_seconds == pytest.approx(0.02)
    assert guessing.plan_chunk_tokens(0.05, True) == plain.plan_chunk_tokens(0.05, True) == pytest.approx(300, abs=1)


def record_apart(meter: WorkMeter, steps: list[tuple[float, float, int, int]], now: float = 0.0) -> float:
    """Steps of (pause before, seconds, prompt tokens, decodes), one after another. Returns when the last one ended."""
    for pause, seconds, tokens, decodes in steps:
        began = now + pause
        now = began + seconds
        meter.record(began=began, ended=now, num_prefill_tokens=tokens, num_decodes=decodes)
    return now


def test_idle_time_neither_lowers_nor_ages_the_velocity() -> None:
    busy, rested = WorkMeter(), WorkMeter()
    record_apart(busy, [(0.0, 0.5, 1000, 0)] * 4)
    record_apart(rested, [(3600.0, 0.5, 1000, 0)] * 4)
    assert busy.velocity == pytest.approx(2000)
    assert rested.velocity == pytest.approx(2000)
    assert rested.busy_seconds == pytest.approx(2.0)


def test_no_velocity_before_a_second_of_prompts() -> None:
    meter = WorkMeter()
    record_apart(meter, [(0.0, 30.0, 0, 8), (0.0, 0.9, 900, 0)])
    assert meter.velocity is None
    assert meter.busy_seconds == pytest.approx(30.9)
    assert meter.prefill_seconds == pytest.approx(0.9)


def test_the_velocity_is_a_mean_over_the_last_minute_of_prompts() -> None:
    """One slow step says little among many, and a change of speed is known after a minute."""
    meter = WorkMeter()
    ended = record_apart(meter, [(0.0, 0.5, 1000, 0)] * 240 + [(0.0, 0.5, 100, 0)])
    assert meter.velocity == pytest.approx(2000, rel=0.02)
    record_apart(meter, [(0.0, 0.5, 500, 0)] * 120, ended)
    assert 1000 < (meter.velocity or 0) < 1500


def test_a_mixed_step_counts_by_its_share_of_tokens() -> None:
    meter = WorkMeter()
    record_apart(meter, [(0.0, 4.0, 300, 100)])
    assert (meter.busy_seconds, meter.prefill_seconds, meter.velocity) == (4.0, 3.0, 100)


def test_time_that_two_steps_share_counts_once() -> None:
    """A step is launched before the one before it has ended."""
    meter = WorkMeter()
    meter.record(began=0.0, ended=2.0, num_prefill_tokens=100, num_decodes=0)
    meter.record(began=1.0, ended=3.0, num_prefill_tokens=50, num_decodes=0)
    assert (meter.busy_seconds, meter.prefill_seconds, meter.prefill_tokens) == (3.0, 3.0, 150)


def test_what_failed_took_its_time_and_computed_nothing() -> None:
    meter = WorkMeter()
    record_apart(meter, [(0.0, 1.0, 100, 0), (0.0, 9.0, 0, 0)])
    assert (meter.busy_seconds, meter.prefill_tokens, meter.velocity) == (10.0, 100, 100)


def test_warming_up_is_forgotten() -> None:
    meter = WorkMeter()
    ended = record_apart(meter, [(0.0, 60.0, 2, 0)])
    meter.reset()
    assert meter.velocity is None
    meter.record(began=ended, ended=ended + 1, num_prefill_tokens=700, num_decodes=0)
    assert (meter.busy_seconds, meter.prefill_tokens, meter.velocity) == (1.0, 700, 700)


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(0.001, 70), st.integers(0, 4096), st.integers(0, 256)), max_size=40
    ),
    st.floats(10, 1e6),
)
def test_totals_only_grow_and_a_constant_speed_is_found(
    steps: list[tuple[float, float, int, int]], speed: float
) -> None:
    meter = WorkMeter()
    now = seen = 0.0
    for pause, seconds, tokens, decodes in steps:
        took = (tokens + decodes) / speed if tokens else seconds
        began, now = now + pause, now + pause + took
        meter.record(began=began, ended=now, num_prefill_tokens=tokens, num_decodes=decodes)
        assert meter.busy_seconds >= seen
        seen = meter.busy_seconds
        assert 0 <= meter.prefill_seconds <= meter.busy_seconds + 1e-6
        assert meter.busy_seconds <= now + 1e-6
    assert meter.prefill_tokens == sum(tokens for _, _, tokens, _ in steps)
    assert meter.velocity is None or meter.velocity == pytest.approx(speed, rel=1e-3)


def test_prompts_fit_into_what_decoding_leaves_of_a_step() -> None:
    meter = SpeedMeter()
    assert meter.plan_chunk_tokens(0.06, True) == 64  # nothing is known
    meter.record(num_prefill_tokens=0, num_decodes=2, seconds=0.03)
    meter.record(num_prefill_tokens=50, num_decodes=2, seconds=0.08)  # 50 tokens made it 0.05 s longer
    assert meter.plan_chunk_tokens(0.06, True) == 30
    assert meter.plan_chunk_tokens(0.06, False) == 60
    assert meter.plan_chunk_tokens(0.02, True) == 0


@given(st.lists(st.tuples(st.integers(16, 300), st.integers(0, 8)), min_size=30, max_size=60), st.floats(100, 5000))
def test_a_planned_chunk_takes_as_long_as_planned_whatever_chunks_were_before(
    steps: list[tuple[int, int]], rate: float
) -> None:
    meter = SpeedMeter()
    meter.record(num_prefill_tokens=0, num_decodes=1, seconds=0.03)
    for tokens, decodes in steps:
        meter.record(num_prefill_tokens=tokens, num_decodes=decodes, seconds=tokens / rate + (0.03 if decodes else 0))
    for decoding, left in ((True, 0.07), (False, 0.1)):
        assert meter.plan_chunk_tokens(0.1, decoding) == pytest.approx(rate * left, abs=1.01)


def test_one_slow_step_does_not_stop_prompts_for_good() -> None:
    meter = SpeedMeter()
    for _ in range(30):
        meter.record(num_prefill_tokens=32, num_decodes=0, seconds=0.032)
    meter.record(num_prefill_tokens=32, num_decodes=0, seconds=5.0)
    for _ in range(200):
        meter.record(num_prefill_tokens=16, num_decodes=0, seconds=0.016)
    assert meter.plan_chunk_tokens(0.1, False) > 75
