"""A share of the requests goes to a canary's workers: evenly, by session, and never at the price of an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.launch import CanaryTraffic
from tandem_gateway.scheduling import Outcome, Scheduler
from tandem_gateway.scheduling.canary import MAX_DEBT, Split
from xxhash import xxh3_64_intdigest

from tests.tandem_gateway.scheduling.fleet import D, P, make_demand, make_scheduler, make_worker, serve

CANARY = ["d0-new", "p0-new"]


def fleet() -> Scheduler:
    """Two builds whose blocks are the same, so that nothing but the canary keeps them apart."""
    return make_scheduler(
        *(make_worker(f"d{index}-old") for index in range(3)), *(make_worker(f"p{index}-old", P) for index in range(2)),
        make_worker("d0-new", D), make_worker("p0-new", P),
    )  # fmt: skip


def session(number: int) -> int:
    return xxh3_64_intdigest(f"{number}".encode())


@given(st.lists(st.integers(0, 5), max_size=300), st.floats(0.1, 99.9))
def test_the_share_is_right_within_a_few_requests_whatever_the_sessions_are(seeds: list[int], percent: float) -> None:
    split = Split(percent)
    sent = 0.0
    for count, seed in enumerate(seeds, 1):
        sent += split.decide(session(seed) if seed else 0)
        assert abs(sent - count * percent / 100) <= MAX_DEBT + 1


@pytest.mark.parametrize(("percent", "sent"), [(0, 0), (5, 5), (25, 25), (50, 50), (100, 100)])
def test_without_sessions_it_is_exact_and_even(percent: float, sent: int) -> None:
    split = Split(percent)
    decided = [split.decide(0) for _ in range(100)]
    assert sum(decided) == sent
    for start in range(0, 100, 20):
        assert abs(sum(decided[start : start + 20]) - sent / 5) <= 1


@pytest.mark.parametrize("percent", [5, 20, 50])
def test_sessions_stay_on_their_side_and_move_one_way_as_the_share_grows(percent: float) -> None:
    split, more = Split(percent), Split(percent + 10)
    numbers = [number for _ in range(5) for number in range(400)]
    sides = [split.decide(session(number)) for number in numbers]
    usual = sides[:400]
    assert sum(side == usual[number] for side, number in zip(sides, numbers, strict=True)) >= 0.95 * len(sides)
    grown = [more.decide(session(number)) for number in range(400)]
    back = sum(before and not after for before, after in zip(usual, grown, strict=True))
    assert back <= 0.03 * 400


def test_a_pair_is_of_one_side() -> None:
    scheduler = fleet()
    scheduler.apply_canary(CanaryTraffic(percent=30, workers=CANARY))
    canary = 0
    for number in range(200):
        served = serve(scheduler, make_demand(affinity=session(number)))
        assert len({name in CANARY for name in served}) == 1, served
        canary += served[0] in CANARY
    assert abs(canary - 60) <= MAX_DEBT + 1
    assert scheduler.canary_requests == {(True, False): canary, (False, False): 200 - canary}
    scheduler.apply_canary(None)
    assert any(len({name in CANARY for name in serve(scheduler, make_demand(affinity=n << 58))}) == 2 for n in range(9))


def test_a_request_keeps_its_side_over_its_attempts() -> None:
    scheduler = fleet()
    scheduler.apply_canary(CanaryTraffic(percent=50, workers=[*CANARY, "d1-new"]))
    scheduler.apply_workers([endpoint.worker for endpoint in scheduler.endpoints.values()] + [make_worker("d1-new")])
    for number in range(40):
        demand = make_demand(affinity=session(number))
        first = scheduler.choose(demand, 0.0)
        assert first is not None
        again = scheduler.choose(demand, 0.0, {first.decode.worker.name})
        assert again is not None
        assert first.decode.worker.name.endswith("new") == again.decode.worker.name.endswith("new")


@pytest.mark.parametrize("gone", ["left", "out"])
@pytest.mark.parametrize("side", ["old", "new"])
def test_where_one_side_cannot_serve_the_other_serves_all_and_it_is_counted(side: str, gone: str) -> None:
    scheduler = fleet()
    scheduler.apply_canary(CanaryTraffic(percent=50, workers=CANARY))
    workers = [endpoint.worker for endpoint in scheduler.endpoints.values()]
    if gone == "left":
        scheduler.apply_workers([worker for worker in workers if not worker.name.endswith(side)])
    else:
        for endpoint in scheduler.endpoints.values():
            if endpoint.worker.name.endswith(side):
                scheduler.report(endpoint, Outcome.REFUSED, 0.0)
    for number in range(100):
        served = serve(scheduler, make_demand(affinity=session(number)))
        assert not any(name.endswith(side) for name in served)
    moved = scheduler.canary_requests[side == "old", True]
    assert abs(moved - 50) <= MAX_DEBT + 1
    assert sum(scheduler.canary_requests.values()) == 100
    if gone == "left":
        scheduler.apply_workers(workers)
    assert {serve(scheduler, make_demand(affinity=session(n)), 1.0)[0][-3:] for n in range(40)} == {"old", "new"}


def test_workers_change_sides_with_their_load_and_their_health() -> None:
    scheduler = fleet()
    endpoint, prefill = scheduler.endpoints["d0-new"], scheduler.endpoints["p0-new"]
    endpoint.charge(500, 0)
    scheduler.report(prefill, Outcome.REFUSED, 0.0)
    for traffic in (CanaryTraffic(percent=10, workers=CANARY), None):
        scheduler.apply_canary(traffic)
        assert (endpoint.load, endpoint.state, prefill.state) == (500, "available", "ejected")
        assert endpoint.pool is not None
        assert endpoint.pool.load == sum(member.load for member in endpoint.pool.members.values())
    scheduler.choose(make_demand(), 1.0)
    assert prefill.state == "half-open"


def test_the_same_word_again_changes_nothing() -> None:
    scheduler = fleet()
    pools = []
    for _ in range(3):
        scheduler.apply_canary(CanaryTraffic(percent=10, workers=CANARY))
        pools.append(scheduler.endpoints["d0-new"].pool)
        serve(scheduler, make_demand(affinity=0))
    assert pools[0] is pools[1] is pools[2]
