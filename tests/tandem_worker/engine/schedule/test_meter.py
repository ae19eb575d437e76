from __future__ import annotations

from tandem_worker.engine.schedule.meter import SpeedMeter


def test_pure_decode_steps_and_prefill_shares_are_measured_apart() -> None:
    meter = SpeedMeter()
    meter.record(num_prefill_tokens=0, num_decodes=4, seconds=0.1)
    meter.record(num_prefill_tokens=300, num_decodes=100, seconds=2.0)
    assert meter.decode_step_seconds == 0.1
    assert meter.prefill_tokens_per_second == 200
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
