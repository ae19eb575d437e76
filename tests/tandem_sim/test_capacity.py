"""The search for the smallest fleet, and the verdict of the comparison."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_operator.autoscale.plan.contract import Target
from tandem_sim.capacity import CapacityError, Figures, Fleet, Trial, Trials, find_smallest, find_split
from tandem_sim.comparison import Rate, find_goodput, judge
from tandem_sim.profiles import H200, QWEN3_8B, build_profile
from tandem_sim.synthetic import make_requests
from tandem_sim.workload import build_workload


def make_trial(attainment: float) -> Trial:
    seen = Figures(
        requests=1, attainment=attainment, ttft_p50=1, ttft_p90=1, ttft_p99=1, token_p50=1, token_p90=1, token_p99=1,
        gpu_hours=1, output_tokens=1, hit_ratio=0,
    )  # fmt: skip
    return Trial(fleet=Fleet(1, 1), seen=seen)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 20))
def test_the_smallest_that_attains_is_found_with_few_replays(enough: int, start: int, least: int) -> None:
    tried: set[int] = set()

    def best(count: int) -> Trial:
        tried.add(count)
        return make_trial(1.0 if count >= enough else 0.5)

    found, _ = find_smallest(best, 0.9, least=least, start=start, most=300)
    assert found == max(enough, least)
    assert all(least <= count <= 300 for count in tried)
    assert len(tried) <= 32


def test_where_none_attains_that_is_said() -> None:
    with pytest.raises(CapacityError, match=r"10 replicas attain 40.0% .* 90.0% are wanted"):
        find_smallest(lambda _: make_trial(0.4), 0.9, least=1, start=2, most=10)


def test_the_best_split_is_no_worse_than_any_other() -> None:
    target = Target(percentile=0.95, seconds=1.0)
    workload = build_workload(
        "made up", make_requests(rate=40.0, seconds=20.0, prompt=4000.0), build_profile(QWEN3_8B, H200),
        ttft=target, tpot=Target(seconds=0.02),
    )  # fmt: skip
    trials = Trials(workload, list(workload.recording))
    best = max((trials.run(Fleet(count, 10 - count)) for count in range(1, 10)), key=trials.rank)
    for near in (0.1, 0.5, 0.9):
        found = find_split(Trials(workload, list(workload.recording)), 10, near)
        assert trials.rank(found) >= trials.rank(best)


def test_the_rate_that_is_served_lies_between_those_compared() -> None:
    assert find_goodput([(1, 1.0), (2, 0.98), (3, 0.9)], 0.96) == pytest.approx(2.25)
    assert find_goodput([(1, 0.95), (2, 0.98), (3, 0.97)], 0.96) == 3  # a dip by chance
    assert find_goodput([(1, 0.5)], 0.96) == 0.0


@pytest.mark.parametrize(
    ("apart", "convertible", "both", "better"),
    [
        (1.0, 1.0, 0.5, "disaggregated"),
        (0.5, 1.0, 0.5, "disaggregated"),
        (0.5, 0.5, 1.0, "aggregated"),
        (1.0, 1.0, 1.0, "either"),
    ],
)
def test_the_verdict_names_which_serves_more(apart: float, convertible: float, both: float, better: str) -> None:
    rates = [
        Rate(
            load=load,
            requests_per_second=2.0 * load,
            **{
                name: make_trial(value if load > 1 else 1.0)
                for name, value in (("apart", apart), ("convertible", convertible), ("both", both))
            },
        )
        for load in (1, 2)
    ]
    assert judge(rates, 0.9)["better"] == better


@pytest.mark.parametrize("seed", [1, 2])
def test_the_planner_is_economical_under_steady_load(seed: int) -> None:
    """Forty minutes of 3 requests/s of 10,000 tokens."""
    recording = make_requests(rate=3.0, seconds=2400.0, prompt=10_000.0, seed=seed)
    workload = build_workload(
        "made up", recording, build_profile(QWEN3_8B, H200),
        ttft=Target(percentile=0.96, seconds=2.0, seconds_per_token=1e-4), tpot=Target(percentile=0.96, seconds=0.03),
    )  # fmt: skip
    figures, replay = Trials(workload, recording).run_planner(45.0)
    rate, seconds = len(recording) / recording[-1].at, recording[-1].at
    fixed = sum(workload.needed(rate * workload.prompts.uncached, rate).values()) * seconds / 3600
    assert figures.attainment >= 0.96
    assert figures.gpu_hours <= 1.3 * fixed
    assert all(replay.reversals([(begin, begin + 600)]) <= 1 for begin in (300.0, 900.0, 1500.0))
