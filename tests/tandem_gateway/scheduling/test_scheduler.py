"""Workers come and go; the scheduler follows."""

from tandem_api.names import Role
from tandem_gateway.scheduling import Demand, Scheduler, Worker
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, build_chain


def worker(name: str, role: Role = Role.DECODE, port: int = 1) -> Worker:
    return Worker(name=name, address=f"{name}:{port}", role=role, revision="r1")


def demand(prompt: bytes = b"") -> Demand:
    return Demand(prompt_tokens=len(prompt) // 4 + 1, output_tokens=10, prefix=build_chain(prompt), affinity=1)


def test_known_workers_keep_their_state_and_lost_ones_are_returned() -> None:
    scheduler = Scheduler(disaggregated=False)
    scheduler.apply_workers([worker("a"), worker("b")])
    kept = scheduler.endpoints["a"]
    left = scheduler.apply_workers([worker("a"), worker("c")])
    assert [endpoint.worker.name for endpoint in left] == ["b"]
    assert scheduler.endpoints["a"] is kept
    assert set(scheduler.endpoints) == {"a", "c"}


def test_a_worker_that_came_back_elsewhere_is_a_new_endpoint() -> None:
    scheduler = Scheduler(disaggregated=False)
    scheduler.apply_workers([worker("a")])
    old = scheduler.endpoints["a"]
    assert scheduler.apply_workers([worker("a", port=2)]) == [old]
    assert scheduler.endpoints["a"].serial != old.serial


def test_a_request_returns_to_where_its_prefix_is_even_against_some_load() -> None:
    scheduler = Scheduler(disaggregated=True)
    scheduler.apply_workers([worker("d"), worker("p1", Role.PREFILL), worker("p2", Role.PREFILL)])
    wanted = demand(b"x" * CHUNK_BYTES * 20)
    first = scheduler.choose(wanted, 0.0)
    assert first is not None
    scheduler.reserve(first, wanted).release()
    first.prefill[0].prefill_tokens = 1000
    again = scheduler.choose(wanted, 0.0)
    assert again is not None
    assert again.prefill[0] is first.prefill[0]
    assert again.cached_tokens >= 2500
    assert again.uncached_tokens < 100


def test_endpoints_in_back_off_or_tried_already_are_left_out() -> None:
    scheduler = Scheduler(disaggregated=False)
    scheduler.apply_workers([worker("a"), worker("b")])
    scheduler.fail(scheduler.endpoints["a"], 10.0)
    choice = scheduler.choose(demand(), 10.1)
    assert choice is not None
    assert choice.decode.worker.name == "b"
    assert scheduler.choose(demand(), 10.1, {"b"}) is None
    later = scheduler.choose(demand(), 11.0, {"b"})
    assert later is not None
    assert later.decode.worker.name == "a"
