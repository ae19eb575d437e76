"""Round robin over workers that share a store finds what affinity finds with as many bytes on disks of their own."""

from __future__ import annotations

import pytest
from tandem_gateway.scheduling import Scheduler
from tandem_sim.synthetic import make_conversations
from tandem_sim.traces import BLOCK_TOKENS, Arrival

from bench.kv.replay import PEER_BANDWIDTH, StoringTandem, TieredFleet
from bench.kv.shared import SharedStore
from bench.routing.policies import RoundRobin, Tandem
from bench.routing.simulate import Recorded, replay

WORKERS, MEMORY, DISK = 4, 1 << 15, 1 << 19


def build_fleet(**more: float) -> TieredFleet:
    fleet: dict[str, float] = {"tokens_per_second": 16_000.0, "kv_tokens": MEMORY} | more
    return TieredFleet(WORKERS, **fleet)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def arrivals() -> list[Arrival]:
    return make_conversations(sessions=120, seconds=300)


@pytest.fixture(scope="module")
def affine(arrivals: list[Arrival]) -> float:
    fleet = build_fleet(disk_tokens=DISK, write_through=True)
    return replay(Recorded(arrivals), fleet, Tandem(fleet, kv_tokens=MEMORY + DISK)).hit_ratio()


def test_round_robin_with_a_store_finds_what_affinity_finds_with_as_many_bytes(
    arrivals: list[Arrival], affine: float
) -> None:
    fleet = build_fleet(store_tokens=WORKERS * DISK, peer_bandwidth=PEER_BANDWIDTH)
    seen = replay(Recorded(arrivals), fleet, RoundRobin(fleet))
    alone = build_fleet()
    without = replay(Recorded(arrivals), alone, RoundRobin(alone)).hit_ratio()
    assert seen.hit_ratio() >= affine - 0.01
    assert without < affine - 0.1
    assert fleet.stored_tokens > 0.1 * sum(seen.prompt)


def test_the_gateway_that_prices_a_store_finds_as_much_and_is_sooner_than_round_robin(
    arrivals: list[Arrival], affine: float
) -> None:
    fleet = build_fleet(store_tokens=WORKERS * DISK, peer_bandwidth=PEER_BANDWIDTH)
    policy = StoringTandem(fleet, kv_tokens=MEMORY, store_tokens=WORKERS * DISK)
    seen = replay(Recorded(arrivals), fleet, policy)
    turns = build_fleet(store_tokens=WORKERS * DISK, peer_bandwidth=PEER_BANDWIDTH)
    assert seen.hit_ratio() >= affine - 0.01
    assert seen.ttft_at(90) <= replay(Recorded(arrivals), turns, RoundRobin(turns)).ttft_at(90)
    (scheduler,) = policy._schedulers
    assert isinstance(scheduler, Scheduler)
    assert all(endpoint.store is not None and endpoint.store.found > 0.9 for endpoint in scheduler.endpoints.values())


def test_a_store_that_is_full_gives_up_what_was_used_longest_ago() -> None:
    store = SharedStore(4)
    names = [bytes([number]) for number in range(6)]
    store.put(names[:4])
    store.use(names[:2])
    store.put(names[4:])
    assert [name in names[:2] or name in names[4:] for name in names] == [True, True, False, False, True, True]
    assert store.count_leading(names) == 2
    assert store.count_leading(names[2:]) == 0
    assert (len(store), store.num_written) == (4, 6)


def test_who_lacks_a_prompt_loads_it_where_that_is_sooner() -> None:
    prompt = Arrival(0.0, 8 * BLOCK_TOKENS, 1, tuple(range(1, 8)), 1)
    later = Arrival(10.0, 8 * BLOCK_TOKENS, 1, tuple(range(1, 8)), 1)
    for bandwidth, hits in ((PEER_BANDWIDTH, 7 * BLOCK_TOKENS), (1e6, 0)):
        fleet = build_fleet(store_tokens=DISK, peer_bandwidth=bandwidth)
        assert fleet.serve(0, prompt).hit_tokens == 0
        assert fleet.serve(1, later).hit_tokens == hits
