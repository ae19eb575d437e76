"""Whole replays: everything ends, more replicas are never worse, failures cost time and no request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Snapshot, Target
from tandem_sim.fleet import StartUp
from tandem_sim.profiles import GPUS, H200, MODELS, QWEN3_8B, build_profile
from tandem_sim.replay import Simulation
from tandem_sim.result import Replay, count_reversals
from tandem_sim.setting import Failure, Setting
from tandem_sim.synthetic import make_conversations

from tests.effort import count_instructions

PROFILE = build_profile(QWEN3_8B, H200)
SETTING = Setting(
    prefill=PROFILE,
    decode=PROFILE,
    replicas={Role.PREFILL: 2, Role.DECODE: 1},
    ttft=Target(seconds=2.0, seconds_per_token=1e-4),
    tpot=Target(seconds=0.03),
)
REQUESTS = make_conversations(sessions=300, seconds=300)


def run(setting: Setting = SETTING, policy: object = None) -> Replay:
    return Simulation(REQUESTS, setting, policy).run()  # type: ignore[arg-type]


def test_every_request_ends_after_its_prompt_could_be_computed() -> None:
    seen = run()
    assert len(seen.at) == len(REQUESTS)
    for at, ttft, prompt, hit in zip(seen.at, seen.ttft, seen.prompt, seen.hit, strict=True):
        assert ttft >= PROFILE.prefill(int(prompt - hit), int(hit)) - 1e-6, at
    assert (seen.token_seconds[seen.token_seconds > 0] >= PROFILE.step_seconds).all()
    assert seen.hit_ratio > 0.2


def test_it_is_the_same_every_time() -> None:
    one, other = run(), run()
    assert one.ttft.tolist() == other.ttft.tolist()
    assert one.gpu_hours == other.gpu_hours


def test_more_workers_are_faster() -> None:
    few = run(replace(SETTING, replicas={Role.PREFILL: 1, Role.DECODE: 1}))
    many = run(replace(SETTING, replicas={Role.PREFILL: 6, Role.DECODE: 2}))
    assert many.attainment >= few.attainment
    assert many.ttft.mean() < few.ttft.mean()
    assert many.gpu_hours > few.gpu_hours


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_lost_worker_costs_time_and_no_request(role: Role) -> None:
    setting = replace(SETTING, replicas={Role.PREFILL: 2, Role.DECODE: 2})
    seen = run(replace(setting, failures=(Failure(at=60.0, role=role), Failure(at=90.0, role=role, index=1))))
    assert len(seen.at) == len(REQUESTS)
    assert seen.gpu_hours == pytest.approx(run(setting).gpu_hours, rel=0.1)


def test_workers_that_do_both_serve_all() -> None:
    seen = run(replace(SETTING, prefill=None, replicas={Role.DECODE: 3}))
    assert len(seen.at) == len(REQUESTS)
    assert seen.attainment > 0.5


class Steps:
    """Up, then down."""

    period = 10.0

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def decide(self, now: float, snapshot: Snapshot) -> Mapping[Role, int]:
        self.seen.append(snapshot)
        return {Role.PREFILL: 5 if 50 <= now < 200 else 2}


def test_replicas_warm_up_drain_and_are_paid_for() -> None:
    policy = Steps()
    seen = run(replace(SETTING, start_up=StartUp(seconds=40.0, spread=0.0)), policy)
    at = {round(snapshot.at): snapshot.roles[Role.PREFILL] for snapshot in policy.seen}
    assert (at[60].replicas, at[60].ready, at[60].warming) == (5, 2, 3)
    assert (at[100].replicas, at[100].ready, at[100].warming) == (5, 5, 0)
    assert at[100].starts == (40.0,) * 5  # those of the beginning have started before
    assert at[210].replicas == at[210].ready == 2
    still = run().gpu_hours
    assert seen.gpu_hours == pytest.approx(still + 3 * 150 / 3600, abs=0.02)
    assert [count for _, count in seen.orders[Role.PREFILL]] == [2, 5, 2]


def test_telemetry_counts_what_passes() -> None:
    policy = Steps()
    seen = run(policy=policy)
    last = policy.seen[-1]
    assert last.counters is not None
    arrived = seen.at <= last.at
    computed = seen.at + seen.ttft <= last.at
    assert last.counters.requests == arrived.sum()
    assert last.counters.prompt_tokens == seen.prompt[arrived].sum()
    assert last.counters.computed_prompt_tokens == pytest.approx(seen.prompt[computed].sum(), rel=0.01)
    assert last.counters.computed_tokens == pytest.approx((seen.prompt - seen.hit)[computed].sum(), rel=0.01)
    velocity = policy.seen[10].roles[Role.PREFILL].tokens_per_second
    assert velocity is not None
    work = sum(PROFILE.prefill(int(p - h), int(h)) for p, h in zip(seen.prompt[:200], seen.hit[:200], strict=True))
    assert velocity == pytest.approx((seen.prompt - seen.hit)[:200].sum() / work, rel=0.3)
    step = policy.seen[10].roles[Role.DECODE].step_seconds
    assert step is not None
    assert PROFILE.step_seconds < step < 0.1


def test_reversals_are_changes_of_direction() -> None:
    assert count_reversals([(0, 2), (10, 3), (20, 4), (30, 3), (40, 5)], 0, 100) == 2
    assert count_reversals([(0, 2), (10, 3), (20, 4), (30, 3), (40, 5)], 15, 35) == 1
    assert count_reversals([(0, 2)], 0, 100) == 0


def test_the_profiles_are_within_what_the_hardware_allows() -> None:
    for gpu in GPUS.values():
        for model in MODELS.values():
            profile = build_profile(model, gpu)
            assert profile.source
            assert 2 * model.parameters / profile.prefill_token_seconds < gpu.flops
            assert model.parameters * model.bytes_per_parameter / profile.step_seconds < gpu.bandwidth
            assert profile.kv_tokens * profile.kv_bytes < gpu.memory


def test_a_replay_is_fast() -> None:
    """A sixth of a millisecond of one core per request: the 12,031 of the conversation trace in 2 s."""
    assert count_instructions(run) < 15_000 * len(REQUESTS)
