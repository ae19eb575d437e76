"""Who has what many prompts begin with."""

from tandem_gateway.scheduling.prefix import BRANCHES, MAX_SHARED, PrefixIndex
from tandem_gateway.scheduling.shared import MAX_SHARERS, Holding, SharedPrefix

from tests.tandem_gateway.scheduling.fleet import (
    count_shared,
    make_chain,
    make_demand,
    make_endpoint,
    make_scheduler,
    make_worker,
)


def test_all_holders_are_found_in_turns() -> None:
    scheduler = make_scheduler(*(make_worker(f"d{n}") for n in range(40)))
    endpoints = list(scheduler.endpoints.values())
    pool = endpoints[0].pool
    assert pool is not None
    shared = SharedPrefix(1, 4, None)
    for endpoint in endpoints[:20]:
        shared.hold(Holding(endpoint, 0.0))
    seen = {endpoint for _ in range(10) for endpoint in shared.sample(3, pool)}
    assert seen == set(endpoints[:20])
    for endpoint in endpoints[:19]:
        endpoint.gone = True
    for _ in range(20):
        shared.sample(3, pool)
    assert shared.sample(3, pool) == [endpoints[19]]
    assert list(shared.holders) == [endpoints[19]]
    endpoints[19].gone = True
    assert shared.sample(3, pool) == shared.sample(3, pool) == []


def test_those_of_another_pool_or_left_out_are_no_candidates() -> None:
    scheduler = make_scheduler(make_worker("a"), make_worker("b"), make_worker("c", revision="r2"))
    shared = SharedPrefix(1, 4, None)
    for endpoint in scheduler.endpoints.values():
        shared.hold(Holding(endpoint, 0.0))
    a, b = scheduler.endpoints["a"], scheduler.endpoints["b"]
    pool = a.pool
    assert pool is not None
    pool.bar(b)
    assert {endpoint for _ in range(4) for endpoint in shared.sample(3, pool)} == {a}


def test_holders_and_shared_entries_are_bounded() -> None:
    shared = SharedPrefix(1, 4, None)
    for number in range(2 * MAX_SHARERS):
        shared.hold(Holding(make_endpoint(f"w{number}"), 0.0))
    assert len(shared.holders) <= MAX_SHARERS
    index, endpoint = PrefixIndex(), make_endpoint()
    for system in range(MAX_SHARED + 5):
        for session in range(BRANCHES + 1):
            index.record([system, 10**6 + system, 10**7 + system * 100 + session], (endpoint,), 0.0)
    assert len(index._shared) == MAX_SHARED
    assert count_shared(index, [MAX_SHARED + 4, 10**6 + MAX_SHARED + 4, 9**9]) == 2
    assert count_shared(index, [0, 10**6, 9**9]) == 0


def make_shared(index: PrefixIndex, *start: int) -> SharedPrefix:
    """Prompts that part after `start`."""
    for session in range(BRANCHES + 1):
        index.record([*start, start[-1] * 10**6 + session], (make_endpoint(),), 0.0)
    shared = index.find_shared(start[-1])
    assert shared is not None
    return shared


def test_a_prefix_that_is_shared_no_more_keeps_nobody() -> None:
    """Entries of the index name it for as long as they are there: a client could fill the memory with such."""
    index, late = PrefixIndex(), make_endpoint("late")
    shared = make_shared(index, 1)
    for system in range(2, MAX_SHARED + 2):
        make_shared(index, system)
    assert not shared.live
    index.share(shared, (Holding(late, 0.0),))
    assert not shared.holders


def test_what_a_used_prefix_begins_with_is_used_too() -> None:
    index = PrefixIndex()
    make_shared(index, 1)
    inner = make_shared(index, 1, 2)
    for system in range(3, MAX_SHARED + 3):
        make_shared(index, system)
        index.record([1, 2, 10**12 + system], (make_endpoint(),), 0.0)
    assert index.find_shared(2) is inner
    assert index.find_shared(1) is inner.parent


def test_a_conversation_goes_to_who_has_its_system_prompt_while_few_want_it() -> None:
    """Of 64 workers one application in fifty needs a few, not all: each other one would compute its prompt again."""
    scheduler = make_scheduler(*(make_worker(f"d{n}") for n in range(64)))
    used: dict[int, set[str]] = {}
    for number in range(3000):
        application = number % 50
        chain = make_chain(10_000 + application, 40) + make_chain(number, 4)
        demand = make_demand(11_264, prefix=chain, affinity=number * 0x9E3779B97F4A7C15 % 2**64)
        choice = scheduler.choose(demand, number / 10)
        assert choice is not None
        reservation = scheduler.reserve(choice, demand, number / 10)
        scheduler.accept(choice, demand, reservation, number / 10)
        reservation.first_token(number / 10)
        reservation.release()
        used.setdefault(application, set()).add(choice.decode.worker.name)
    assert max(len(workers) for workers in used.values()) <= 16
    assert len(set().union(*used.values())) >= 60
