"""The autoscaling benchmark on made-up requests: what it judges by is right, and the planner beats what is static."""

from __future__ import annotations

from dataclasses import replace

from tandem_sim.profiles import H200, QWEN3_32B_FP8, build_profile
from tandem_sim.shapes import build_ramp
from tandem_sim.synthetic import make_requests
from tandem_sim.workload import D, P

from bench.autoscaling.__main__ import _judge
from bench.autoscaling.runs import Case, build_planner, find_static, find_static_shared, run
from bench.autoscaling.scenario import build_scenario

SCENARIO = build_scenario("made up", make_requests(rate=4.0, seconds=600), build_profile(QWEN3_32B_FP8, H200))
CASE = Case(scenario=SCENARIO, shape=build_ramp(warm=300.0, rise=600.0, hold=600.0), load=1.0, start_up=20.0)


def test_a_ramp_is_attained_with_fewer_gpus_than_a_static_fleet() -> None:
    own, seen = run(CASE, lambda scenario, _: build_planner(scenario))
    name, static = find_static(CASE, 0.96)
    assert name.startswith("static ")
    assert float(static["attainment"]) >= 0.96
    assert float(own["attainment"]) >= 0.95
    assert float(own["gpu_hours"]) < float(static["gpu_hours"])
    assert seen.orders[P][0][1] < max(count for _, count in seen.orders[P])


def test_replicas_that_do_both_attain_a_ramp_with_fewer_gpus_than_a_static_fleet() -> None:
    case = replace(CASE, chunk=2048)
    own, seen = run(case, lambda scenario, _: build_planner(scenario, shared=True))
    assert set(seen.orders) == {D}
    assert float(own["attainment"]) >= 0.96
    _, static = find_static_shared(case, float(own["attainment"]))
    assert float(own["gpu_hours"]) < float(static["gpu_hours"])
    assert own["reversals"] in (0, 1)


def test_needs_grow_with_the_load() -> None:
    small, large = SCENARIO.needed(5000.0, 4.0), SCENARIO.needed(50_000.0, 40.0)
    assert large[P] > small[P]
    assert large[D] >= small[D]


def test_the_verdict_is_against_the_cheapest_that_is_as_good_and_as_steady() -> None:
    def row(policy: str, attainment: float, hours: float, reversals: int) -> dict[str, float | str]:
        return {"policy": policy, "attainment": attainment, "gpu_hours": hours, "reversals": reversals}

    verdict = _judge([
        row("planner", 0.98, 8.0, 0), row("told", 0.98, 7.0, 9), row("told, kept 300 s", 0.99, 8.0, 1),
        row("cheap", 0.9, 5.0, 0),
        row("restless", 0.99, 8.5, 4),
        row("steady", 0.985, 10.0, 1), row("large", 0.999, 20.0, 0),
    ])  # fmt: skip
    assert verdict["as_good_and_steady"] == "steady"
    assert verdict["saved_as_good_and_steady"] == 0.2
    assert verdict["above_0.96"] == "restless"
    assert verdict["of_told"] == 1.143
    assert verdict["of_told_kept"] == 1.0
