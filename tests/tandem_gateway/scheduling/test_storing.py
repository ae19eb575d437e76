"""A store that the workers of a build share: what a worker that has not computed a prompt is charged for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling import Endpoint, Scheduler, Share, describe_choice, picker
from tandem_gateway.scheduling.hearsay import name_prompt
from tandem_gateway.scheduling.pulling import weigh_stored
from tandem_gateway.scheduling.storing import Store

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

SHARE = Share(20_000.0, 1_000_000)


def fleet(*names: str, share: Share | None = SHARE, revision: str = "r1") -> Scheduler:
    scheduler = make_scheduler(*[make_worker(name, P if name[0] == "p" else D, revision) for name in names])
    for name in names:
        tell(scheduler, name, share)
    return scheduler


def tell(scheduler: Scheduler, name: str, share: Share | None, speed: float = 2000.0) -> None:
    endpoint = scheduler.endpoints[name]
    scheduler.observe(endpoint, 0.0, queued_tokens=0, share=share)
    endpoint.speed.value = speed


def test_who_lacks_a_prompt_that_is_in_the_store_is_charged_its_load() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    (other,) = {"d1", "d2"} - {warm}
    costs = ask(scheduler).offers[0][5]
    assert costs[scheduler.endpoints[warm]] == 1.5 * 104
    assert costs[scheduler.endpoints[other]] == pytest.approx(1.5 * 104 + 4096 * (0.1 + 0.25))
    queue_prompt(scheduler, warm, 8000)
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.source) == (other, None)
    assert (choice.stored_tokens, choice.uncached_tokens, choice.known_tokens) == (4096, 104, 4096)
    assert choice.pulled_work == 409
    assert describe_choice(choice)["storedTokens"] == 4096


def test_who_has_it_and_nothing_to_do_keeps_it() -> None:
    scheduler = fleet("d1", "d2", "d3")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.stored_tokens, choice.store) == (warm, 0, None)


def test_what_is_loaded_is_work_of_who_loads_it_and_teaches_no_speed() -> None:
    scheduler = fleet("d1", "d2", share=Share(4000.0, 1_000_000))
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    scheduler.endpoints["d1"].speed.value = scheduler.endpoints["d2"].speed.value = 2000.0
    demand = make_demand(4200, prefix=CHAIN)
    choice = ask(scheduler, demand)
    reservation = scheduler.reserve(choice, demand, 1.0)
    assert reservation.expected == pytest.approx(104 / 2000 + 4096 / 4000, abs=0.01)
    assert choice.decode.prefill_tokens == 104 + 2048
    before = choice.decode.speed.samples
    reservation.first_token(3.0)
    reservation.release()
    assert choice.decode.speed.samples == before


@pytest.mark.parametrize(
    ("rate", "charged"), [(0.0, 0.25 + 0.25), (20_000.0, 0.1 + 0.25), (2_100.0, 2000 / 2100 + 0.25), (1_900.0, 1.5)]
)
def test_the_price_follows_the_rate_and_is_never_above_computing(rate: float, charged: float) -> None:
    scheduler = fleet("d1", "d2", share=Share(rate, 1_000_000))
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    for name in ("d1", "d2"):
        tell(scheduler, name, Share(rate, 1_000_000))
    costs = ask(scheduler).offers[0][5]
    (other,) = [endpoint for endpoint in costs if endpoint.worker.name != warm]
    assert costs[other] == pytest.approx(1.5 * 104 + 4096 * charged)


def test_a_prefill_worker_loads_what_a_decode_worker_put_there() -> None:
    scheduler = fleet("p1", "p2", "d1", "d2")
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    for endpoint in scheduler.endpoints.values():
        endpoint.evicted_until = 5.0  # memory has forgotten
    choice = ask(scheduler)
    assert choice.prefill
    assert choice.stored_tokens == 4096


def test_a_request_that_still_runs_has_put_nothing_there() -> None:
    scheduler = fleet("d1", "d2")
    demand = make_demand(4200, prefix=CHAIN)
    choice = ask(scheduler, demand)
    reservation = scheduler.reserve(choice, demand, 0.0)
    scheduler.accept(choice, demand, reservation, 0.0)
    reservation.first_token(0.5)
    queue_prompt(scheduler, choice.decode.worker.name, 50_000)
    assert ask(scheduler).stored_tokens == 0
    reservation.release()
    assert ask(scheduler).stored_tokens == 4096


def test_what_was_there_before_stays_while_the_next_turn_runs() -> None:
    scheduler = fleet("d1", "d2")
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    demand = make_demand(6300, prefix=make_chain(1, 24))
    choice = ask(scheduler, demand)
    scheduler.accept(choice, demand, scheduler.reserve(choice, demand, 1.0), 1.0)
    queue_prompt(scheduler, choice.decode.worker.name, 50_000)
    assert ask(scheduler).stored_tokens == 4096


def test_of_a_turn_that_runs_no_more_is_there_than_of_the_one_before() -> None:
    """Many may ask for one long text at once, of which only the beginning has been there before."""
    scheduler = fleet("d1", "d2")
    serve(scheduler, make_demand(2100, prefix=make_chain(1, 8)))
    demand = make_demand(6300, prefix=make_chain(1, 24))
    choice = ask(scheduler, demand)
    reservation = scheduler.reserve(choice, demand, 1.0)
    scheduler.accept(choice, demand, reservation, 1.0)
    queue_prompt(scheduler, choice.decode.worker.name, 50_000)
    assert ask(scheduler, demand).stored_tokens == 2048
    reservation.release()
    assert ask(scheduler, demand).stored_tokens == 6144


def test_it_outlives_every_worker_that_put_it_there() -> None:
    scheduler = fleet("d1", "d2")
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    for gone, new in (("d1", "e1"), ("d2", "e2")):
        kept = [endpoint.worker for name, endpoint in scheduler.endpoints.items() if name != gone]
        scheduler.apply_workers([*kept, make_worker(new)])
        tell(scheduler, new, SHARE)
    assert {*scheduler.endpoints} == {"e1", "e2"}
    assert ask(scheduler).stored_tokens == 4096


def test_what_it_has_taken_in_since_pushes_out_what_was_there() -> None:
    scheduler = fleet("d1", "d2", share=Share(20_000.0, 5_000, 100))
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    tell(scheduler, "d1", Share(20_000.0, 5_000, 6_000))
    assert ask(scheduler).stored_tokens == 4096
    tell(scheduler, "d2", Share(20_000.0, 5_000, 4_300))
    assert ask(scheduler).stored_tokens == 0


def test_a_worker_that_counts_anew_pushes_out_only_what_it_has_computed() -> None:
    scheduler = fleet("d1", "d2", share=Share(20_000.0, 5_000, 10**6))
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    tell(scheduler, "d1", Share(20_000.0, 5_000, 9_000))
    assert ask(scheduler).stored_tokens == 4096


def test_a_store_that_all_workers_have_lost_is_empty_when_they_have_it_again() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    tell(scheduler, "d1", None)
    tell(scheduler, "d1", SHARE)
    assert ask(scheduler).stored_tokens == 4096
    scheduler.miss(scheduler.endpoints["d1"])
    tell(scheduler, "d2", None)
    assert ask(scheduler).stored_tokens == 0
    for name in ("d1", "d2"):
        tell(scheduler, name, SHARE)
    assert ask(scheduler).stored_tokens == 0


def test_builds_do_not_share() -> None:
    scheduler = fleet("d1", "d2")
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    scheduler.apply_workers([make_worker("e1", revision="r2")])
    tell(scheduler, "e1", SHARE)
    assert ask(scheduler).stored_tokens == 0


def test_who_uses_no_store_is_charged_all_of_it() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    (other,) = {"d1", "d2"} - {warm}
    tell(scheduler, other, None)
    costs = ask(scheduler).offers[0][5]
    assert costs[scheduler.endpoints[other]] == 1.5 * 4200


def test_what_another_gateway_sent_is_there_too() -> None:
    scheduler = fleet("d1", "d2")
    name = name_prompt(CHAIN[-1], 0, "")
    scheduler.observe(scheduler.endpoints["d1"], 0.0, queued_tokens=0, share=SHARE, prompts=[name])
    queue_prompt(scheduler, "d1", 50_000)
    choice = ask(scheduler)
    assert (choice.decode.worker.name, choice.stored_tokens) == ("d2", 4096)


@pytest.mark.parametrize("stream", [True, False])
def test_what_another_gateway_sent_is_there_once_its_answer_is_likely_to_have_ended(stream: bool) -> None:
    """Of a prompt whose answer is under way nothing is in the store: who loads it now would find nothing."""
    scheduler = fleet("d1", "d2")
    demand = replace(make_demand(4200, prefix=make_chain(2, 16)), stream=stream)
    choice = ask(scheduler, demand)
    for _ in range(60):  # answers that take 5 s
        reservation = scheduler.reserve(choice, demand, 1.0)
        scheduler.accept(choice, demand, reservation, 3.1 if stream else 6.0)
        if stream:
            reservation.first_token(3.1)
            choice.decode.hear(6.0)
        else:
            reservation.complete(6.0)
        reservation.release()
    store = choice.decode.store
    assert store is not None
    assert store.answer_seconds == pytest.approx(5.0, rel=0.01)
    name = name_prompt(CHAIN[-1], 0, "")
    scheduler.observe(scheduler.endpoints["d1"], 10.0, queued_tokens=0, share=SHARE, prompts=[name])
    queue_prompt(scheduler, "d1", 50_000)
    for now, stored in ((11.0, 0), (14.0, 0), (15.5, 4096)):
        found = scheduler.choose(make_demand(4200, prefix=CHAIN), now)
        assert found is not None
        assert (found.decode.worker.name, found.stored_tokens) == ("d2", stored)


@pytest.mark.parametrize(
    ("pulled", "cached", "found"),
    [
        (0, 0, 0.9),  # nothing was there, and it was believed from the prompt's beginning on
        (1024, 0, 1.0),  # the other worker gave nothing: what comes after it was not asked for
        (1024, 1000, 1.0),
        (1024, 2048, 0.9),  # it gave all of its part, and the store nothing
        (1024, 2560, 0.95),
        (1024, 3072, 1.0),
    ],
)
def test_a_worker_that_gives_nothing_does_not_speak_against_the_store(pulled: int, cached: int, found: float) -> None:
    """Of 3,072 cached tokens 1,024 were at home, as many elsewhere or at home too, and as many in the store."""
    store = Store()
    endpoint = make_endpoint()
    store.join(endpoint, SHARE)
    choice = picker.Choice(endpoint, [], 100, 3072, 3072, [], pulled_tokens=pulled, store=store, stored_tokens=1024)
    choice.learn_stored(cached)
    assert store.found == pytest.approx(found)


def test_what_turns_out_not_to_be_there_is_believed_less_and_charged_more() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    choice = ask(scheduler)
    assert choice.store is not None
    for _ in range(60):
        choice.learn_stored(0)
    assert choice.store.found < 0.01
    scheduler.endpoints[warm].charge(-50_000, 0)
    costs = ask(scheduler).offers[0][5]
    (other,) = [endpoint for endpoint in costs if endpoint.worker.name != warm]
    assert costs[other] == pytest.approx(1.5 * 4200, rel=0.01)
    queue_prompt(scheduler, warm, 50_000)
    choice = ask(scheduler)
    assert choice.pulled_work == pytest.approx(4096, rel=0.01)
    for _ in range(60):
        choice.learn_stored(4160)
    assert choice.store is not None
    assert choice.store.found > 0.99


def test_a_prompt_of_which_each_token_is_scored_is_loaded_from_nowhere_and_teaches_nothing() -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    queue_prompt(scheduler, warm, 50_000)
    demand = make_demand(4200, prefix=CHAIN)
    demand.scored = True
    choice = ask(scheduler, demand)
    assert (choice.store, choice.stored_tokens) == (None, 0)
    choice.learn_stored(0)
    store = scheduler.endpoints["d1"].store
    assert store is not None
    assert store.found == 1.0


def test_where_there_is_no_store_nothing_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(picker, "lower_costs", fail)
    monkeypatch.setattr(picker, "count_stored", fail)
    scheduler = fleet("p1", "p2", "d1", "d2", share=None)
    serve(scheduler, make_demand(4200, prefix=CHAIN))
    assert ask(scheduler).cached_tokens == 4096


@given(
    rate=st.sampled_from([-0.0, 5e-324, 1e-300, 1e300, float(2**63)]),
    speed=st.sampled_from([0.0, 5e-324, 1e9]),
    room=st.sampled_from([0, 1, 2**63 - 1]),
    computed=st.sampled_from([0, 2**63 - 1]),
)
def test_figures_that_cannot_be_break_nothing(rate: float, speed: float, room: int, computed: int) -> None:
    scheduler = fleet("d1", "d2")
    (warm,) = serve(scheduler, make_demand(4200, prefix=CHAIN))
    for name in ("d1", "d2"):
        tell(scheduler, name, Share(rate, room, computed), speed)
    queue_prompt(scheduler, warm, 50_000)
    demand = make_demand(4200, prefix=CHAIN)
    choice = ask(scheduler, demand)
    scheduler.reserve(choice, demand, 1.0).release()
    assert all(endpoint.prefill_tokens in (0, 50_000) for endpoint in scheduler.endpoints.values())
    scheduler.apply_workers([])
    assert len(scheduler.endpoints) == 0


@given(
    costs=st.lists(st.integers(0, 6000), min_size=1, max_size=4),
    held=st.integers(0, 8000),
    prompt=st.integers(1, 6000),
    found=st.floats(0, 1),
    rate=st.sampled_from([0.0, 500.0, 2000.0, 1e6]),
)
def test_a_store_makes_nobody_dearer_and_none_cheaper_than_who_has_it(
    costs: list[int], held: int, prompt: int, found: float, rate: float
) -> None:
    store, priced = Store(), dict[Endpoint, float]()
    store.found = found
    for number, missing in enumerate(costs):
        endpoint = make_endpoint(f"d{number}")
        endpoint.store, endpoint.speed.value = store, 2000.0
        store.join(endpoint, Share(rate, 10_000))
        priced[endpoint] = 1.5 * min(missing, prompt)
    plain = dict(priced)
    weigh_stored(priced, plain, {store: held}, prompt, 1.5)
    for endpoint, cost in priced.items():
        least = 1.5 * max(0, prompt - held)
        assert min(plain[endpoint], least) - 1e-6 <= cost <= plain[endpoint] + 1e-6
