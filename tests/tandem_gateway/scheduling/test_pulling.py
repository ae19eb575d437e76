"""Who is named to have a part of a prompt, and when it is brought from there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api.names import Role
from tandem_gateway.scheduling import Scheduler, describe_choice, picker
from tandem_gateway.scheduling.pulling import NOTHING_COMES, weigh_pulls

from tests.tandem_gateway.scheduling.fleet import (
    CHAIN,
    D,
    P,
    ask,
    make_chain,
    make_demand,
    make_endpoint,
    make_scheduler,
    make_worker,
    queue_prompt,
    serve,
)


def fleet(*names: str, rate: float | None = 20_000.0) -> Scheduler:
    workers = [make_worker(name, P if name[0] == "p" else D, kv_address=f"{name}:7000") for name in names]
    scheduler = make_scheduler(*workers)
    for name in names:
        tell(scheduler, name, rate)
    return scheduler


def tell(scheduler: Scheduler, name: str, rate: float | None, speed: float = 2000.0) -> None:
    endpoint = scheduler.endpoints[name]
    scheduler.observe(endpoint, 0.0, queued_tokens=0, pull_rate=rate)
    endpoint.speed.value = speed


def test_a_hot_session_spills_with_its_cache() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    (other,) = {"d1", "d2"} - {warm}
    queue_prompt(scheduler, warm, 8000)
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.source) == (other, scheduler.endpoints[warm])
    assert (choice.pulled_tokens, choice.uncached_tokens, choice.known_tokens) == (4096, 104, 4096)
    told = describe_choice(choice)
    assert (told["source"], told["pulledTokens"]) == (warm, 4096)


@pytest.mark.parametrize("speed", [0.0, 2000.0])
def test_nobody_is_named_to_who_gets_nothing_of_others(speed: float) -> None:
    """Nor by a gateway that has just started: what is brought teaches it no worker's speed."""
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    (other,) = {"d1", "d2"} - {warm}
    queue_prompt(scheduler, warm, 50_000)
    tell(scheduler, other, NOTHING_COMES, speed)
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.source, choice.uncached_tokens) == (other, None, 4200)


def test_who_has_it_and_nothing_to_do_keeps_it() -> None:
    scheduler = fleet("d1", "d2", "d3")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.source, choice.pulled_tokens) == (warm, None, 0)


@pytest.mark.parametrize(
    ("rate", "named"),
    [(None, False), (0.0, True), (20_000.0, True), (2_100.0, True), (1_900.0, False), (10.0, False)],
)
def test_nobody_is_named_where_computing_is_as_fast(rate: float | None, named: bool) -> None:
    scheduler = fleet("d1", "d2", rate=rate)
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    choice = ask(scheduler)
    assert choice.decode.worker.name != warm
    assert (choice.source is not None) is named
    assert choice.cached_tokens == (4096 if named else 0)


def test_a_prefill_worker_brings_what_a_decode_worker_has() -> None:
    scheduler = fleet("p1", "p2", "d1")
    warm = serve(scheduler, make_demand(4200, prefix=CHAIN))[1]
    scheduler.endpoints[warm].evicted_until = 5.0  # it has forgotten, the decode worker has not
    choice = ask(scheduler)
    assert choice.prefill
    assert choice.source is scheduler.endpoints["d1"]


def test_who_is_out_or_of_another_build_or_excluded_is_not_named() -> None:
    scheduler = fleet("d1", "d2", "d3")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    assert ask(scheduler).source is not None
    assert ask(scheduler, excluded=frozenset({warm})).source is None
    pool = scheduler.endpoints[warm].pool
    assert pool is not None
    pool.bar(scheduler.endpoints[warm])
    assert ask(scheduler).source is None
    other = make_scheduler(
        make_worker("old", revision="r1", kv_address="old:7000"),
        make_worker("new", revision="r2", kv_address="new:7000"),
    )
    tell(other, "old", 20_000.0)
    tell(other, "new", 20_000.0)
    (warm,) = serve(other, make_demand(4200, prefix=CHAIN))
    queue_prompt(other, warm, 1 << 30)
    choice = ask(other)
    assert choice.decode.worker.name != warm
    assert choice.source is None


def test_without_a_kv_port_nobody_pulls() -> None:
    scheduler = make_scheduler(make_worker("d1"), make_worker("d2"))
    tell(scheduler, "d1", 20_000.0)
    assert scheduler.endpoints["d1"].pull_rate is None


@given(
    loads=st.lists(st.integers(0, 200_000), min_size=3, max_size=3),
    rates=st.lists(st.sampled_from([None, 0.0, 100.0, 5e4]), min_size=3, max_size=3),
    split=st.booleans(),
)
def test_whoever_is_named_has_more_and_is_not_who_computes(
    loads: list[int], rates: list[float | None], split: bool
) -> None:
    names = ("p1", "p2", "d1") if split else ("d1", "d2", "d3")
    scheduler = fleet(*names)
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    for name, tokens, rate in zip(names, loads, rates, strict=True):
        tell(scheduler, name, rate)
        queue_prompt(scheduler, name, tokens)
    choice = ask(scheduler)
    computing = choice.prefill[0] if choice.prefill else choice.decode
    if choice.source is None:
        assert choice.pulled_tokens == 0
        return
    assert choice.source is not computing
    assert choice.source.pull_rate is not None
    assert computing.pull_rate is not None
    assert 256 <= choice.pulled_tokens <= choice.cached_tokens
    assert choice.source.worker.role in (Role.DECODE, Role.PREFILL)


def test_what_is_brought_is_work_of_who_brings_it() -> None:
    scheduler = fleet("d1", "d2", rate=4000.0)
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    tell(scheduler, "d1", 4000.0)
    tell(scheduler, "d2", 4000.0)
    queue_prompt(scheduler, warm, 50_000)
    demand = make_demand(4200, prefix=CHAIN)
    choice = ask(scheduler, demand)
    reservation = scheduler.reserve(choice, demand, 1.0)
    assert choice.pulled_tokens == 4096
    assert reservation.expected == pytest.approx(104 / 2000 + 4096 / 4000, abs=0.01)
    choice.expected, choice.work = reservation.expected, reservation.work
    assert describe_choice(choice)["queuedTokens"] == 0
    assert choice.decode.prefill_tokens == 104 + 2048


@pytest.mark.parametrize("given", [True, False])
def test_who_is_told_to_bring_something_is_not_slow(given: bool) -> None:
    """Whether or not who has it gives it away."""
    scheduler = fleet("d1", "d2", "d3", "d4", rate=2500.0 if given else 50_000.0)
    for name in scheduler.endpoints:
        for _ in range(10):
            scheduler.endpoints[name].speed.observe(100, 0.06)
            scheduler.endpoints[name].speed.observe(2000, 1.01)
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 500_000)
    left_out = {*scheduler.endpoints} - {warm}
    bringer = scheduler.endpoints[left_out.pop()]
    now = 1.0
    for _ in range(60):
        demand = make_demand(4200, prefix=CHAIN)
        choice = scheduler.choose(demand, now, left_out)
        assert choice is not None
        assert (choice.decode, choice.source) == (bringer, scheduler.endpoints[warm])
        reservation = scheduler.reserve(choice, demand, now)
        now += 104 / 2000 + 4096 / 2500 + 0.01 if given else 2.2
        reservation.first_token(now)
        reservation.release()
        scheduler.tick(now)
    assert not scheduler.ejections
    assert bringer.speed.value == pytest.approx(2000, rel=0.1)


def test_where_nobody_brings_anything_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(picker, "lower_costs", fail)
    monkeypatch.setattr(picker, "name_source", fail)
    scheduler = fleet("p1", "p2", "d1", "d2", rate=None)
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    assert ask(scheduler).cached_tokens == 4096


@given(rate=st.sampled_from([-0.0, 5e-324, 1e-300, 1e300, float(2**63)]), speed=st.sampled_from([0.0, 5e-324, 1e9]))
def test_rates_that_cannot_be_break_nothing(rate: float, speed: float) -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    for name in ("d1", "d2"):
        tell(scheduler, name, rate, speed)
    queue_prompt(scheduler, warm, 50_000)
    demand = make_demand(4200, prefix=CHAIN)
    choice = ask(scheduler, demand)
    scheduler.reserve(choice, demand, 1.0).release()
    assert all(endpoint.prefill_tokens in (0, 50_000) for endpoint in scheduler.endpoints.values())


def test_a_worker_that_tells_nothing_any_more_is_not_named() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    assert ask(scheduler).source is not None
    scheduler.miss(scheduler.endpoints[warm])
    assert ask(scheduler).source is None


def test_what_many_lack_is_brought_from_several() -> None:
    holders, others = [f"d{number}" for number in range(4)], [f"e{number}" for number in range(16)]
    scheduler = fleet(*holders)
    for session in range(64):
        demand = make_demand(4200, prefix=make_chain(session, 16, shared=12), affinity=session)
        choice = scheduler.choose(demand, 0.0, {*holders} - {holders[session % 4]})
        assert choice is not None
        reservation = scheduler.reserve(choice, demand, 0.0)
        scheduler.accept(choice, demand, reservation, 0.0)
        reservation.release()
    known = [make_worker(name, kv_address=f"{name}:7000") for name in (*holders, *others)]
    scheduler.apply_workers(known)
    for name in (*holders, *others):
        tell(scheduler, name, 20_000.0)
    for name in holders:
        queue_prompt(scheduler, name, 100_000)
    named: set[str] = set()
    for session in range(100, 116):
        choice = ask(scheduler, make_demand(4200, prefix=make_chain(session, 16, shared=12), affinity=session))
        assert choice.source is not None
        named.add(choice.source.worker.name)
    assert len(named) > 2
    assert named <= {*holders}


@pytest.mark.parametrize("held", [1000, 1001, 9000])
def test_who_holds_more_than_the_prompt_has_all_of_it(held: int) -> None:
    holder, other = (make_endpoint(name) for name in ("d1", "d2"))
    holder.pull_rate = other.pull_rate = 0.0
    costs = {other: 1500.0}
    weigh_pulls(costs, (holder, held), 1000, 1.5)
    assert costs == {other: 1000 * (0.25 + 0.25)}
