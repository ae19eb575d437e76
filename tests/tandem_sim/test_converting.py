"""Decode workers that convert, as the gateway decides: first tokens as of workers that do both, tokens as apart."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import quantiles

import pytest
from tandem_api.names import Role
from tandem_gateway.scheduling import Verdict
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.profiles import WorkerProfile
from tandem_sim.replay import Simulation
from tandem_sim.routing import Router
from tandem_sim.setting import Setting
from tandem_sim.traces import Arrival

STEP = 0.06
SMALL = WorkerProfile(
    name="a small model on a core", source="SmolLM2 on one core of a virtual machine, rounded",
    prefill_token_seconds=1 / 1250, step_seconds=0.026, step_sequence_seconds=0.0005, kv_tokens=100_000,
    chunk_tokens=512, first_token_seconds=0.01,
)  # fmt: skip
CHUNK = int((STEP - SMALL.step_seconds) / SMALL.prefill_token_seconds)
LOOSE = Target(seconds=10.0)


def make_load(rate: float, seed: int) -> list[Arrival]:
    chance, at = random.Random(seed), 0.0
    arrivals: list[Arrival] = []
    for index in range(300):
        arrivals.append(Arrival(at, chance.randint(600, 1200), 64, (), index))
        at += chance.expovariate(rate)
    return arrivals


def measure(rate: float, *, prefills: int, decodes: int, step: float | None = None) -> tuple[float, float, Router]:
    """p90 of first tokens, p99 of token times in the mean of an answer, and the last gateway of three replays."""
    firsts: list[float] = []
    tokens: list[float] = []
    fleet = {Role.PREFILL: prefills, Role.DECODE: decodes} if prefills else {Role.DECODE: decodes}
    setting = Setting(
        prefill=SMALL if prefills else None, decode=replace(SMALL, chunk_tokens=CHUNK if step else 512),
        replicas=fleet, ttft=LOOSE, tpot=LOOSE, deadlines=False, hold_seconds=None, convert_step_seconds=step,
    )  # fmt: skip
    simulations = [Simulation(make_load(rate, seed), setting) for seed in range(3)]
    for simulation in simulations:
        seen = simulation.run()
        firsts += [float(one) for one in seen.ttft]
        tokens += [float(one) for one in seen.token_seconds]
    router = simulations[-1].routing
    assert isinstance(router, Router)
    return quantiles(firsts, n=10)[-1], quantiles(tokens, n=100)[-1], router


@pytest.mark.parametrize("rate", [0.6, 0.9])
def test_first_tokens_as_with_workers_that_do_both_and_answers_as_apart(rate: float) -> None:
    apart, steady, _ = measure(rate, prefills=1, decodes=1)
    first, token, seen = measure(rate, prefills=1, decodes=1, step=STEP)
    both, uneven, _ = measure(rate, prefills=0, decodes=2)
    assert first <= 1.1 * both < apart
    assert token <= 1.25 * steady < uneven
    assert token < STEP
    assert seen.scheduler.conversions[Verdict.CONVERTED] > 20
    assert [endpoint.own.tokens for endpoint in seen.scheduler.endpoints.values()] == [0, 0]


def test_a_target_that_decoding_alone_takes_changes_nothing() -> None:
    apart, _, _ = measure(0.9, prefills=1, decodes=1)
    first, _, seen = measure(0.9, prefills=1, decodes=1, step=0.027)
    assert seen.scheduler.conversions[Verdict.NO_ROOM] > 20
    assert first > 0.7 * apart  # only an idle decode worker computes prompts


def test_two_prefill_and_two_decode_workers_share_them() -> None:
    apart, _, _ = measure(1.9, prefills=2, decodes=2)
    first, token, seen = measure(1.9, prefills=2, decodes=2, step=STEP)
    assert first < 0.75 * apart
    assert token < STEP
    assert seen.scheduler.conversions[Verdict.CONVERTED] > 20
