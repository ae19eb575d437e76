"""What calibration computes from measured times; `python -m bench.autoscaling.calibrate` measures real workers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem_sim.profiles import WorkerProfile

from bench.autoscaling.calibrate import BATCHES, PROMPTS, TOKENS, Measured, fit_profile, make_load, simulate, slow_down
from bench.autoscaling.live import Stream, measure_step

TRUE = WorkerProfile(
    name="true", source="a test", prefill_seconds=0.01, prefill_token_seconds=1e-3, prefill_pair_seconds=1e-6,
    step_seconds=0.012, step_sequence_seconds=0.002, step_context_seconds=1e-6, kv_tokens=10_000,
)  # fmt: skip


def test_a_profile_is_found_again_from_what_it_says() -> None:
    services = {tokens: TRUE.prefill(tokens, 0) for tokens in PROMPTS}
    steps = {(prompt, count): TRUE.step(count, count * (prompt + TOKENS / 2)) for prompt, count in BATCHES}
    found = fit_profile(services, steps, TRUE.kv_tokens, first_token=0.003)
    for tokens, seconds in services.items():
        assert found.prefill(tokens, 0) == pytest.approx(seconds, rel=1e-6)
    assert found.step(4, 900) == pytest.approx(TRUE.step(4, 900), rel=1e-6)
    assert found.first_token_seconds == 0.003


def test_no_coefficient_is_negative() -> None:
    falling = {tokens: 1.0 / tokens for tokens in PROMPTS}
    found = fit_profile(falling, dict.fromkeys(BATCHES, 0.01), 1000, first_token=-1.0)
    assert min(found.prefill_seconds, found.prefill_token_seconds, found.prefill_pair_seconds) >= 0
    assert found.step(1, 100) == pytest.approx(0.01, rel=0.01)
    assert found.first_token_seconds == 0.0


def test_steps_are_counted_while_all_streams_run() -> None:
    one = Stream(0.0, 101, tuple(1.0 + number / 100 for number in range(101)))
    other = Stream(0.0, 51, tuple(1.5 + number / 50 for number in range(51)))
    assert one.first == 1.0
    assert one.token_seconds == pytest.approx(0.01)
    assert measure_step([one, one]) == pytest.approx(0.01, rel=0.03)
    with pytest.raises(RuntimeError, match="did not overlap"):
        measure_step([one, replace(other, events=tuple(at + 5 for at in other.events))])


def test_tokens_without_text_of_their_own_count() -> None:
    assert Stream(0.0, 100, tuple(float(number) for number in range(50))).count(-1.0, 24.0) == pytest.approx(50)


def test_workers_that_share_a_machine_are_slower() -> None:
    alone = Measured(profile=TRUE, services={}, steps={}, prefill_beside=1.0, decode_beside=1.0)
    beside = replace(alone, prefill_beside=1.3, decode_beside=1.5)
    load = make_load(TRUE, 0.5, 30.0)
    quick, slow = simulate(alone, load), simulate(beside, load)
    assert all(slow[name] > quick[name] for name in quick)
    assert slow_down(TRUE, 2.0).prefill(100, 0) == pytest.approx(2 * TRUE.prefill(100, 0))
    assert slow_down(TRUE, 2.0).kv_tokens == TRUE.kv_tokens
