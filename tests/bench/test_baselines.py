"""Policies in the harness: each decides from the same snapshots, and another harness can drive the planner."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tandem_api.names import Role
from tandem_operator.autoscale.plan.adapter import Autoscaler
from tandem_operator.autoscale.plan.contract import Counters, RoleSpec, RoleState, ScalingSpec, Snapshot, Target
from tandem_sim.fleet import StartUp
from tandem_sim.profiles import H200, QWEN3_8B, build_profile
from tandem_sim.replay import Simulation
from tandem_sim.setting import Setting
from tandem_sim.shapes import Shape, play
from tandem_sim.synthetic import make_conversations

from bench.autoscaling.baselines import (
    Ceiling,
    SlaPlanner,
    TokenVelocity,
    Told,
    Velocity,
    Window,
    build_hpa,
    build_keda,
)

P, D = Role.PREFILL, Role.DECODE
VELOCITY = Velocity(prefill=1e4, decode=1000.0, sequences=50.0, kv_share=0.4)


def look(at: float, *, requests: float = 2.0, busy: float = 0.5, queued: int = 0, used: float = 0.2) -> Snapshot:
    """So many requests per second of 4,000 prompt and 300 output tokens so far; 4 prefill and 2 decode replicas."""
    count = int(at * requests)
    return Snapshot(
        at=at,
        roles={
            P: RoleState(replicas=4, ready=4, busy=busy, queued_requests=queued, tokens_per_second=1e4),
            D: RoleState(
                replicas=2, ready=2, kv_tokens_used=int(used * 1e6), kv_tokens_total=1_000_000, step_seconds=0.02,
                running_requests=60,
            ),
        },
        counters=Counters(
            requests=count, prompt_tokens=count * 4000, prompt_squares=count * 2 * 4000.0**2,
            computed_prompt_tokens=count * 4000, computed_tokens=count * 4000, finished=count,
            output_tokens=count * 300,
        ),
    )  # fmt: skip


@pytest.mark.parametrize(("busy", "wanted"), [(0.5, 4), (0.53, 4), (0.75, 6), (1.0, 8)])
def test_an_hpa_keeps_the_metric_at_its_target(busy: float, wanted: int) -> None:
    assert build_hpa(VELOCITY, 0.5).decide(15.0, look(15.0, busy=busy))[P] == wanted


def test_an_hpa_comes_down_after_its_window() -> None:
    hpa = build_hpa(VELOCITY, 0.5)
    assert hpa.decide(15.0, look(15.0, busy=0.5))[P] == 4
    assert hpa.decide(30.0, look(30.0, busy=0.1))[P] == 4
    assert hpa.decide(330.0, look(330.0, busy=0.1))[P] == 1


def test_queue_length_sets_replicas() -> None:
    assert build_keda(VELOCITY, 2.0, 0.6).decide(15.0, look(15.0, queued=12))[P] == 6
    assert build_keda(VELOCITY, 2.0, 0.6).decide(15.0, look(15.0, queued=12))[D] == 2


def test_demand_over_velocity_sets_replicas() -> None:
    policy = TokenVelocity(VELOCITY, headroom=1.0)
    policy.decide(5.0, look(5.0, requests=10.0))
    assert policy.decide(10.0, look(10.0, requests=10.0)) == {P: 4, D: 3}
    assert SlaPlanner(VELOCITY, interval=60.0, utilization=0.8).decide(60.0, look(60.0, requests=10.0)) == {P: 5, D: 3}


def test_references_do_as_they_are_told() -> None:
    assert Told(lambda now: {P: int(now)}).decide(7.0, look(7.0)) == {P: 7}
    patient = Told(lambda now: {P: 100 - int(now)}, patience=30.0)
    assert [patient.decide(at, look(at))[P] for at in (10.0, 35.0, 45.0)] == [90, 90, 65]
    ceiling = Ceiling(100.0, {P: 40})
    assert ceiling.decide(104.0, look(104.0)) == {}
    assert ceiling.decide(105.0, look(105.0)) == {P: 40}


def test_a_window_keeps_the_largest() -> None:
    window = Window(10.0)
    assert [window.apply(at, count) for at, count in ((0.0, 5), (5.0, 2), (9.0, 3), (11.0, 1))] == [5, 5, 5, 3]


SPEC = ScalingSpec(
    roles={P: RoleSpec(max=40), D: RoleSpec(max=40)},
    ttft=Target(percentile=0.95, seconds=2.0, seconds_per_token=1e-4),
    tpot=Target(seconds=0.03),
)


def test_any_loop_can_drive_the_planner() -> None:
    """The adapter's contract, without the simulator: call `decide` every `period`, set what it says."""
    scaler = Autoscaler(SPEC)
    wanted = {P: 4, D: 2}
    now = 0.0
    while now < 300:
        now += scaler.period
        wanted.update(scaler.decide(now, look(now, requests=20.0)))
    assert scaler.last is not None
    assert not scaler.last.held
    assert wanted[P] >= 8  # 80,000 tokens per second at 10,000 each
    assert scaler.decide(now + 100, look(now)) == {P: 4, D: 2}
    assert "telemetry is 100 s old" in scaler.last.sentence
    assert scaler.decide(now + 100, None) == {}


def test_in_the_simulator_it_follows_a_jump_and_comes_back() -> None:
    profile = build_profile(QWEN3_8B, H200)
    shape = Shape(points=((0.0, 1.0), (200.0, 1.0), (210.0, 5.0), (400.0, 5.0), (410.0, 1.0), (900.0, 1.0)))
    arrivals = play(make_conversations(sessions=1000, seconds=600), shape, 0.8)
    setting = Setting(
        prefill=profile, decode=profile, replicas={P: 2, D: 1}, start_up=StartUp(seconds=30.0),
        ttft=Target(seconds=0.5, seconds_per_token=1e-4), tpot=SPEC.tpot,
    )  # fmt: skip
    scaler = Autoscaler(replace(SPEC, ttft=setting.ttft))
    own = Simulation(arrivals, setting, scaler).run()
    still = Simulation(arrivals, setting).run()
    assert own.attainment > still.attainment + 0.1
    counts = [count for _, count in own.orders[P]]
    assert max(counts) >= 4
    assert counts[-1] <= max(counts) // 2
