"""Workers come and go; the scheduler follows, and remembers only what workers took."""

import pytest
from tandem_gateway.scheduling import Outcome, Scheduler
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, MIN_ENTRIES

from tests.tandem_gateway.scheduling.fleet import D, P, make_chain, make_demand, make_scheduler, make_worker, serve


def test_known_workers_keep_their_state_and_lost_ones_are_returned() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    kept = scheduler.endpoints["a"]
    left = scheduler.apply_workers([make_worker("a"), make_worker("c")])
    assert [endpoint.worker.name for endpoint in left] == ["b"]
    assert left[0].gone
    assert scheduler.endpoints["a"] is kept
    assert set(scheduler.endpoints) == {"a", "c"}


def test_a_worker_that_came_back_elsewhere_is_a_new_endpoint_without_a_past() -> None:
    scheduler = make_scheduler(make_worker("a"))
    demand = make_demand(2048, prefix=make_chain(1, 8))
    serve(scheduler, demand)
    old = scheduler.endpoints["a"]
    assert scheduler.apply_workers([make_worker("a", kv_tokens=5)]) == [old]
    choice = scheduler.choose(demand, 0.0)
    assert choice is not None
    assert choice.decode.serial != old.serial
    assert choice.cached_tokens == 0


def test_a_request_returns_to_where_its_prefix_is() -> None:
    scheduler = make_scheduler(make_worker("d"), make_worker("p1", P), make_worker("p2", P))
    wanted = make_demand(5120, prefix=make_chain(1, 20))
    first = serve(scheduler, wanted)
    scheduler.endpoints[first[1]].charge(1000, 0)
    again = scheduler.choose(wanted, 0.0)
    assert again is not None
    assert again.prefill[0].worker.name == first[1]
    assert again.cached_tokens >= 5000
    assert again.uncached_tokens <= 120


def test_what_no_worker_accepted_leaves_no_trace() -> None:
    """Refused prompts of 8 MB must not push out what is known."""
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    known = make_demand(2048, prefix=make_chain(1, 8))
    serve(scheduler, known)
    for session in range(2, 12):
        refused = make_demand(2_000_000, prefix=make_chain(session, 8192))
        choice = scheduler.choose(refused, 0.0)
        assert choice is not None
        scheduler.reserve(choice, refused, 0.0).release()
    choice = scheduler.choose(known, 0.0)
    assert choice is not None
    assert choice.cached_tokens == 2048
    assert len(scheduler.index) == 8


def test_the_index_grows_with_the_fleet() -> None:
    scheduler = Scheduler()
    assert scheduler.index.generation == MIN_ENTRIES
    scheduler.apply_workers([make_worker(f"w{index}") for index in range(16)])
    assert scheduler.index.generation >= 16 * (1 << 20) * scheduler.estimator.bytes_per_token / CHUNK_BYTES


def test_a_choice_can_be_asked_for_without_being_taken() -> None:
    scheduler = make_scheduler(*(make_worker(f"w{index}") for index in range(4)))
    names = {scheduler.choose(make_demand(), 0.0).decode.worker.name for _ in range(20)}  # type: ignore[union-attr]
    assert len(names) == 1


def test_what_a_worker_tells_corrects_what_this_gateway_counted() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    demand = make_demand(1000, affinity=0)
    scheduler.observe(scheduler.endpoints["a"], 0.0, queued_tokens=50_000)
    for _ in range(10):
        choice = scheduler.choose(demand, 0.0)
        assert choice is not None
        assert choice.decode.worker.name == "b"
        scheduler.reserve(choice, demand, 0.0)
    scheduler.observe(scheduler.endpoints["b"], 0.0, queued_tokens=10_000)
    assert scheduler.endpoints["b"].others == 0
    scheduler.observe(scheduler.endpoints["a"], 0.0, queued_tokens=0)
    assert scheduler.endpoints["a"].load == 0


def test_a_prompt_is_in_use_until_its_request_ends() -> None:
    """A worker says that it has forgotten what was last used before t: what it was still answering then it has."""
    scheduler = make_scheduler(make_worker("a"))
    endpoint = scheduler.endpoints["a"]
    demand = make_demand(2000, prefix=make_chain(1, 8))
    choice = scheduler.choose(demand, 10.0)
    assert choice is not None
    reservation = scheduler.reserve(choice, demand, 10.0)
    scheduler.accept(choice, demand, reservation, 10.0)
    reservation.first_token(10.5)
    reservation.progress(10, 50.0)
    reservation.release()
    scheduler.observe(endpoint, 60.0, queued_tokens=0, evicted_until=49.0)
    assert scheduler.index.match(demand.prefix) == {endpoint: 8}
    scheduler.observe(endpoint, 60.0, queued_tokens=0, evicted_until=51.0)
    assert scheduler.index.match(demand.prefix) == {}


def test_the_index_is_sized_by_what_workers_tell_of_their_caches() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    before = scheduler.index.generation
    for endpoint in scheduler.endpoints.values():
        scheduler.observe(endpoint, 0.0, queued_tokens=0, kv_tokens=64_000_000)
    assert scheduler.index.generation > before


def test_back_off_and_tried_ones_are_left_out_together() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"))
    scheduler.report(scheduler.endpoints["a"], Outcome.REFUSED, 10.0)
    choice = scheduler.choose(make_demand(), 10.1)
    assert choice is not None
    assert choice.decode.worker.name == "b"
    assert scheduler.choose(make_demand(), 10.1, {"b"}) is None
    later = scheduler.choose(make_demand(), 11.0, {"b"})
    assert later is not None
    assert later.decode.worker.name == "a"


@pytest.mark.parametrize("roles", [(D, D), (P, D)])
def test_work_is_bounded_by_candidates_not_by_endpoints(roles: tuple) -> None:
    """A decision among 1,024 endpoints looks at as many as one among 64: counted, not timed."""
    looked = {}
    for count in (64, 1024):
        scheduler = make_scheduler(*(make_worker(f"w{index}", roles[index % 2]) for index in range(count)))
        for endpoint in scheduler.endpoints.values():
            endpoint.charge(100, 0)
        seen = []
        original = type(endpoint).find_queue

        def find_queue(self, now: float, original=original, seen=seen) -> float:
            seen.append(self)
            return original(self, now)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(endpoint), "find_queue", find_queue)
            scheduler.choose(make_demand(), 0.0)
        looked[count] = len(seen)
    assert 0 < looked[1024] <= looked[64] + 2 <= 16
